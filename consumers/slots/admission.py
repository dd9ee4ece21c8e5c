"""Decides which request gets the next free slot of a lane, and which requests are set aside: moved to a side queue of
their lane, where requests of tenants that exceed their share do not delay other tenants. A slot is the right to work on
one request at a time.

    lane = LaneSlots(shares, has_aside)     one for each lane in a process
    intake = lane.queue(16)                 the 16 slots of one queue
    if intake.begin(tenant) or await intake.wait(…) is Admission.BEGIN:
        …                                   the request holds a slot
        intake.end(tenant)

Of the tenants whose requests wait, the one that holds the fewest slots in proportion to its weight gets the next free
slot. Tenants that are equal in this take turns, in proportion to their weights, however many requests each has. If a
tenant's requests in this process exceed its share of the slots, further ones are set aside, so that the broker delivers
the requests of other tenants behind them.

The worker publishes such a request to the side queue, and acknowledges its delivery after the broker's confirm
(`consumers/pool.py`). If the worker dies between confirm and acknowledgement, there are two messages of one request;
the claim then lets only one of them run. Setting a request aside takes no claim, and does not count as an attempt.

Each tenant gets a side queue of its own while there are enough of them. A process knows to which tenant a side queue
belongs if it holds messages of the queue, or has just published one there itself. Two processes that begin at the same
time to set requests of one tenant aside may choose different queues; the order of the tenant's requests is then lost.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import islice
from typing import Final

from cachetools import TTLCache
from typing_extensions import override

from consumers.clock import NowMs, now_ms
from consumers.job import HIGHEST_PRIORITY, Job, side_priority
from consumers.outcomes import Deferred, Outcome, end_with
from consumers.settle import expires_ms, set_aside
from consumers.spending import EVERY_TENANT
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import UNREADABLE
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import MessageTooLarge, PublishRefused
from topology.lanes import LaneSpec

HELD_S: Final = 60.0
"""A request that has waited in this process for a slot for this time is set aside (moved to a side queue), or deferred
if its lane has none: a delivery may not be held without end (`consumers/job.py`), and another process may have a free
slot for the request."""
LATELY_S: Final = 600.0
TENANTS_COUNTED: Final = 256


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The settings for one tenant."""

    weight: float = 1.0
    in_flight: int | None = None


DEFAULT_SHARE: Final = TenantShare()


class Admission(Enum):
    """The result of waiting for a slot."""

    BEGIN = auto()
    ASIDE = auto()
    BACK = auto()


@dataclass(eq=False, slots=True)
class _WaitingRequest:
    tenant: str
    rank: int
    movable: bool
    admission: "asyncio.Future[Admission]"


@dataclass(slots=True)
class Figures:
    """Counts of one tenant's requests in one lane, since the process started."""

    begun: int = 0
    set_aside: int = 0
    waits: int = 0
    """How many waits `waited_ms` is the sum of."""
    waited_ms: int = 0
    seen_s: float = 0.0


@dataclass(slots=True)
class LaneSlots:
    """The slots of one lane in this process. Each queue of the lane has slots of its own (`QueueSlots`)."""

    shares: Mapping[str, TenantShare] = field(default_factory=dict)
    """By tenant."""
    has_aside: Callable[[str], bool] | None = None
    queues: list["QueueSlots"] = field(default_factory=list)
    _figures: "OrderedDict[str, Figures]" = field(default_factory=OrderedDict, init=False)

    def queue(self, size: int) -> "QueueSlots":
        queue = QueueSlots(self, size)
        self.queues.append(queue)
        return queue

    def share_of(self, tenant: str) -> TenantShare:
        return self.shares.get(tenant) or self.shares.get(EVERY_TENANT, DEFAULT_SHARE)

    def is_at_its_cap(self, tenant: str) -> bool:
        cap = self.share_of(tenant).in_flight
        return cap is not None and sum(queue.running_of(tenant) for queue in self.queues) >= cap

    def figures(self, tenant: str) -> Figures:
        if (found := self._figures.get(tenant)) is None:
            if len(self._figures) >= TENANTS_COUNTED:
                self._figures.popitem(last=False)
            found = self._figures[tenant] = Figures()
        else:
            self._figures.move_to_end(tenant)
        found.seen_s = asyncio.get_running_loop().time()
        return found

    def note_wait(self, tenant: str, wait_ms: int) -> None:
        figures = self.figures(tenant)
        figures.waits += 1
        figures.waited_ms += wait_ms

    @property
    def is_shared(self) -> bool:
        latest = list(islice(reversed(self._figures.values()), 2))
        return len(latest) == 2 and latest[1].seen_s > asyncio.get_running_loop().time() - LATELY_S

    @property
    def running(self) -> int:
        return sum(queue.running for queue in self.queues)

    @property
    def in_hand(self) -> int:
        return sum(queue.waiting for queue in self.queues)

    def snapshot(self, tenants: Collection[str] | None = None) -> dict[str, dict[str, int]]:
        return {
            tenant: {
                "running": sum(queue.running_of(tenant) for queue in self.queues),
                "in_hand": sum(queue.waiting_of(tenant) for queue in self.queues),
                "begun": figures.begun,
                "set_aside": figures.set_aside,
                "waits": figures.waits,
                "waited_ms": figures.waited_ms,
            }
            for tenant, figures in self._figures.items()
            if tenants is None or tenant in tenants
        }


class QueueSlots:
    """The slots of one queue, and the deliveries of that queue that wait in this process for a slot."""

    def __init__(self, lane: LaneSlots, size: int) -> None:
        self.lane = lane
        self.size = size
        self._running: dict[str, int] = {}
        self._passes: dict[str, float] = {}
        """The pass (a term of stride scheduling) of each tenant that has running or waiting requests: each slot that
        the tenant is granted adds 1/weight to it."""
        self._floor = 0.0
        self._waiting: list[_WaitingRequest] = []
        self.running = 0
        self.begun = 0
        self.sets_surplus_aside = False
        """Whether requests that exceed their tenant's share are set aside even if no request of the tenant is in a side
        queue yet."""

    @property
    def is_full(self) -> bool:
        return self.running >= self.size

    def running_of(self, tenant: str) -> int:
        return self._running.get(tenant, 0)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        return sum(waiting.tenant == tenant for waiting in self._waiting)

    def resize(self, size: int) -> None:
        self.size = size
        self.serve()

    def set_surplus_aside(self, is_on: bool) -> None:
        """Decide whether requests that exceed their tenant's share of the slots are set aside. Such requests that wait
        here already are set aside at once."""
        self.sets_surplus_aside = is_on
        if is_on:
            staying = Counter(self._running)
            for waiting in sorted(self._still_waiting(), key=lambda waiting: -waiting.rank):
                if waiting.movable and staying[waiting.tenant] >= self._share(waiting.tenant):
                    self._admit(waiting, Admission.ASIDE)
                else:
                    staying[waiting.tenant] += 1

    def begin(self, tenant: str) -> bool:
        """Take a free slot for a request of the tenant. Return False if no slot is free, or the tenant is at its
        in-flight limit. The request overtakes no other, because requests wait while a slot is free only if their
        tenants are at their in-flight limits."""
        if self.running >= self.size or self.lane.is_at_its_cap(tenant):
            return False
        self._grant(tenant)
        return True

    async def wait(
        self,
        tenant: str,
        *,
        rank: int = 0,
        movable: bool = False,
        is_aside: bool = False,
        within_s: float = math.inf,
    ) -> Admission:
        """Wait for a slot, after `begin` returned False; after `HELD_S` seconds, or `within_s` if that is less, the
        result is ASIDE. `rank`: the priority of the request among the requests of its tenant. `movable`: the request
        may be moved to a side queue earlier. `is_aside`: it comes from a side queue, and is not moved back earlier."""
        movable = movable and self.lane.has_aside is not None
        if movable and not is_aside and self._belongs_aside(tenant):
            return Admission.ASIDE
        admission: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        waiting = _WaitingRequest(tenant=tenant, rank=rank, movable=movable and not is_aside, admission=admission)
        self._waiting.append(waiting)
        self._passes.setdefault(tenant, self._floor)
        try:
            async with asyncio.timeout(min(HELD_S, within_s)):
                return await admission
        except TimeoutError:
            return admission.result() if _is_admitted(waiting) else Admission.ASIDE
        except asyncio.CancelledError:
            if _is_admitted(waiting) and admission.result() is Admission.BEGIN:
                self.end(tenant)  # the slot was granted at the moment of the cancellation
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._forget(tenant)

    def end(self, tenant: str) -> None:
        self.running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            self._forget(tenant)
        for queue in self.lane.queues:  # a tenant at its in-flight limit may wait at the lane's other queue
            queue.serve()

    def serve(self) -> None:
        """Give the queue's free slots to waiting requests. Each slot goes to the tenant that holds the fewest in
        proportion to its weight, then to the one with the lowest pass, and there to the request with the highest
        rank."""
        while self._waiting and self.running < self.size:
            eligible = [waiting for waiting in self._still_waiting() if not self.lane.is_at_its_cap(waiting.tenant)]
            if not eligible:
                return
            # of the chosen tenant's requests, the one with the highest rank; among equals, the first
            chosen = min(eligible, key=lambda waiting: (*self._standing(waiting.tenant), -waiting.rank))
            self._grant(chosen.tenant)
            self._admit(chosen, Admission.BEGIN)

    def _still_waiting(self) -> list[_WaitingRequest]:
        """Without those whose wait was cancelled or has timed out, but whose task has not run since: nobody would give
        back a slot that such a request is given."""
        return [waiting for waiting in self._waiting if not waiting.admission.done()]

    def _standing(self, tenant: str) -> tuple[float, float]:
        return self.running_of(tenant) / self.lane.share_of(tenant).weight, self._passes.get(tenant, self._floor)

    def _grant(self, tenant: str) -> None:
        self.running += 1
        self.begun += 1
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self._floor = self._passes.get(tenant, self._floor)
        self._passes[tenant] = self._floor + 1 / self.lane.share_of(tenant).weight
        self.lane.figures(tenant).begun += 1

    def _admit(self, waiting: _WaitingRequest, admission: Admission) -> None:
        self._waiting.remove(waiting)
        waiting.admission.set_result(admission)
        self._forget(waiting.tenant)

    def _forget(self, tenant: str) -> None:
        if tenant not in self._running and not self.waiting_of(tenant):
            self._passes.pop(tenant, None)

    def _belongs_aside(self, tenant: str) -> bool:
        if self.lane.is_at_its_cap(tenant):
            return True
        has_aside = self.lane.has_aside
        if not self.sets_surplus_aside and (has_aside is None or not has_aside(tenant)):
            return False
        return self.running_of(tenant) + self.waiting_of(tenant) >= self._share(tenant)

    def _share(self, tenant: str) -> float:
        weight = self.lane.share_of(tenant).weight
        return max(1.0, self.size * weight / sum(self.lane.share_of(other).weight for other in {*self._passes, tenant}))


def _is_admitted(waiting: _WaitingRequest) -> bool:
    return waiting.admission.done() and not waiting.admission.cancelled()


# ---- requests are admitted, or set aside -----------------------------------------------------------------------------

PLACE_KEPT_S: Final = 1.0
PLACES: Final = 10_000
FULL_FOR_S: Final = 1.0
RETURNED_AT_MOST: Final = 5
PUT_OFF_MS: Final = 10_000
LATER_MS: Final = 1000


class QueueAdmitter:
    """Lets deliveries of a lane's intake or due queue wait for a slot. `names`: None if no request has to wait."""

    def __init__(
        self, slots: QueueSlots, side_queues: "SideQueues | None" = None, *, names: Names | None = None
    ) -> None:
        self._slots = slots
        self._side_queues = side_queues
        self._names = names

    async def admit(self, job: Job) -> Admission:
        """Wait until the request holds a slot, or must leave this process."""
        tenant = job.identity.tenant
        if self._slots.begin(tenant):
            return Admission.BEGIN
        may_leave = self._names is not None and may_move(job, self._names)
        movable = self._side_queues is not None and may_leave
        admission = await self._slots.wait(tenant, rank=_rank(job), movable=movable)
        return Admission.BACK if admission is Admission.ASIDE and not may_leave else admission

    def leave(self, job: Job) -> None:
        if job.attempted is not None:
            self._slots.lane.note_wait(job.identity.tenant, job.wait_ms)
        self._slots.end(job.identity.tenant)

    async def set_aside(self, job: Job) -> Outcome | None:
        """Move the request to a side queue. Return None if it was moved; if there is none, or it is full, the outcome
        with which the request is settled instead. Raises BrokerError."""
        if self._side_queues is None:
            return Deferred(delay_ms=LATER_MS, reason="slots", redelivered=job.redelivered)
        outcome = await self._side_queues.put(job)
        if outcome is None:
            self._slots.lane.figures(job.identity.tenant).set_aside += 1
        return outcome


class AtOnce(QueueAdmitter):
    """Lets each request begin, without a slot: for those that are refused."""

    def __init__(self) -> None:
        super().__init__(LaneSlots().queue(0))

    @override
    async def admit(self, job: Job) -> Admission:
        return Admission.BEGIN

    @override
    def leave(self, job: Job) -> None:
        pass


class PausedAdmitter(AtOnce):
    """Takes from the queue of a paused lane what is late, without a slot. What was looked at, and returned, several
    times as RabbitMQ counts (before 4.3 it does) is put off instead, so that it never reaches the delivery limit."""

    def __init__(self, *, now_ms: NowMs = now_ms) -> None:
        super().__init__()
        self._now_ms = now_ms

    def takes(self, job: Job) -> bool:
        return self._is_late(job) or (job.delivery.times_delivered or 0) > RETURNED_AT_MOST

    @override
    async def admit(self, job: Job) -> Admission:
        return Admission.BEGIN if self._is_late(job) else Admission.ASIDE

    @override
    async def set_aside(self, job: Job) -> Outcome | None:
        return Deferred(delay_ms=PUT_OFF_MS, reason="paused", redelivered=job.redelivered)

    def _is_late(self, job: Job) -> bool:
        return job.deadline_ms is not None and job.deadline_ms <= self._now_ms()


class SideQueueAdmitter(QueueAdmitter):
    """Lets deliveries of the side queues of a lane wait for a slot of the lane's intake queue."""

    def __init__(self, slots: QueueSlots, side_queues: "SideQueues") -> None:
        super().__init__(slots)
        self._sides = side_queues

    @override
    async def admit(self, job: Job) -> Admission:
        tenant, admission = job.identity.tenant, Admission.BEGIN
        self._sides.add(job)
        try:
            if not self._slots.begin(tenant):
                admission = Admission.ASIDE  # also if it is cancelled
                admission = await self._slots.wait(
                    tenant, rank=_rank(job), movable=True, is_aside=True, within_s=self._sides.expires_in_s(job)
                )
        finally:
            if admission is not Admission.BEGIN:
                self._sides.discard(job)
        return admission

    @override
    def leave(self, job: Job) -> None:
        self._sides.discard(job)
        super().leave(job)

    @override
    async def set_aside(self, job: Job) -> Outcome | None:
        return await self._sides.put(job)  # to the end, so that a process with a free slot can take it


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _rank(job: Job) -> int:
    return side_priority(job.message.priority, is_fresh=job.hop.is_fresh) or 0


@dataclass(eq=False)
class SideQueues:
    """Moves requests that exceed their tenant's share to the side queues of one lane, and notes which tenant has which
    side queue."""

    lane: LaneSpec
    _: KW_ONLY
    publisher: Publisher
    names: Names
    now_ms: NowMs

    def __post_init__(self) -> None:
        lane, names = self.lane, self.names
        self._numbers = {names.side(lane.name, number): number for number in range(lane.side_queues)}
        self._held: dict[str, Counter[int]] = {}
        """How many deliveries of each side queue this process works on, or holds until they get a slot, by tenant."""
        self._places: TTLCache[str, int] = TTLCache(PLACES, PLACE_KEPT_S, timer=_now_s)
        self._full: TTLCache[int, bool] = TTLCache(lane.side_queues, FULL_FOR_S, timer=_now_s)

    def has(self, tenant: str) -> bool:
        return self._number_of(tenant) is not None

    def expires_in_s(self, job: Job) -> float:
        """After which time the broker would let it expire if it were not held here."""
        return math.inf if (end_ms := expires_ms(job)) is None else max(0.0, (end_ms - self.now_ms()) / 1000)

    def add(self, job: Job) -> None:
        self._held.setdefault(job.identity.tenant, Counter())[self._numbers[job.delivery.queue]] += 1

    def discard(self, job: Job) -> None:
        tenant, number = job.identity.tenant, self._numbers[job.delivery.queue]
        held = self._held[tenant]
        held[number] -= 1
        if not held[number]:
            del held[number]
            self._places[tenant] = number
        if not held:
            del self._held[tenant]

    async def put(self, job: Job) -> Outcome | None:
        if not self.expires_in_s(job):  # the broker would deliver it at once, if a worker has room for it
            return end_with("deadline_exceeded", f"expired after its expiration of {job.hop.expiration} ms")
        number = self._place(job.identity.tenant)
        if number in self._full:
            return self._refuse(job)
        self._places[job.identity.tenant] = number
        message = set_aside(job, now_ms=self.now_ms(), names=self.names)
        try:
            await self.publisher.publish_surely(
                message, exchange=self.names.side_exchange(number), routing_key=job.routing_key, refused_within_s=0
            )
        except PublishRefused:
            self._full[number] = True
            return self._refuse(job)
        except MessageTooLarge:  # nor will it be taken for a delay: it ends
            return Deferred(delay_ms=LATER_MS, reason="slots", redelivered=job.redelivered)
        return None

    def _refuse(self, job: Job) -> Outcome:
        if not job.trusted:
            return end_with(
                "too_many_waiting",
                f"lane {self.lane.name} holds {self.lane.max_length} waiting requests of this tenant (and of "
                "those that share its side queue), and takes no more; send them later",
            )
        return Deferred(delay_ms=LATER_MS, reason="too many waiting")

    def _place(self, tenant: str) -> int:
        """The number of the side queue for a tenant's requests: the queue that has some of them already; else the first
        free queue, in an order that is computed from the tenant's name; else the one of which this process holds the
        fewest."""
        if (known := self._number_of(tenant)) is not None:
            return known
        assigned = set(self._places.values())
        held = sum(self._held.values(), Counter[int]())
        preferred = sorted(
            self._numbers.values(), key=lambda number: blake2b(f"{number} {tenant}".encode(), digest_size=8).digest()
        )
        return min(preferred, key=lambda number: (number in assigned or held[number] > 0, held[number]))

    def _number_of(self, tenant: str) -> int | None:
        if (held := self._held.get(tenant)) is not None:
            return next(iter(held))
        return self._places.get(tenant)


def may_move(job: Job, names: Names) -> bool:
    """Whether a copy of a request may take its place. A request that will be refused because of its headers may not be
    moved, because its copy would not have these headers, and so would not be refused."""
    message = job.message
    if job.trusted:
        return not job.hop.reply_try  # if only the reply is left to send, the request needs no slot for long
    return (
        message.exchange == names.requests
        and message.routing_key.partition(".")[0] == job.lane_name
        and (message.priority or 0) <= HIGHEST_PRIORITY
        and not any(header in message.headers for header in (UNREADABLE, n.DEATH, n.CC, n.BCC))
    )
