"""Decides how many slots each queue has, and changes the prefetch of its consumer accordingly.

**Slots.** Idle slots are lent to queues whose requests wait, the most urgent queue first; each queue keeps some idle
slots, which it does not lend. A queue whose requests wait for longer than its lane's target gets further slots, up to
its maximum, unless they wait for a provider's budget: more slots would then only hold more waiting requests. A slot
counts as idle after a second without use, so that slots do not move back and forth.

A queue that needs the slots which it has lent gets them back at once: it still has a prefetch for all its own, and
those who borrowed them begin nothing more (`QueueSlots.size`), whatever was delivered to them.

Each queue has one consumer. The prefetch of a running consumer cannot be changed, so the consumer is cancelled and
another one begins (`Pool.resize`). What was delivered until then is still worked on, and does not count for the new
consumer: for a moment, up to as many deliveries as the queue had slots may wait in this process. So that this is
seldom, the prefetch is lowered only after a second with fewer slots.

**Scouting.** A queue delivers in order of priority and age, whatever the tenant. If all slots of a queue were in use
for a second, its consumer gets a larger prefetch than it has slots. A request is then set aside (moved to a side queue)
if its tenant has used up its share of the queue's slots; otherwise it waits in the worker until its tenant gets the
next free slot (`admission.py`).

Setting a request aside takes half as much CPU as handling a whole request, so this is done only where it helps. If
requests hold their slots for longer than a quarter of a second on average, it is done when the waiting requests will
need longer than a quarter of a second to get slots. If requests hold their slots for a shorter time, only if several
tenants had requests in the lane lately, and the waiting requests will need longer than a second to get slots.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final, Protocol

import structlog

from consumers.clock import every
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import QueueSlots
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import signals

LOOK_EVERY_S: Final = 0.25
LOOKS_A_SECOND: Final = 4
log = structlog.get_logger()

Ready = Callable[[list[str]], Awaitable[Mapping[str, int]]]


# ---- how many slots each queue should have ---------------------------------------------------------------------------

AT_MOST: Final = "slots_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """What the decision about additional slots must know of one queue."""

    slots: int
    """Its own."""
    reserved: int
    max_slots: int
    running: int = 0
    busiest: int = 0
    """The most requests that ran at the same time within the last second."""
    waiting: int = 0
    is_late: bool = False
    """Whether requests have waited for longer than the lane's target."""
    bottleneck: str | None = None


@dataclass(frozen=True, slots=True)
class ExtraSlots:
    """The slots that a queue has in addition to its own: those that others lend, and those that it got because its
    requests waited too long."""

    lent: int = 0
    grown: int = 0
    limit: str | None = None

    @property
    def total(self) -> int:
        return self.lent + self.grown


def share_out(queues: Sequence[tuple[QueueLoad, ExtraSlots]]) -> list[ExtraSlots]:
    """Compute how many additional slots each queue should have. `queues`: the most urgent first, like the result; each
    with what it has."""
    idle = sum(max(0, queue.slots - queue.reserved - queue.busiest) for queue, _ in queues)
    idle -= sum(_ending(queue, extra) for queue, extra in queues)
    decided = []
    for queue, extra in queues:
        wanted = min(queue.busiest + queue.waiting, queue.max_slots) - queue.slots
        if queue.bottleneck is not None:
            wanted = min(wanted, extra.total)
        idle += _ending(queue, extra)  # which it may keep
        wanted = max(0, wanted)
        lent = min(wanted, max(0, idle))
        idle -= lent
        may_grow = queue.is_late and queue.bottleneck is None
        grown = wanted - lent if may_grow else min(extra.grown, wanted - lent)
        limit = None
        if queue.is_late:
            limit = queue.bottleneck or (AT_MOST if queue.slots + wanted >= queue.max_slots else None)
        decided.append(ExtraSlots(lent=lent, grown=grown, limit=limit))
    return decided


def _ending(queue: QueueLoad, extra: ExtraSlots) -> int:
    """How many requests still run on slots that were taken back."""
    return max(0, queue.running - queue.slots - extra.total)


# ---- the consumers get as many deliveries ----------------------------------------------------------------------------

BOTTLENECK_FOR_S: Final = 2.0
"""A lane counts as waiting for a provider's budget until this time after one of its requests was last seen waiting."""
LIMIT_LOGGED_EVERY_S: Final = 60.0
FREE_FOR_LOOKS: Final = 2 * LOOKS_A_SECOND
"""A queue is not scouted any more when some of its slots were free at so many looks in a row."""
SCOUT_PREFETCH: Final = 64
"""So many requests at most are moved in the time that the broker takes to confirm a publish, which is long on a busy
machine."""
WaitingFor = Callable[[], Mapping[str, str]]


class SlotPool(Protocol):
    """What `Scaling` knows of a `Pool`."""

    @property
    def queue(self) -> str: ...
    @property
    def is_taking(self) -> bool: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def in_hand(self) -> int: ...
    async def resize(self, prefetch: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class ScaledQueue:
    """A queue whose number of slots changes."""

    lane: str
    pool: SlotPool
    sides: Sequence[SlotPool] = ()
    """Those of its side queues, which use the same slots. Each gets twice as many deliveries while all that it has run;
    so hardly more wait here than run, and another process or a higher priority goes first."""
    can_scout: bool = False
    shared: QueueSlots
    load: QueueLoad
    target_wait_s: float
    activity: LaneActivity
    extra: ExtraSlots = field(default_factory=ExtraSlots)
    running: deque[int] = field(default_factory=lambda: deque(maxlen=LOOKS_A_SECOND))
    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=LOOKS_A_SECOND))
    waiting_since_s: float | None = None
    limit_logged_s: float | None = None
    begun: deque[int] = field(default_factory=lambda: deque(maxlen=LOOKS_A_SECOND + 1))
    """How many requests of the queue had begun since the process started, at each of the last looks in a row that
    found all slots in use. When the list is full, its first and its last number were taken a second apart."""
    is_scouted: bool = False
    free_looks: int = 0

    def __post_init__(self) -> None:
        self.running.append(self.load.slots)  # so that none is lent in the first second

    def see(self, *, ready: int, bottleneck: str | None, now_s: float) -> None:
        waiting = self.shared.waiting + ready if self.shared.is_full and self.pool.is_taking else 0
        if not waiting:
            self.waiting_since_s = None
        elif self.waiting_since_s is None:
            self.waiting_since_s = now_s
        self.running.append(self.shared.running)
        self.load = replace(
            self.load,
            running=self.shared.running,
            busiest=max(self.running),
            waiting=waiting,
            is_late=self.wait_s(now_s) > self.target_wait_s,
            bottleneck=bottleneck,
        )

    def wait_s(self, now_s: float) -> float:
        """For how long requests have been waiting for slots without a break."""
        return 0.0 if self.waiting_since_s is None else now_s - self.waiting_since_s

    def give(self, extra: ExtraSlots) -> None:
        size = self.load.slots + extra.total
        if extra.total > self.extra.total:
            self.running.append(size)  # new slots count as used at first
        if (extra.lent, extra.grown) != (self.extra.lent, self.extra.grown):
            log.debug(
                signals.SLOTS_CHANGED,
                lane=self.lane,
                queue=self.pool.queue,
                slots=self.load.slots,
                lent=extra.lent,
                grown=extra.grown,
            )
        self.extra = extra
        self.sizes.append(size)
        self.shared.resize(size)

    async def resize(self) -> None:
        size = max(self.sizes)
        await self.pool.resize(size + SCOUT_PREFETCH if self.is_scouted else size)
        for side in self.sides:
            if not side.in_hand:
                await side.resize(1)
            elif side.running >= side.prefetch:
                await side.resize(min(2 * side.prefetch, size))
            else:
                await side.resize(side.prefetch)

    def look_for_scout(self, ready: int) -> None:
        slots = self.shared
        if not (slots.is_full and self.pool.is_taking):
            self.free_looks += 1
            self.begun.clear()
            if self.is_scouted and (self.free_looks >= FREE_FOR_LOOKS or not self.pool.is_taking):
                self._scout(False)
            return
        self.free_looks = 0
        self.begun.append(slots.begun)
        if self.is_scouted or len(self.begun) <= LOOKS_A_SECOND:
            return
        # Calls that began together end together, so the rate is measured over a second, not since the last look.
        in_a_second = self.begun[-1] - self.begun[0]
        is_slow = in_a_second < LOOKS_A_SECOND * slots.size
        # whether the waiting requests, at this rate, will need more than 0.25 s (if slow) or a second to get slots
        is_long = ready > (in_a_second / LOOKS_A_SECOND if is_slow else in_a_second)
        if is_long and (is_slow or slots.lane.is_shared):
            self._scout(True)

    def _scout(self, is_on: bool) -> None:
        self.is_scouted = is_on
        self.shared.set_surplus_aside(is_on)


@dataclass(eq=False)
class Scaling:
    """Gives each queue of this worker the slots that `share_out` says. `queues`: the most urgent first. `ready`: how
    many messages wait in queues of the broker."""

    queues: Sequence[ScaledQueue]
    _: KW_ONLY
    ready: Ready
    waiting_for: WaitingFor = dict
    _bottlenecks: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Until it is cancelled."""
        async for _ in every(LOOK_EVERY_S, until=asyncio.Event()):
            await self._look()

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for lane, reason in self.waiting_for().items():
            self._bottlenecks[lane] = (reason, now_s + BOTTLENECK_FOR_S)
        ready = await self._ask()
        for queue in self.queues:
            reason, until_s = self._bottlenecks.get(queue.lane, ("", now_s))
            bottleneck = reason if now_s < until_s else None
            queue.see(ready=ready.get(queue.pool.queue, 0), bottleneck=bottleneck, now_s=now_s)
        decided = share_out([(queue.load, queue.extra) for queue in self.queues])
        for queue, extra in zip(self.queues, decided, strict=True):
            queue.give(extra if queue.pool.is_taking else ExtraSlots())
            if queue.can_scout:
                queue.look_for_scout(ready.get(queue.pool.queue, 0))
            if (limit := queue.extra.limit) is not None:
                self._log_limit(queue, limit, now_s)
        self._publish_figures()
        await asyncio.gather(*(queue.resize() for queue in self.queues))

    async def _ask(self) -> Mapping[str, int]:
        full = [queue.pool.queue for queue in self.queues if queue.shared.is_full and queue.pool.is_taking]
        try:
            return await self.ready(full) if full else {}
        except BrokerError:  # the pools notice and report a lost connection themselves
            return {}

    def _log_limit(self, queue: ScaledQueue, limit: str, now_s: float) -> None:
        if queue.limit_logged_s is None or now_s >= queue.limit_logged_s + LIMIT_LOGGED_EVERY_S:
            queue.limit_logged_s = now_s
            log.info(
                signals.SLOTS_LIMITED,
                lane=queue.lane,
                queue=queue.pool.queue,
                limit=limit,
                wait_s=round(queue.wait_s(now_s), 1),
            )

    def _publish_figures(self) -> None:
        for queue in self.queues:
            queue.activity.extra_slots = 0
            queue.activity.slots_limit = None
        for queue in self.queues:
            queue.activity.extra_slots += queue.extra.total
            queue.activity.slots_limit = queue.activity.slots_limit or queue.extra.limit
