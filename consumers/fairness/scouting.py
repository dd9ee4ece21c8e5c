"""Takes more requests from a queue whose slots are all in use, so that requests of one tenant do not block those of
other tenants behind them.

A queue delivers in order of priority and age, whatever the tenant. If all slots of a queue were in use for a second, a
scout is started, that is, a further consumer of the queue, without slots of its own. A request that the scout takes is
set aside (moved to a side queue) if its tenant has used up its share of the queue's slots; otherwise it waits in the
worker until its tenant gets the next free slot (`consumers/fairness/lane_slots.py`).

Setting a request aside takes half as much CPU as handling a whole request, so a scout is started only where it helps.
If requests hold their slots for longer than a quarter of a second on average, a scout is started when the waiting
requests will need longer than a quarter of a second to get slots. If requests hold their slots for a shorter time, a
scout is started only if several tenants had requests in the lane lately, and the waiting requests will need longer than
a second to get slots.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from consumers.background import every
from consumers.capacity.scaling import Depths, SlotPool
from consumers.fairness.lane_slots import QueueSlots
from lanekeeper.contract.problems import BrokerError

LOOK_EVERY_S: Final = 0.25
"""The seconds between two checks whether a queue's slots are all in use."""
SENT_AFTER_LOOKS: Final = 4
"""A scout (a further consumer) is started only when all slots of a queue were in use for a second: at one check, and at
this many further checks in a row. If the slots are all in use for a shorter time, requests are delivered in the queue's
own order."""
CALLED_BACK_AFTER_LOOKS: Final = 8
"""After this many checks in a row that found free slots, the queue's scout (its further consumer) is stopped."""
SCOUT_PREFETCH: Final = 32
"""The prefetch of a scout (a further consumer of a queue): it takes this many requests at a time and moves those over
their tenant's share to side queues, on a busy machine 390 requests a second. With a prefetch of 64, a chat request in
another lane of the same process waited twice as long while requests were moved."""


@dataclass(slots=True, kw_only=True)
class Scouted:
    """A queue that may get a scout (a further consumer, which moves requests over their tenant's share to side queues),
    and the results of the regular checks whether the queue's slots are all in use."""

    queue: str
    slots: QueueSlots
    scout: Callable[[], SlotPool]
    """A function that creates a scout for the queue: a pool (consumer) whose requests use the slots that the queue has
    already."""
    begun: deque[int] = field(default_factory=lambda: deque(maxlen=SENT_AFTER_LOOKS + 1))
    """How many requests of the queue had begun since the process started, at each of the last checks in a row that
    found all slots in use. When the list is full, its first and its last number were taken a second apart."""
    idle_looks: int = 0
    """How many of the latest checks in a row found free slots."""
    active: SlotPool | None = None
    """The scout (further consumer) that runs for the queue; None: the queue has no scout."""


class Scouting:
    """Starts a scout (a further consumer) for each queue whose slots are all in use for long, and stops the scout when
    slots are free. Like a pool, a `Scouting` can be paused and stopped."""

    def __init__(self, queues: Sequence[Scouted], *, depths: Depths) -> None:
        self._queues = queues
        self._depths = depths
        self.is_paused = False
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._ending: set[SlotPool] = set()
        """Scouts (further consumers) that were stopped, but whose requests have not all ended."""

    async def run(self) -> None:
        """Start and stop scouts (further consumers), until `stop` is called and the requests of all scouts have ended.
        Cancel it to end at once."""
        async with self._group:
            async for _ in every(LOOK_EVERY_S, until=self._stopping):
                for scouted in self._queues:
                    await self._look(scouted)

    async def stop(self) -> None:
        """Stop all scouts (further consumers), and start no more."""
        self._stopping.set()
        await self._call_all_back()

    def give_back_waiting(self) -> None:
        """After `stop`: return to the broker the requests that scouts have taken and for which the call to a provider
        has not begun (`Pool.give_back_waiting`)."""
        for scout in self._ending:
            scout.give_back_waiting()

    async def pause(self, reason: str) -> None:
        """Stop all scouts (further consumers), and start none until `resume` is called."""
        self.is_paused = True
        await self._call_all_back()

    async def resume(self) -> None:
        """After `pause`: start scouts (further consumers) again when they are needed."""
        self.is_paused = False

    async def _look(self, scouted: Scouted) -> None:
        slots, begun = scouted.slots, scouted.begun
        if self.is_paused or not slots.is_full:
            scouted.idle_looks += 1
            begun.clear()
            if scouted.active is not None and scouted.idle_looks >= CALLED_BACK_AFTER_LOOKS:
                await self._call_back(scouted)
            return
        scouted.idle_looks = 0
        begun.append(slots.begun)
        if scouted.active is not None or len(begun) <= SENT_AFTER_LOOKS:
            return
        # Calls that began together end together, so the rate is measured over a second, not since the last check.
        in_a_second = begun[-1] - begun[0]
        is_slow = in_a_second < SENT_AFTER_LOOKS * slots.size
        if not (is_slow or slots.lane.is_shared):
            return
        try:
            waiting = (await self._depths([scouted.queue]))[scouted.queue]
        except BrokerError:  # the pools report the lost connection
            return
        # whether the waiting requests, at this rate, will need more than 0.25 s (if slow) or a second to get slots
        is_long = waiting > (in_a_second / SENT_AFTER_LOOKS if is_slow else in_a_second)
        if is_long and not self.is_paused and not self._stopping.is_set():
            scouted.active = scouted.scout()
            scouted.slots.set_surplus_aside(True)
            self._group.create_task(self._work(scouted.active), name=f"scout {scouted.queue}")

    async def _work(self, scout: SlotPool) -> None:
        try:
            await scout.run()
        finally:
            self._ending.discard(scout)

    async def _call_back(self, scouted: Scouted) -> None:
        if (scout := scouted.active) is not None:
            scouted.active = None
            scouted.slots.set_surplus_aside(False)
            self._ending.add(scout)
            await scout.stop()

    async def _call_all_back(self) -> None:
        await asyncio.gather(*(self._call_back(scouted) for scouted in self._queues))
