"""Priorities inside a side queue: what came back from a retry or a delay goes ahead of its tenant's others."""

from typing import Final

HIGHEST: Final = 9
"""Of what a requester may say."""
BACK: Final = HIGHEST + 1
NONE_SAID: Final = BACK + HIGHEST + 1


def rank(priority: int | None, *, is_fresh: bool) -> int | None:
    """What a request is set aside with."""
    if is_fresh:
        return priority
    return NONE_SAID if priority is None else BACK + min(priority, HIGHEST)


def restored(priority: int | None) -> int | None:
    """What the requester said, of a request that was set aside."""
    if priority is None or priority < BACK:
        return priority
    return None if priority >= NONE_SAID else priority - BACK
