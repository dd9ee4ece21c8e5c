"""The schedule gate: a request that is not due yet goes into the delay cascade; no worker holds it meanwhile."""

from consumers.claiming import Claiming
from consumers.job import Asked, Job, NowMs
from consumers.outcomes import Deferred, Outcome, Refused
from consumers.state.base import Room
from lanekeeper.contract.problems import RequestProblem

UNCOUNTED_MS = 60_000
"""Shorter waits are not counted: the speed of publishing limits how many there can be."""
UNIT_BYTES = 16 * 1024
"""Each begun 16 KiB of a body counts as one waiting request."""
WHOSE = {
    Room.TENANT_FULL: "its tenant has as many requests waiting as one may (each 16 KiB of a body count as one)",
    Room.FULL: "as many requests wait as may in all",
}


class ScheduleGate:
    """Defers a request until its due time (`x-lane-delay-ms`, `x-lane-at`).

    The store notes the wait before the request enters the cascade, because afterwards another worker may claim it at
    any time. A long wait takes space on the broker's disks, so it is counted first, and refused if the tenant has no
    room. A request that was cancelled or had ended before it arrived does not wait: the claim gate answers it.
    """

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        """Raises StoreUnavailable if a long wait can be neither counted nor noted."""
        due_ms = asked.request.due_ms
        if due_ms is None:
            return None
        left_ms = due_ms - self._now_ms()
        if left_ms <= 0:
            return None
        is_new = job.hop.due_ms is None  # a request that we defer ourselves is counted already, and is never refused
        defer = self._claiming.defer_for_long if is_new and left_ms > UNCOUNTED_MS else self._claiming.defer
        if not await defer(job, due_ms=due_ms, deadline_ms=asked.request.deadline_ms):
            return None
        if is_new and left_ms > UNCOUNTED_MS and (full := await self._without_room(job, due_ms)) is not None:
            return full
        # read the clock again, because the store took some time
        return Deferred(delay_ms=max(0, due_ms - self._now_ms()), reason="scheduled", due_ms=due_ms)

    async def _without_room(self, job: Job, due_ms: int) -> Outcome | None:
        room = await self._claiming.reserve(job, weight=1 + len(job.message.body) // UNIT_BYTES, until_ms=due_ms)
        if room is Room.KEPT:
            return None
        return Refused(
            RequestProblem(
                "too_many_waiting",
                f"x-lane-delay-ms or x-lane-at is {UNCOUNTED_MS // 1000} s ahead or more, and {WHOSE[room]}: "
                "wait until some are due, or ask for a shorter delay",
            )
        )

    async def leave(self, job: Job, asked: Asked, outcome: Outcome | None) -> None:
        """Does nothing: nothing was taken."""
