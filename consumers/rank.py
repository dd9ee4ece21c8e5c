"""Priorities inside a side queue: a request that came back from a delay goes ahead of its tenant's other requests."""

from typing import Final

HIGHEST: Final = 9
"""The highest priority that a requester may set."""
BACK: Final = HIGHEST + 1
NONE_SAID: Final = BACK + HIGHEST + 1


def rank(priority: int | None, *, is_fresh: bool) -> int | None:
    """The priority with which a request is set aside."""
    if is_fresh:
        return priority
    return NONE_SAID if priority is None else BACK + min(priority, HIGHEST)


def restored(priority: int | None) -> int | None:
    """The requester's own priority of a request that was set aside."""
    if priority is None or priority < BACK:
        return priority
    return None if priority >= NONE_SAID else priority - BACK
