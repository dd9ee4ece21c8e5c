"""Lets each delivered request wait for a slot (the right to be worked on), or sets it aside (moves it to a side queue,
where requests of tenants that exceed their share wait)."""

from typing import Protocol

from consumers.fairness.aside import SideQueues
from consumers.fairness.lane_slots import Admission, QueueSlots
from consumers.job import Job
from consumers.outcomes import Outcome
from consumers.rank import rank


class Entrance(Protocol):
    """Lets a delivery wait until it gets a slot of its lane, that is, the right to be worked on."""

    async def enter(self, job: Job) -> Admission:
        """Wait until the request holds a slot (the result is BEGIN), or must be set aside, that is, moved to a side
        queue, because its tenant exceeds its share or the wait takes too long (ASIDE)."""

    def leave(self, job: Job) -> None:
        """Give back the slot that a request got by `enter`."""

    def unread(self, queue: str) -> None:
        """Note that the last delivery of this queue could not be read, so that `enter` will not be called for that
        delivery."""

    async def set_aside(self, job: Job) -> Outcome | None:
        """Move the request to a side queue of its lane, where requests of tenants that exceed their share wait. Return
        None if it was moved; if the side queue is full, the outcome with which the request is settled instead. Raises
        BrokerError."""


class QueueEntrance:
    """Lets deliveries of a lane's intake or due queue wait for a slot. (The due queue has the requests that come back
    from a delay.) `side_queues`: moves requests that exceed their tenant's share to side queues; None: no request is
    moved."""

    def __init__(self, slots: QueueSlots, side_queues: SideQueues | None = None) -> None:
        self._slots = slots
        self._side_queues = side_queues

    async def enter(self, job: Job) -> Admission:
        tenant = job.identity.tenant
        if self._slots.begin(tenant):
            return Admission.BEGIN
        movable = self._side_queues is not None and self._side_queues.may_take(job)
        return await self._slots.wait(tenant, rank=_rank(job), movable=movable)

    def leave(self, job: Job) -> None:
        self._slots.end(job.identity.tenant)

    def unread(self, queue: str) -> None:
        """Does nothing: when this delivery is settled, the broker sends the next one by itself."""

    async def set_aside(self, job: Job) -> Outcome | None:
        assert self._side_queues is not None
        outcome = await self._side_queues.put(job)
        if outcome is None:
            self._slots.lane.figures(job.identity.tenant).set_aside += 1
        return outcome


class SideQueueEntrance:
    """Lets the first message (the head) of each side queue of a lane wait for a slot of the lane's intake queue,
    because side queues (for requests of tenants that exceed their share) have no slots of their own."""

    def __init__(self, slots: QueueSlots, side_queues: SideQueues) -> None:
        self._slots = slots
        self._side_queues = side_queues

    async def enter(self, job: Job) -> Admission:
        tenant = job.identity.tenant
        self._side_queues.head_arrived(job)
        try:
            if self._slots.begin(tenant):
                return Admission.BEGIN
            return await self._slots.wait(tenant, rank=_rank(job), movable=True, is_head=True)
        finally:
            self._side_queues.head_left(job)

    def leave(self, job: Job) -> None:
        self._slots.end(job.identity.tenant)

    def unread(self, queue: str) -> None:
        self._side_queues.head_unread(queue)

    async def set_aside(self, job: Job) -> Outcome | None:
        """Move a request that has waited too long in this process to the end of its side queue, so that a process with
        a free slot can take it."""
        return await self._side_queues.put(job)


def _rank(job: Job) -> int:
    """The rank of a request, that is, its priority among the waiting requests of its tenant; the highest rank goes
    first."""
    return rank(job.message.priority, is_fresh=job.hop.is_fresh) or 0
