"""Holds a request or two ready for the next free slot of a queue, while its calls are short and more requests wait.

Between two calls of a slot the outcome is settled and the queue sends the next request: 5 to 10 ms beside a call of
50 ms. So such a queue gets a further consumer, without slots. What it holds begins as soon as an outcome is known.

A request that is held here can be overtaken by no other, and no other process can take it. So it is done only while
calls are so short that the next slot is free in a moment, and while more requests wait than all processes have slots.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from consumers.background import every
from consumers.capacity.slots import Depths
from lanekeeper.contract.problems import BrokerError

LOOK_EVERY_S: Final = 0.25
BEGINS_AT: Final = 2.0
"""So many requests a slot must have begun since the last look: calls of less than an eighth of a second."""
ENDS_AT: Final = 1.0
"""With fewer it ends, so that it does not begin and end all the time."""
ASK_EVERY: Final = 4
"""How many looks pass between two questions to the broker how many requests wait."""
MOST: Final = 2
"""With two, a slot of eight is used 98 % of the time by calls of 50 ms; each more would be one more that can be neither
overtaken nor taken by others."""


def ahead(slots: int) -> int:
    """How many requests are held for so many slots."""
    return min(MOST, max(1, slots // 4))


class Holding(Protocol):
    """A pool without slots."""

    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def give_back_waiting(self) -> None: ...


class Begins(Protocol):
    """The slots of a queue."""

    slots: int
    begun: int


@dataclass(slots=True, kw_only=True)
class Fast:
    """A queue that is watched."""

    queue: str
    bench: Begins
    more: Callable[[], Holding]
    """Makes the further consumer."""
    begun: int = 0
    """How many requests had begun at the last look."""
    looks: int = 0
    """How many looks in a row found it fast."""
    at_work: Holding | None = None
    leaving: list[Holding] = field(default_factory=list)


class Ahead:
    """Watches queues, and begins and ends their further consumers. It is paused and stopped as pools are."""

    def __init__(self, queues: Sequence[Fast], *, depths: Depths) -> None:
        self._queues = queues
        self._depths = depths
        self._paused = False
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()

    async def run(self) -> None:
        """Look until stopped; return when what is held has ended. Cancel it to end at once."""
        async with self._group:
            async for _ in every(LOOK_EVERY_S, until=self._stopping):
                for each in self._queues:
                    await self._look(each)

    async def stop(self) -> None:
        """Hold no more requests."""
        self._stopping.set()
        await self._end_all()

    def give_back_waiting(self) -> None:
        """After `stop`: return deliveries whose call has not begun (`Pool.give_back_waiting`)."""
        for each in self._queues:
            for holding in each.leaving:
                holding.give_back_waiting()

    @property
    def is_paused(self) -> bool:
        return self._paused

    async def pause(self, reason: str) -> None:
        """Hold no more requests until `resume`."""
        self._paused = True
        await self._end_all()

    async def resume(self) -> None:
        """Look again."""
        self._paused = False

    async def _look(self, each: Fast) -> None:
        turns = (each.bench.begun - each.begun) / each.bench.slots
        each.begun = each.bench.begun
        if turns < (BEGINS_AT if each.at_work is None else ENDS_AT):
            each.looks = 0
            return await self._end(each)
        if each.looks % ASK_EVERY == 0:
            await self._ask(each)
        each.looks += 1
        return None

    async def _ask(self, each: Fast) -> None:
        try:
            waiting = (await self._depths([each.queue]))[each.queue]
        except BrokerError:  # the pools report it
            return
        if waiting <= each.bench.slots:
            await self._end(each)
        elif each.at_work is None and not self._paused and not self._stopping.is_set():
            each.at_work = each.more()
            self._group.create_task(self._work(each, each.at_work), name=f"ahead {each.queue}")

    async def _work(self, each: Fast, holding: Holding) -> None:
        try:
            await holding.run()
        finally:
            if holding in each.leaving:
                each.leaving.remove(holding)

    async def _end(self, each: Fast) -> None:
        if (holding := each.at_work) is not None:
            each.at_work = None
            each.leaving.append(holding)
            await holding.stop()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(each) for each in self._queues))
