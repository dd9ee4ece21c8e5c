"""Lets each delivered request wait for a slot, or sets it aside: moves it to a side queue of its lane, where requests
of tenants that exceed their share do not delay other tenants.

The worker publishes such a request to the side queue, and acknowledges its delivery after the broker's confirm
(`consumers/pool.py`). If the worker dies between confirm and acknowledgement, there are two messages of one request;
the claim (the store's record that a worker runs the request) then lets only one of them run. Setting a request aside
takes no claim, and does not count as an attempt.

Each tenant gets a side queue of its own while there are enough of them. A process knows to which tenant a side queue
belongs if it holds the queue's first message (its head), or has just published a message there itself. Two processes
that begin at the same time to set requests of one tenant aside may choose different queues; the order of the tenant's
requests is then lost.
"""

import asyncio
from hashlib import blake2b
from typing import Final

from cachetools import TTLCache
from typing_extensions import override

from consumers.clock import NowMs, now_ms
from consumers.job import HIGHEST_PRIORITY, Job, side_priority
from consumers.outcomes import Deferred, Outcome, ended
from consumers.settle import set_aside
from consumers.slots.lane_slots import Admission, LaneSlots, QueueSlots
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import UNREADABLE
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PublishRefused
from topology.broker.consume import Heads
from topology.lanes import LaneSpec

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
        """Wait until the request holds a slot, or must leave this process, because its tenant exceeds its share or the
        wait takes too long."""
        tenant = job.identity.tenant
        if self._slots.begin(tenant):
            return Admission.BEGIN
        may_leave = self._names is not None and may_move(job, self._names)
        movable = self._side_queues is not None and may_leave
        admission = await self._slots.wait(tenant, rank=_rank(job), movable=movable)
        return Admission.BACK if admission is Admission.ASIDE and not may_leave else admission

    def leave(self, job: Job) -> None:
        self._slots.end(job.identity.tenant)

    def unread(self, queue: str) -> None:
        """The last delivery of this queue could not be read, so that `admit` will not be called for it."""

    async def set_aside(self, job: Job) -> Outcome | None:
        """Move the request to a side queue. Return None if it was moved; if there is none, or it is full, the outcome
        with which the request is settled instead. Raises BrokerError."""
        if self._side_queues is None:
            return Deferred(delay_ms=LATER_MS, reason="slots", redelivered=job.redelivered)
        outcome = await self._side_queues.put(job)
        if outcome is None:
            self._slots.lane.figures(job.identity.tenant).set_aside += 1
        return outcome


class PausedAdmitter(QueueAdmitter):
    """Takes from the queue of a paused lane what is late, without a slot. What was looked at, and returned, several
    times as RabbitMQ counts (before 4.3 it does) is put off instead, so that it never reaches the delivery limit."""

    def __init__(self, *, now_ms: NowMs = now_ms) -> None:
        super().__init__(LaneSlots().queue(0))
        self._now_ms = now_ms

    def takes(self, job: Job) -> bool:
        return self._is_late(job) or (job.delivery.times_delivered or 0) > RETURNED_AT_MOST

    @override
    async def admit(self, job: Job) -> Admission:
        return Admission.BEGIN if self._is_late(job) else Admission.ASIDE

    @override
    async def set_aside(self, job: Job) -> Outcome | None:
        return Deferred(delay_ms=PUT_OFF_MS, reason="paused", redelivered=job.redelivered)

    @override
    def leave(self, job: Job) -> None:
        pass

    def _is_late(self, job: Job) -> bool:
        return job.deadline_ms is not None and job.deadline_ms <= self._now_ms()


class SideQueueAdmitter(QueueAdmitter):
    """Lets the first message (the head) of each side queue of a lane wait for a slot of the lane's intake queue,
    because side queues have no slots of their own."""

    def __init__(self, slots: QueueSlots, side_queues: "SideQueues") -> None:
        super().__init__(slots)
        self._sides = side_queues

    @override
    async def admit(self, job: Job) -> Admission:
        tenant = job.identity.tenant
        self._sides.head_arrived(job)
        try:
            if self._slots.begin(tenant):
                return Admission.BEGIN
            return await self._slots.wait(tenant, rank=_rank(job), movable=True, is_head=True)
        finally:
            self._sides.head_left(job)

    @override
    def unread(self, queue: str) -> None:
        self._sides.head_unread(queue)

    @override
    async def set_aside(self, job: Job) -> Outcome | None:
        return await self._sides.put(job)  # to the end, so that a process with a free slot can take it


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _rank(job: Job) -> int:
    return side_priority(job.message.priority, is_fresh=job.hop.is_fresh) or 0


class SideQueues:
    """Moves requests that exceed their tenant's share to the side queues of one lane, and notes which tenant has which
    side queue."""

    def __init__(self, lane: LaneSpec, heads: Heads, *, publisher: Publisher, names: Names, now_ms: NowMs) -> None:
        self._lane = lane
        self._heads = heads
        self._publisher = publisher
        self._names = names
        self._now_ms = now_ms
        self._numbers = {names.side(lane.name, number): number for number in range(lane.side_queues)}
        self._tenants: dict[int, str] = {}
        self._places: TTLCache[str, int] = TTLCache(PLACES, PLACE_KEPT_S, timer=_now_s)
        self._full: TTLCache[int, bool] = TTLCache(lane.side_queues, FULL_FOR_S, timer=_now_s)

    def has(self, tenant: str) -> bool:
        return self._number_of(tenant) is not None

    def head_arrived(self, job: Job) -> None:
        number = self._numbers[job.delivery.queue]
        self._tenants[number] = job.identity.tenant

    def head_left(self, job: Job) -> None:
        number = self._numbers[job.delivery.queue]
        if self._tenants.pop(number, None) is not None:
            self._places[job.identity.tenant] = number
        self._heads.pass_on(job.delivery.queue)

    def head_unread(self, queue: str) -> None:
        self._heads.pass_on(queue)

    async def put(self, job: Job) -> Outcome | None:
        number = self._place(job.identity.tenant)
        if number in self._full:
            return self._refuse(job)
        self._places[job.identity.tenant] = number
        message = set_aside(job, now_ms=self._now_ms(), names=self._names)
        try:
            await self._publisher.publish_surely(
                message, exchange=self._names.side_exchange(number), routing_key=job.routing_key, refused_within_s=0
            )
        except PublishRefused:
            self._full[number] = True
            return self._refuse(job)
        self._heads.publish_seen(self._names.side(self._lane.name, number))
        return None

    def _refuse(self, job: Job) -> Outcome:
        if not job.trusted:
            return ended(
                "too_many_waiting",
                f"lane {self._lane.name} holds {self._lane.max_length} waiting requests of this tenant (and of "
                "those that share its side queue), and takes no more; send them later",
            )
        return Deferred(delay_ms=LATER_MS, reason="too many waiting")

    def _place(self, tenant: str) -> int:
        """The number of the side queue for a tenant's requests: the queue that has some of them already; else the first
        free queue (it has no requests and is assigned to no tenant), in an order that is computed from the tenant's
        name; else the shortest queue."""
        if (known := self._number_of(tenant)) is not None:
            return known
        assigned = set(self._places.values())
        waiting = {number: self._heads.ready_in(queue) for queue, number in self._numbers.items()}
        preferred = sorted(waiting, key=lambda number: blake2b(f"{number} {tenant}".encode(), digest_size=8).digest())

        def is_used(number: int) -> bool:
            return number in assigned or number in self._tenants or waiting[number] > 0

        return min(preferred, key=lambda number: (is_used(number), waiting[number]))

    def _number_of(self, tenant: str) -> int | None:
        for number, owner in self._tenants.items():
            if owner == tenant:
                return number
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
