"""Computes the priority of a request in a side queue: a request that was delayed or retried goes ahead of fresh
requests of the same tenant.

A fresh request keeps its priority (0 to 9, or none). A delayed one gets 10 to 19 for 0 to 9, and 20 for none, so that
the requester's own priority can be computed from it.
"""

from typing import Final

HIGHEST: Final = 9
"""The highest priority that a requester may set."""
DELAYED_BASE: Final = HIGHEST + 1
DELAYED_WITHOUT_PRIORITY: Final = DELAYED_BASE + HIGHEST + 1


def rank(priority: int | None, *, is_fresh: bool) -> int | None:
    """The priority with which a request is published to a side queue. `priority`: as the requester set it; None: not
    set. `is_fresh`: the request was in no delay."""
    if is_fresh:
        return priority
    return DELAYED_WITHOUT_PRIORITY if priority is None else DELAYED_BASE + min(priority, HIGHEST)


def original_priority(priority: int | None) -> int | None:
    """The priority as the requester set it (None: not set), from the priority in a side queue."""
    if priority is None or priority < DELAYED_BASE:
        return priority
    return None if priority >= DELAYED_WITHOUT_PRIORITY else priority - DELAYED_BASE
