"""Looks ahead in queues that are worked slowly: so that one tenant's requests do not hide another's behind them.

A queue is first in, first out, and a higher priority goes ahead whosever it is. Where all of its slots were taken for a
second, a scout consumes it as well: a pool without slots. What it takes gets the next free slot where its tenant is due
one, waits in hand within its tenant's share, and is set aside otherwise (`consumers/fairness/turns.py`).

Moving costs about half of what such a request does. So no scout goes out for one tenant alone while its slots come free
within a quarter of a second on average. Where several tenants have come lately, one goes out for whatever waits longer
than a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from consumers.fairness.turns import Bench
from lanekeeper.contract.problems import BrokerError

LOOK_EVERY_S: Final = 0.25
"""Where slots come free sooner than that, nothing is moved."""
GOES_OUT_AFTER: Final = 4
"""Looks at a full lane: in a shorter burst the order is the queue's own, strictly by priority."""
GOES_AFTER: Final = 8
"""Looks without a full lane: until then it may be full again."""
AHEAD: Final = 32
"""What a scout has in hand, and so what is published and confirmed at a time: 390 a second on a busy machine. At 64 a
chat in another lane of the process waited twice as long meanwhile."""

Depths = Callable[[list[str]], Awaitable[Mapping[str, int]]]


class Scout(Protocol):
    """A pool without slots."""

    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def give_back_waiting(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Scouted:
    """A queue that is looked at."""

    queue: str
    bench: Bench
    scout: Callable[[], Scout]
    begun: int = 0
    """When it was looked at last."""
    full: int = 0
    """For how many looks in a row it was full."""
    slow: int = 0
    """For how many of them it was worked slowly."""
    idle: int = 0
    """For how many it was not full."""
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
        """Look until stopped: returns when all scouts have ended. Cancel it to end at once."""
        async with self._group:
            while not self._stopping.is_set():
                for each in self._queues:
                    await self._look(each)
                try:
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._stopping.wait()
                except TimeoutError:
                    pass

    async def stop(self) -> None:
        """Take no more."""
        self._stopping.set()
        await self._call_all_back()

    def give_back_waiting(self) -> None:
        """After `stop`: as `Pool.give_back_waiting`."""
        for each in self._queues:
            for scout in each.leaving:
                scout.give_back_waiting()

    @property
    def is_paused(self) -> bool:
        return self._paused

    async def pause(self, reason: str) -> None:
        """Have no scout out."""
        self._paused = True
        await self._call_all_back()

    async def resume(self) -> None:
        """Look again."""
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
        except BrokerError:  # the pools themselves tell
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
