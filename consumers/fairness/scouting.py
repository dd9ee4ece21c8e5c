"""Looks ahead in slow queues, so that one tenant's requests do not hide those of another.

A queue delivers in order of priority and age, whatever the tenant. If all slots of a queue were taken for a second, a
scout consumes it too. A scout is a pool without slots. What it takes gets the next free slot if it is its tenant's
turn, waits here while within its tenant's share, and is set aside otherwise (`consumers/fairness/turns.py`).

Moving a request costs half of what such a request costs in all. So for a single tenant no scout is sent while a slot
becomes free every quarter of a second on average. If several tenants had requests lately, one is sent as soon as
requests wait longer than a second.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from consumers.background import every
from consumers.capacity.slots import Depths
from consumers.fairness.turns import Bench
from lanekeeper.contract.problems import BrokerError

LOOK_EVERY_S: Final = 0.25
"""If slots become free within this time, nothing is moved."""
GOES_OUT_AFTER: Final = 4
"""How many looks in a row must find the lane full. In shorter bursts the queue's own order holds."""
GOES_AFTER: Final = 8
"""How many looks in a row must find free slots before the scout is called back."""
AHEAD: Final = 32
"""A scout's prefetch, and so how many requests are moved at a time: 390 a second on a busy machine. With 64, a chat in
another lane of the process waited twice as long meanwhile."""


class Scout(Protocol):
    """A pool without slots."""

    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def give_back_waiting(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Scouted:
    """A queue that is watched, and what the looks found."""

    queue: str
    bench: Bench
    scout: Callable[[], Scout]
    begun: int = 0
    """How many requests had begun at the last look."""
    full: int = 0
    """How many looks in a row found it full."""
    slow: int = 0
    """How many of these found it slow."""
    idle: int = 0
    """How many looks in a row found free slots."""
    at_work: "Scout | None" = None
    leaving: list[Scout] = field(default_factory=list)


class Scouting:
    """Sends scouts out and calls them back. It is paused and stopped as pools are."""

    def __init__(self, queues: Sequence[Scouted], *, depths: Depths) -> None:
        self._queues = queues
        self._depths = depths
        self._paused = False
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()

    async def run(self) -> None:
        """Send scouts out and call them back until stopped; return when all have ended. Cancel it to end at once."""
        async with self._group:
            async for _ in every(LOOK_EVERY_S, until=self._stopping):
                for each in self._queues:
                    await self._look(each)

    async def stop(self) -> None:
        self._stopping.set()
        await self._call_all_back()

    def give_back_waiting(self) -> None:
        """After `stop`: return deliveries of scouts whose call has not begun (`Pool.give_back_waiting`)."""
        for each in self._queues:
            for scout in each.leaving:
                scout.give_back_waiting()

    @property
    def is_paused(self) -> bool:
        return self._paused

    async def pause(self, reason: str) -> None:
        """Call all scouts back and send none."""
        self._paused = True
        await self._call_all_back()

    async def resume(self) -> None:
        """Send scouts again when needed."""
        self._paused = False

    async def _look(self, each: Scouted) -> None:
        begun, each.begun = each.bench.begun - each.begun, each.bench.begun
        if self._paused or not each.bench.is_full:
            each.idle += 1
            each.full = each.slow = 0
            if each.at_work is not None and each.idle >= GOES_AFTER:
                await self._call_back(each)
            return
        each.idle = 0
        each.full += 1
        each.slow = each.slow + 1 if begun < each.bench.slots else 0
        is_slow = each.slow >= GOES_OUT_AFTER
        if each.at_work is not None or not (is_slow or (each.full >= GOES_OUT_AFTER and each.bench.is_shared)):
            return
        try:
            waiting = (await self._depths([each.queue]))[each.queue]
        except BrokerError:  # the pools report it
            return
        is_long = waiting > (begun if is_slow else GOES_OUT_AFTER * begun)
        if is_long and not self._paused and not self._stopping.is_set():
            each.at_work = each.scout()
            each.bench.sort(True)
            self._group.create_task(self._work(each, each.at_work), name=f"scout {each.queue}")

    async def _work(self, each: Scouted, scout: Scout) -> None:
        try:
            await scout.run()
        finally:
            if scout in each.leaving:
                each.leaving.remove(scout)

    async def _call_back(self, each: Scouted) -> None:
        if (scout := each.at_work) is not None:
            each.at_work = None
            each.bench.sort(False)
            each.leaving.append(scout)
            await scout.stop()

    async def _call_all_back(self) -> None:
        await asyncio.gather(*(self._call_back(each) for each in self._queues))
