"""The schedule gate: what is not due yet goes into the delay cascade, and no worker holds it meanwhile."""

from consumers.claiming import Claiming
from consumers.job import Asked, Job, NowMs
from consumers.outcomes import Deferred, Outcome, Refused
from consumers.state.base import Room
from lanekeeper.contract.problems import RequestProblem

UNCOUNTED_MS = 60_000
"""A wait that is no longer needs no room of its own: what comes in is bounded by how fast it can be published."""
UNIT_BYTES = 16 * 1024
"""Each begun so many bytes of a body count as one that waits."""
WHOSE = {
    Room.TENANT_FULL: "its tenant has as many requests waiting as one may (each 16 KiB of a body count as one)",
    Room.FULL: "as many requests wait as may in all",
}


class ScheduleGate:
    """Defers a request until its due time (`x-lane-delay-ms`, `x-lane-at`).

    That is kept before the request goes into the cascade, and never after: there it may be claimed before it is kept.
    A long wait is counted first, and refused where there is no room: it lies on the broker's disks. What was cancelled
    or has ended before it came does not wait: the claim gate answers it.
    """

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        """Raises StoreUnavailable where a long wait can be neither counted nor kept."""
        due_ms = asked.request.due_ms
        if due_ms is None:
            return None
        left_ms = due_ms - self._now_ms()
        if left_ms <= 0:
            return None
        is_new = job.hop.due_ms is None  # what waits already has its room: our own deferrals are never refused
        defer = self._claiming.defer_for_long if is_new and left_ms > UNCOUNTED_MS else self._claiming.defer
        if not await defer(job, due_ms=due_ms, deadline_ms=asked.request.deadline_ms):
            return None
        if is_new and left_ms > UNCOUNTED_MS and (full := await self._without_room(job, due_ms)) is not None:
            return full
        # the time again: keeping it took some
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
        """Nothing was taken."""
