"""Measures how many requests of a lane end each second, in all workers together. The workers count them in the store,
where a gateway reads the result."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from consumers.capacity.activity import LaneActivity
from consumers.state.base import Allowances, StoreUnavailable

PERIOD_S: Final = 60
"""The length, in seconds, of the periods in which the ended requests of a lane are counted, to compute how many end in
a second."""
NOTE_EVERY_S: Final = 5.0
"""The seconds between two writes of the number of ended requests to the store."""
SEEN_AT_LEAST_S: Final = 20.0
"""At the beginning of each period, the number of requests that end in a second counts as unknown for this many seconds,
because the few requests that have ended by then give a random result."""
UNLIMITED: Final = 1e15


async def noting(store: Allowances, activities: Sequence[LaneActivity]) -> None:
    """Add the requests that end in this process to the count in the store, until cancelled. Requests that cannot be
    added because the store is unavailable are added later."""
    noted = {activity.lane: activity.ended for activity in activities}
    while True:
        await asyncio.sleep(NOTE_EVERY_S)  # one write for many requests, because nothing waits for the count
        for activity in activities:
            if ended := activity.ended - noted[activity.lane]:
                with suppress(StoreUnavailable):
                    await store.take(_name(activity.lane), ended, limit=UNLIMITED, period_s=PERIOD_S)
                    noted[activity.lane] += ended


async def per_s(store: Allowances, lane: str) -> float | None:
    """How many requests of a lane end each second, as the workers have counted them in the store in the current period.
    None if the period has just begun, so that the rate is not known, or if no request has ended in it. Raises
    StoreUnavailable."""
    taken = await store.take(_name(lane), 0, limit=UNLIMITED, period_s=PERIOD_S)
    seen_s = PERIOD_S - taken.resets_in_s
    return taken.used / seen_s if taken.used and seen_s >= SEEN_AT_LEAST_S else None


def _name(lane: str) -> str:
    return f"ended:{lane}"
