"""Starts and stops further consumers of a queue, by the load of all queues: with slots of their own, or as scouts,
which only take requests out of the way of other tenants.

**Slots.** First, idle slots are lent to queues whose requests wait, the most urgent queue first; each queue keeps some
idle slots, which it does not lend. If a queue's requests still wait longer than its lane's target, it grows: it gets
further slots, a quarter more at a time, up to its maximum. A queue whose requests wait for a provider's budget does not
grow, because more slots would only hold more waiting requests. So that slots do not move back and forth, a slot is lent
only after it was idle for some seconds, and an additional slot is given up only after it was unused for some seconds.
A queue that needs the slots which it has lent gets them back at once.

To add slots, a worker starts a further consumer of the queue, on a channel of its own, whose prefetch is the number of
these slots; changing an existing consumer's prefetch has no effect (docs/facts.md, section 2). To take slots back, the
further consumer is cancelled, and its requests run to their end. The consumer of a queue that lends slots keeps its
prefetch, so that this queue can use its slots again at once.

**Scouts.** A queue delivers in order of priority and age, whatever the tenant. If all slots of a queue were in use for
a second, a scout is started, that is, a further consumer of the queue, without slots of its own. A request that the
scout takes is set aside (moved to a side queue) if its tenant has used up its share of the queue's slots; otherwise it
waits in the worker until its tenant gets the next free slot (`admission.py`).

Setting a request aside takes half as much CPU as handling a whole request, so a scout is started only where it helps.
If requests hold their slots for longer than a quarter of a second on average, a scout is started when the waiting
requests will need longer than a quarter of a second to get slots. If requests hold their slots for a shorter time, a
scout is started only if several tenants had requests in the lane lately, and the waiting requests will need longer than
a second to get slots.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Final, Protocol

from consumers.clock import NowMs, every
from consumers.job import Job
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import QueueSlots
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals

LOOK_EVERY_S = 0.25  # a queue that has lent slots must get them back within a second
log = logs.logger()

Depths = Callable[[list[str]], Awaitable[Mapping[str, int]]]


class SlotPool(Protocol):
    """What `Scaling` knows of a `Pool`."""

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


# ---- how many slots each queue should have ---------------------------------------------------------------------------

GROWTH: Final = 4
AT_MOST: Final = "slots_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """What the decision about additional slots must know of one queue."""

    slots: int
    reserved: int
    max_slots: int
    target_wait_s: float
    extra: int = 0
    grown: int = 0
    ending: int = 0
    busiest: int = 0
    waiting: int = 0
    wait_s: float = 0.0
    bottleneck: str | None = None


@dataclass(frozen=True, slots=True)
class ExtraSlots:
    """The slots that a queue should have in addition to its own."""

    lent: int = 0
    grown: int = 0
    limit: str | None = None

    @property
    def total(self) -> int:
        return self.lent + self.grown


def decide(queues: Sequence[QueueLoad]) -> list[ExtraSlots]:
    """Compute how many additional slots each queue should have. `queues`: the most urgent first, like the result."""
    idle = sum(max(0, queue.slots - queue.reserved - queue.busiest) for queue in queues)
    idle -= sum(queue.ending for queue in queues)
    decided = []
    for queue in queues:
        wanted = _wanted(queue)
        lent = min(wanted, queue.ending + max(0, idle))
        idle -= max(0, lent - queue.ending)
        grown = min(queue.grown, wanted - lent)
        limit = None
        if queue.waiting and queue.wait_s > queue.target_wait_s:
            if queue.bottleneck is not None:
                limit = queue.bottleneck
            elif lent + grown < wanted:
                grown = min(wanted - lent, grown + max(1, (queue.slots + lent + grown) // GROWTH))
            elif queue.slots + wanted == queue.max_slots:
                limit = AT_MOST
        decided.append(ExtraSlots(lent=lent, grown=grown, limit=limit))
    return decided


def _wanted(queue: QueueLoad) -> int:
    if not queue.waiting:
        wanted = min(queue.extra, max(0, queue.busiest - queue.slots))
    elif queue.bottleneck is None:
        wanted = queue.extra + queue.waiting
    else:
        wanted = queue.extra
    return min(wanted, max(0, queue.max_slots - queue.slots))


# ---- slots are added and taken back ----------------------------------------------------------------------------------

ASK_EVERY_S = 1.0
STEADY_S = 3.0
BOTTLENECK_FOR_S = 2.0
"""A lane counts as waiting for a provider's budget until this time after one of its requests was last seen waiting."""
LIMIT_LOGGED_EVERY_S = 60.0
SENT_AFTER_LOOKS: Final = 4
"""A scout is started only when all slots of a queue were in use for a second: at one check, and at this many further
checks in a row."""
CALLED_BACK_AFTER_LOOKS: Final = 8
SCOUT_PREFETCH: Final = 64
"""A scout moves at most this many requests in the time that the broker takes to confirm a publish, which is long on a
busy machine."""
WaitingFor = Callable[[], Mapping[str, str]]


@dataclass(slots=True, kw_only=True)
class ScaledQueue:
    """A queue whose number of slots changes: the pools that consume it and its load so far. `new_scout`: None if the
    lane has no side queues."""

    lane: str
    pool: SlotPool
    new_pool: Callable[[int], SlotPool]
    load: QueueLoad
    activity: LaneActivity
    side: SlotPool | None = None
    shared: QueueSlots
    new_scout: Callable[[], SlotPool] | None = None
    scout: SlotPool | None = None
    begun: deque[int] = field(default_factory=lambda: deque(maxlen=SENT_AFTER_LOOKS + 1))
    """How many requests of the queue had begun since the process started, at each of the last checks in a row that
    found all slots in use. When the list is full, its first and its last number were taken a second apart."""
    idle_looks: int = 0
    added: list[SlotPool] = field(default_factory=list)
    taken_back: list[SlotPool] = field(default_factory=list)
    used: deque[int] = field(default_factory=lambda: deque(maxlen=round(STEADY_S / LOOK_EVERY_S)))
    extra_slots: ExtraSlots = field(default_factory=ExtraSlots)
    waiting_since_ms: int | None = None
    limit_logged_s: float | None = None

    @property
    def added_slots(self) -> int:
        return sum(pool.slots for pool in self.added)

    @property
    def ending(self) -> int:
        return sum(pool.in_hand for pool in self.taken_back if pool.slots)  # a scout has none

    @property
    def in_hand(self) -> int:
        aside = 0 if self.side is None else self.side.running
        return self.pool.in_hand + aside + sum(pool.in_hand for pool in self.added) + self.ending

    @property
    def is_full(self) -> bool:
        return self.in_hand - self.ending >= self.pool.slots + self.added_slots

    @property
    def is_at_rest(self) -> bool:
        return not (any(self.used) or self.added or self.taken_back or self.in_hand or self.extra_slots.total)

    def wait_s(self, now_ms: int) -> float:
        """How long requests wait in the queue: the longest wait among those delivered within the last `STEADY_S`
        seconds. While messages wait, it is at least the time since the last delivery, or since messages began to wait
        if that is later."""
        pools = [self.pool, *self.added, *self.taken_back, *([] if self.side is None else [self.side])]
        jobs = [job for pool in pools for job in pool.jobs]
        waits = [
            job.taken_ms - job.decoded.request.start_ms
            for job in jobs
            if job.decoded is not None and job.taken_ms >= now_ms - 1000 * STEADY_S
        ]
        if self.waiting_since_ms is not None:
            waits.append(now_ms - max([self.waiting_since_ms, *(job.taken_ms for job in jobs)]))
        return max(waits, default=0) / 1000


IsBraked = Callable[[str], bool]


@dataclass(eq=False)
class Scaling:
    """Gives each queue of this worker the slots that `decide` says, and a scout while all of these are in use for long.
    `queues`: the most urgent first. `ready`: like `depths`, without what waits in side queues."""

    queues: Sequence[ScaledQueue]
    _: KW_ONLY
    depths: Depths
    ready: Depths
    now_ms: NowMs
    waiting_for: WaitingFor = dict
    is_braked: IsBraked = lambda lane: False
    brake: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        self._bottlenecks: dict[str, tuple[str, float]] = {}
        self._ask_at_s = 0.0
        self.is_paused = False
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()
        for queue in self.queues:  # all slots count as used at first, so that none is lent before `STEADY_S` is over
            queue.used.append(queue.pool.slots)

    async def run(self) -> None:
        async with self._group:
            async for _ in every(LOOK_EVERY_S, until=self._stopping):
                await self._look()
                for queue in self.queues:
                    if queue.new_scout is not None:
                        await self._look_for_scout(queue, queue.new_scout)

    async def stop(self) -> None:
        self._stopping.set()
        await self._take_back(self.queues)

    def give_back_waiting(self) -> None:
        _give_back_waiting(self.queues)

    async def pause(self, reason: str) -> None:
        """As `stop`, until `resume`."""
        self.is_paused = True
        await self._take_back(self.queues)

    async def resume(self) -> None:
        self.is_paused = False

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for lane, reason in self.waiting_for().items():
            self._bottlenecks[lane] = (reason, now_s + BOTTLENECK_FOR_S)
        if asks := now_s >= self._ask_at_s:
            self._ask_at_s = now_s + ASK_EVERY_S
        waiting = await self._ask() if asks else {}
        if self.is_paused or self._stopping.is_set() or all(queue.is_at_rest for queue in self.queues):
            return
        if braked := [queue for queue in self.queues if (queue.added or queue.scout) and self.is_braked(queue.lane)]:
            await self._take_back(braked)
            _give_back_waiting(braked)
        for queue in self.queues:
            self._note_load(queue, waiting.get(queue.pool.queue, 0), asks, now_s)
        decided = decide([queue.load for queue in self.queues])
        for queue, extra_slots in zip(self.queues, decided, strict=True):
            limit = extra_slots.limit if asks else queue.extra_slots.limit  # decided only if the waits are known
            self._carry_out(queue, replace(extra_slots, limit=limit))
            if asks and limit is not None:
                self._log_limit(queue, limit, now_s)
        self._publish_figures()

    async def _ask(self) -> Mapping[str, int]:
        full = [queue.pool.queue for queue in self.queues if queue.is_full and not self.is_braked(queue.lane)]
        if not full or self.is_paused:
            return {}
        try:
            return await self.depths(full)
        except BrokerError:  # the pools notice and report a lost connection themselves
            return {}

    def _note_load(self, queue: ScaledQueue, waiting: int, asked: bool, now_s: float) -> None:
        queue.used.append(queue.in_hand)
        now_ms = self.now_ms()
        if not waiting and asked:
            queue.waiting_since_ms = None
        elif waiting and queue.waiting_since_ms is None:
            queue.waiting_since_ms = now_ms
        reason, until_s = self._bottlenecks.get(queue.lane, ("", now_s))
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
        while (excess := queue.added_slots - extra_slots.total) > 0:
            least = min(queue.added, key=lambda pool: (pool.slots < excess, abs(pool.slots - excess)))
            queue.added.remove(least)
            queue.taken_back.append(least)
            self._group.create_task(least.stop(), name=f"take back {queue.pool.queue}")
        while (missing := extra_slots.total - queue.added_slots - queue.ending) > 0:
            pool = queue.new_pool(1 << missing.bit_length() - 1)
            queue.added.append(pool)
            queue.used.append(queue.pool.slots + queue.added_slots + queue.ending)  # new slots count as used at first
            self._group.create_task(self._work(queue, pool), name=f"added slots {queue.pool.queue}")
        queue.shared.resize(queue.pool.slots + queue.added_slots)
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

    async def _look_for_scout(self, queue: ScaledQueue, new_scout: Callable[[], SlotPool]) -> None:
        slots, begun = queue.shared, queue.begun
        if self.is_paused or not slots.is_full or self.is_braked(queue.lane):
            queue.idle_looks += 1
            begun.clear()
            if queue.scout is not None and queue.idle_looks >= CALLED_BACK_AFTER_LOOKS:
                await self._call_back(queue)
            return
        queue.idle_looks = 0
        begun.append(slots.begun)
        if queue.scout is not None or len(begun) <= SENT_AFTER_LOOKS:
            return
        # Calls that began together end together, so the rate is measured over a second, not since the last check.
        in_a_second = begun[-1] - begun[0]
        is_slow = in_a_second < SENT_AFTER_LOOKS * slots.size
        if not (is_slow or slots.lane.is_shared):
            return
        try:
            waiting = (await self.ready([queue.pool.queue]))[queue.pool.queue]
        except BrokerError:  # the pools report the lost connection
            return
        # whether the waiting requests, at this rate, will need more than 0.25 s (if slow) or a second to get slots
        is_long = waiting > (in_a_second / SENT_AFTER_LOOKS if is_slow else in_a_second)
        if is_long and not self.is_paused and not self._stopping.is_set():
            queue.scout = new_scout()
            slots.set_surplus_aside(True)
            self._group.create_task(self._work(queue, queue.scout), name=f"scout {queue.pool.queue}")

    async def _call_back(self, queue: ScaledQueue) -> None:
        if (scout := queue.scout) is not None:
            queue.scout = None
            queue.shared.set_surplus_aside(False)
            queue.taken_back.append(scout)
            await scout.stop()

    async def _take_back(self, queues: Sequence[ScaledQueue]) -> None:
        ending = [pool for queue in queues for pool in queue.added]
        for queue in queues:
            queue.taken_back += queue.added
            queue.added = []
            queue.extra_slots = ExtraSlots()
            queue.shared.resize(queue.pool.slots)
        self._publish_figures()
        await asyncio.gather(*(pool.stop() for pool in ending), *(self._call_back(queue) for queue in queues))

    def _log_limit(self, queue: ScaledQueue, limit: str, now_s: float) -> None:
        if queue.limit_logged_s is None or now_s >= queue.limit_logged_s + LIMIT_LOGGED_EVERY_S:
            queue.limit_logged_s = now_s
            log.info(
                signals.SLOTS_LIMITED,
                lane=queue.lane,
                queue=queue.pool.queue,
                limit=limit,
                wait_s=round(queue.wait_s(self.now_ms()), 1),
            )

    def _publish_figures(self) -> None:
        for queue in self.queues:
            queue.activity.extra_slots = 0
            queue.activity.slots_limit = None
        for queue in self.queues:
            queue.activity.extra_slots += queue.extra_slots.total
            queue.activity.slots_limit = queue.activity.slots_limit or queue.extra_slots.limit


def _give_back_waiting(queues: Sequence[ScaledQueue]) -> None:
    for queue in queues:
        for pool in queue.taken_back:
            pool.give_back_waiting()
