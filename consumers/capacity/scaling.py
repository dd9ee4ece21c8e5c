"""Adds slots to queues and takes them back, as `lending.decide` computes. A slot works on one request at a time.

To add slots, a worker starts a further consumer of the queue, on a channel of its own, whose prefetch is the number of
these slots; changing an existing consumer's prefetch has no effect (docs/facts.md, section 2). To take slots back, the
further consumer is cancelled, and its requests run to their end. The consumer of a queue that lends slots keeps its
prefetch, so that this queue can use its slots again at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from consumers.background import every
from consumers.capacity.activity import LaneActivity
from consumers.capacity.lending import ExtraSlots, QueueLoad, decide
from consumers.job import Job, NowMs
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals

LOOK_EVERY_S = 0.25
"""The seconds between two decisions about additional slots. The time is short, because a queue that has lent slots must
get them back within a second."""
ASK_EVERY_S = 1.0
"""The seconds between two questions to the broker about how many messages wait in the queues whose slots are all in
use. A queue can get further slots only after such a question."""
STEADY_S = 3.0
"""A queue lends a slot only after the slot was idle for this many seconds; likewise, it gives up an added slot that was
unused for as long."""
BOTTLENECK_FOR_S = 2.0
"""A lane counts as waiting for a provider's budget, so that its queues get no further slots, until this many seconds
after one of its requests was last seen waiting for budget."""
LIMIT_LOGGED_EVERY_S = 60.0
"""The shortest time, in seconds, between two log events about a queue that can get no further slots."""
log = logs.logger()

Depths = Callable[[list[str]], Awaitable[Mapping[str, int]]]
"""A function that asks the broker how many messages wait in each of the given queues."""
WaitingFor = Callable[[], Mapping[str, str]]
"""A function that returns, for each lane whose requests wait for a provider's budget now, the limit for which they wait
(such as input tokens a minute)."""


class SlotPool(Protocol):
    """The methods and attributes of a pool (`consumers/pool.py`) that adding slots needs. A pool consumes one queue,
    and works on as many of its requests at a time as the pool has slots."""

    @property
    def queue(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def in_hand(self) -> int: ...
    @property
    def jobs(self) -> Collection[Job]: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    def give_back_waiting(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class ScaledQueue:
    """A queue whose number of slots (requests that are worked on at a time) changes: the pools that consume the queue,
    and its load so far."""

    lane: str
    pool: SlotPool
    """The pool that always consumes the queue, with the number of slots that the settings give to the queue. The pools
    that `new_pool` creates add slots for a while."""
    new_pool: Callable[[int], SlotPool]
    """A function that creates a further pool, which consumes the same queue with the given number of slots."""
    load: QueueLoad
    """The queue's settings, and its load at the latest check."""
    activity: LaneActivity
    side: SlotPool | None = None
    """The pool that consumes the lane's side queues (for requests over their tenant's share), whose requests use this
    queue's slots; None: this queue's slots are not used by side queues."""
    resize: Callable[[int], None] = lambda slots: None
    """A function that is called after each decision with the queue's number of slots: those that the settings give to
    it, and added ones."""
    added: list[SlotPool] = field(default_factory=list)
    """The pools (further consumers of the queue) that have the slots which were added to the queue."""
    taken_back: list[SlotPool] = field(default_factory=list)
    """Pools whose added slots were taken back, while requests still run on them."""
    used: deque[int] = field(default_factory=lambda: deque(maxlen=round(STEADY_S / LOOK_EVERY_S)))
    """How many of the queue's requests this worker had at each check within the last `STEADY_S` seconds."""
    extra_slots: ExtraSlots = field(default_factory=ExtraSlots)
    """How many slots the queue should have in addition to those that the settings give to it, by the latest
    decision."""
    waiting_since_ms: int | None = None
    """Since when messages have waited in the queue without a break, as far as this worker has seen, in ms since 1970;
    None: no message waits."""
    limit_logged_s: float | None = None
    """When it was last logged that a limit keeps the queue from getting more slots, by the event loop's clock; None:
    never."""

    @property
    def added_slots(self) -> int:
        return sum(pool.slots for pool in self.added)

    @property
    def ending(self) -> int:
        """How many requests still run on additional slots that the queue no longer has."""
        return sum(pool.in_hand for pool in self.taken_back)

    @property
    def in_hand(self) -> int:
        """How many requests of the queue this worker has, on the slots that the settings give to the queue and on added
        ones."""
        aside = 0 if self.side is None else self.side.running
        return self.pool.in_hand + aside + sum(pool.in_hand for pool in self.added) + self.ending

    @property
    def is_full(self) -> bool:
        """Whether all slots of the queue are in use."""
        return self.in_hand - self.ending >= self.pool.slots + self.added_slots

    def wait_s(self, now_ms: int) -> float:
        """How long requests wait in the queue, in seconds: the longest wait among those delivered within the last
        `STEADY_S` seconds. While messages wait, it is at least the time since the last delivery, or since messages
        began to wait if that is later."""
        pools = [self.pool, *self.added, *self.taken_back, *([] if self.side is None else [self.side])]
        jobs = [job for pool in pools for job in pool.jobs]
        waits = [
            job.taken_ms - job.decoded.request.start_ms
            for job in jobs
            if job.decoded is not None and job.taken_ms >= now_ms - 1000 * STEADY_S
        ]
        if self.waiting_since_ms is not None:
            taken_ms = max((job.taken_ms for job in jobs), default=0)
            waits.append(now_ms - max(self.waiting_since_ms, taken_ms))
        return max(waits, default=0) / 1000


class Scaling:
    """Gives each queue of this worker more or fewer slots (requests that are worked on at a time), by the load of all
    queues: `lending.decide` says how many, and this class starts and stops pools (consumers) that have them. `queues`:
    the most urgent first."""

    def __init__(
        self, queues: Sequence[ScaledQueue], *, depths: Depths, now_ms: NowMs, waiting_for: WaitingFor = dict
    ) -> None:
        self._queues = queues
        self._depths = depths
        self._now_ms = now_ms
        self._waiting_for = waiting_for
        self._bottlenecks: dict[str, tuple[str, float]] = {}
        self._ask_at_s = 0.0
        self.is_paused = False
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()
        for queue in queues:  # all slots count as used at first, so that none is lent before `STEADY_S` is over
            queue.used.append(queue.pool.slots)

    async def run(self) -> None:
        """Add slots to queues and take them back, until `stop` is called and the requests on added slots have ended.
        Cancel it to end at once."""
        async with self._group:
            async for _ in every(LOOK_EVERY_S, until=self._stopping):
                await self._look()

    async def stop(self) -> None:
        """Take back all slots that were added to queues, and add no more."""
        self._stopping.set()
        await self._take_all_back()

    def give_back_waiting(self) -> None:
        """After `stop`: return to the broker the requests on added slots for which the call to a provider has not begun
        (`Pool.give_back_waiting`)."""
        for queue in self._queues:
            for pool in queue.taken_back:
                pool.give_back_waiting()

    async def pause(self, reason: str) -> None:
        """Take back the slots that were added to queues, because the worker pauses all its work. The load during the
        pause is not recorded, because slots are then idle because of the pause, not for lack of requests."""
        self.is_paused = True
        await self._take_all_back()

    async def resume(self) -> None:
        """After `pause`: add slots to queues again when they are needed."""
        self.is_paused = False

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for lane, reason in self._waiting_for().items():
            self._bottlenecks[lane] = (reason, now_s + BOTTLENECK_FOR_S)
        if asks := now_s >= self._ask_at_s:
            self._ask_at_s = now_s + ASK_EVERY_S
        waiting = await self._ask() if asks else {}
        if self.is_paused or self._stopping.is_set():
            return
        for queue in self._queues:
            self._note_load(queue, waiting.get(queue.pool.queue, 0), asks, now_s)
        decided = decide([queue.load for queue in self._queues])
        for queue, extra_slots in zip(self._queues, decided, strict=True):
            limit = extra_slots.limit if asks else queue.extra_slots.limit  # decided only if the waits are known
            self._carry_out(queue, replace(extra_slots, limit=limit))
            if asks and limit is not None:
                self._log_limit(queue, limit, now_s)
        self._publish_figures()

    async def _ask(self) -> Mapping[str, int]:
        """Ask the broker how many messages wait in each queue whose slots are all in use. The result is empty if the
        broker does not answer, or while work is paused."""
        full = [queue.pool.queue for queue in self._queues if queue.is_full]
        if not full or self.is_paused:
            return {}
        try:
            return await self._depths(full)
        except BrokerError:  # the pools notice and report a lost connection themselves
            return {}

    def _note_load(self, queue: ScaledQueue, waiting: int, asked: bool, now_s: float) -> None:
        """Note the queue's current load. `waiting`: how many messages wait in the queue. `asked`: whether the broker
        was asked for this number; if not, `waiting` is 0."""
        queue.used.append(queue.in_hand)
        now_ms = self._now_ms()
        if not waiting and asked:
            queue.waiting_since_ms = None
        elif waiting and queue.waiting_since_ms is None:
            queue.waiting_since_ms = now_ms
        reason, until_s = self._bottlenecks.get(queue.lane, ("", 0.0))
        queue.load = replace(
            queue.load,
            # `ending` may have fallen since the last decision; the number decided then counts until the next one
            extra=max(queue.added_slots + queue.ending, queue.extra_slots.total),
            grown=queue.extra_slots.grown,
            ending=queue.ending,
            busiest=max(queue.used),
            waiting=waiting,
            wait_s=queue.wait_s(now_ms) if waiting else 0.0,
            bottleneck=reason if now_s < until_s else None,
        )

    def _carry_out(self, queue: ScaledQueue, extra_slots: ExtraSlots) -> None:
        """Stop pools with added slots, or start some, so that the queue has the number of slots that was decided."""
        while (excess := queue.added_slots - extra_slots.total) > 0:
            least = min(queue.added, key=lambda pool: (pool.slots < excess, abs(pool.slots - excess)))
            queue.added.remove(least)
            queue.taken_back.append(least)
            self._group.create_task(least.stop(), name=f"take back {queue.pool.queue}")
        while (missing := extra_slots.total - queue.added_slots - queue.ending) > 0:
            # in pools of 1, 2, 4, … slots, so that taking some back seldom takes back more than needed
            pool = queue.new_pool(1 << missing.bit_length() - 1)
            queue.added.append(pool)
            queue.used.append(queue.pool.slots + queue.added_slots + queue.ending)  # new slots count as used at first
            self._group.create_task(self._work(queue, pool), name=f"added slots {queue.pool.queue}")
        queue.resize(queue.pool.slots + queue.added_slots)
        if (extra_slots.lent, extra_slots.grown) != (queue.extra_slots.lent, queue.extra_slots.grown):
            log.debug(
                signals.SLOTS_CHANGED,
                lane=queue.lane,
                queue=queue.pool.queue,
                slots=queue.pool.slots,
                lent=extra_slots.lent,
                grown=extra_slots.grown,
            )
        queue.extra_slots = extra_slots

    async def _work(self, queue: ScaledQueue, pool: SlotPool) -> None:
        await pool.run()
        queue.taken_back.remove(pool)

    async def _take_all_back(self) -> None:
        ending = [pool for queue in self._queues for pool in queue.added]
        for queue in self._queues:
            queue.taken_back += queue.added
            queue.added = []
            queue.extra_slots = ExtraSlots()
            queue.resize(queue.pool.slots)
        self._publish_figures()
        await asyncio.gather(*(pool.stop() for pool in ending))

    def _log_limit(self, queue: ScaledQueue, limit: str, now_s: float) -> None:
        if queue.limit_logged_s is None or now_s >= queue.limit_logged_s + LIMIT_LOGGED_EVERY_S:
            queue.limit_logged_s = now_s
            log.info(
                signals.SLOTS_LIMITED,
                lane=queue.lane,
                queue=queue.pool.queue,
                limit=limit,
                wait_s=round(queue.wait_s(self._now_ms()), 1),
            )

    def _publish_figures(self) -> None:
        """Write how many slots each lane has in addition to those that its settings give to it, and why it gets no
        more, into its `LaneActivity`, for the command `lanekeeper status`. The two queues of a lane share a
        `LaneActivity`, so all values are reset before they are added up."""
        for queue in self._queues:
            queue.activity.extra_slots = 0
            queue.activity.slots_limit = None
        for queue in self._queues:
            queue.activity.extra_slots += queue.extra_slots.total
            queue.activity.slots_limit = queue.activity.slots_limit or queue.extra_slots.limit
