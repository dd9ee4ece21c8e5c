"""Computes the priority of a request in a side queue, that is, in a queue for requests of tenants that use more than
their share of a lane. A request that was delayed or retried goes ahead of fresh requests, that is, of those that were
neither delayed nor retried.

A fresh request keeps the priority that its requester set (0 to 9, or none). A delayed or retried request gets that
priority plus 10, or 20 if the requester set none, so that the requester's priority can be computed from it.
"""

from typing import Final

HIGHEST: Final = 9
"""The highest priority that a requester may set."""
DELAYED_BASE: Final = HIGHEST + 1
DELAYED_WITHOUT_PRIORITY: Final = DELAYED_BASE + HIGHEST + 1


def rank(priority: int | None, *, is_fresh: bool) -> int | None:
    """The priority with which a request is published to a side queue. `priority`: the priority that the requester set;
    None: it set none. `is_fresh`: whether the request was never delayed or retried."""
    if is_fresh:
        return priority
    return DELAYED_WITHOUT_PRIORITY if priority is None else DELAYED_BASE + min(priority, HIGHEST)


def original_priority(priority: int | None) -> int | None:
    """The priority that the requester set (None if it set none), computed from the request's priority in a side
    queue."""
    if priority is None or priority < DELAYED_BASE:
        return priority
    return None if priority >= DELAYED_WITHOUT_PRIORITY else priority - DELAYED_BASE
