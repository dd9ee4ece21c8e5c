"""Estimates a request's position in its lane, and when it may start. The broker and the store are asked at most once a
second for each lane."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from consumers.capacity import pace
from consumers.state.base import Allowances, StoreUnavailable
from lanekeeper import Client

AGE_S = 1.0
"""For how many seconds an estimate of the position in a lane is used before a new one is made."""
WITHIN_S = 0.5
"""The broker and the store must answer within this many seconds; otherwise the position is unknown."""
PACE_AGE_S = 60.0
"""For how many seconds the last known pace of a lane (how many of its requests end in a second) is used if the store
has no newer one."""


@dataclass(frozen=True, slots=True)
class Place:
    """The estimated position of a waiting request in its lane, and when it may start."""

    position: int
    """How many requests are ahead of the request. This is an upper bound: some of the counted requests may be behind
    it."""
    starts_in_s: float | None
    """After how many seconds the request may start, if the lane goes on at its pace of the last minute. None: the pace
    is unknown, or no worker consumes the lane."""


class Positions:
    """Estimates the positions of waiting requests. For each lane it computes only the position of the last request in
    the intake (the queue of new requests), and gives it as the position of every request that waits there."""

    def __init__(self, client: Client, store: Allowances) -> None:
        self._client = client
        self._store = store
        self._places: dict[str, tuple[float, Place | None]] = {}
        self._paces: dict[str, tuple[float, float]] = {}

    async def of(self, lane: str) -> Place | None:
        """The estimated position of a request that waits in the lane, and when it may start; None if this is
        unknown."""
        now_s = asyncio.get_running_loop().time()
        at_s, place = self._places.get(lane, (-AGE_S, None))
        if now_s - at_s >= AGE_S:
            self._places[lane] = now_s, place  # so that other calls use the old estimate instead of asking as well
            place = await self._estimate(lane)
            self._places[lane] = now_s, place
        return place

    async def _estimate(self, lane: str) -> Place | None:
        try:
            async with asyncio.timeout(WITHIN_S):
                depth, per_s = await asyncio.gather(self._client.depth(lane), self._pace(lane))
        except TimeoutError:
            return None
        if depth is None or not depth.ready:  # the queue is empty: a worker or a side queue has the request
            return None
        return Place(depth.ready - 1, None if per_s is None or not depth.consumers else depth.ready / per_s)

    async def _pace(self, lane: str) -> float | None:
        now_s = asyncio.get_running_loop().time()
        with suppress(StoreUnavailable):
            if found := await pace.per_s(self._store, lane):
                self._paces[lane] = now_s, found
        at_s, last = self._paces.get(lane, (now_s - PACE_AGE_S, None))
        return last if now_s - at_s < PACE_AGE_S else None
