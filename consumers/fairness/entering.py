"""How a delivery gets a slot: it waits for one, or is set aside."""

from typing import Protocol

from consumers.fairness.aside import Aside
from consumers.fairness.turns import Bench, Turn
from consumers.job import Job
from consumers.outcomes import Outcome
from consumers.rank import rank


class Entering(Protocol):
    """Lets a delivery wait for a slot."""

    async def enter(self, job: Job) -> Turn:
        """Wait until the request holds a slot, or should be set aside."""

    def leave(self, job: Job) -> None:
        """Give a delivery's slot back."""

    def unread(self, queue: str) -> None:
        """The last delivery of this queue could not be read as a job."""

    async def set_aside(self, job: Job) -> Outcome | None:
        """Move it to a side queue. If it cannot be moved, return its outcome. Raises BrokerError."""


class FromQueue:
    """For an intake or a due queue. Without `aside` every delivery waits here."""

    def __init__(self, bench: Bench, aside: Aside | None = None) -> None:
        self._bench = bench
        self._aside = aside

    async def enter(self, job: Job) -> Turn:
        tenant = job.identity.tenant
        if self._bench.begin(tenant):
            return Turn.BEGIN
        movable = self._aside is not None and self._aside.may_take(job)
        return await self._bench.wait(tenant, rank=_rank(job), movable=movable)

    def leave(self, job: Job) -> None:
        self._bench.end(job.identity.tenant)

    def unread(self, queue: str) -> None:
        """Does nothing: the broker sends the next delivery by itself."""

    async def set_aside(self, job: Job) -> Outcome | None:
        assert self._aside is not None
        outcome = await self._aside.put(job)
        if outcome is None:
            self._bench.count_aside(job.identity.tenant)
        return outcome


class FromAside:
    """For the heads of side queues, which use the slots of the intake."""

    def __init__(self, bench: Bench, aside: Aside) -> None:
        self._bench = bench
        self._aside = aside

    async def enter(self, job: Job) -> Turn:
        tenant = job.identity.tenant
        self._aside.arrived(job)
        try:
            if self._bench.begin(tenant):
                return Turn.BEGIN
            return await self._bench.wait(tenant, rank=_rank(job), movable=True, is_head=True)
        finally:
            self._aside.left(job)

    def leave(self, job: Job) -> None:
        self._bench.end(job.identity.tenant)

    def unread(self, queue: str) -> None:
        self._aside.passed_over(queue)

    async def set_aside(self, job: Job) -> Outcome | None:
        """Move a request that was held too long to the end of its side queue, so that another process with a free slot
        can take it."""
        return await self._aside.put(job)


def _rank(job: Job) -> int:
    return rank(job.message.priority, is_fresh=job.is_fresh) or 0
