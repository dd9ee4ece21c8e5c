"""The schedule gate: what is not due yet goes into the delay cascade, and no worker holds it meanwhile."""

from consumers.claiming import Claiming
from consumers.job import Deferred, Job, NowMs, Outcome


class ScheduleGate:
    """Defers a request until its due time (`x-lane-delay-ms`, `x-lane-at`).

    That is kept before the request goes into the cascade, and never after: there it may be claimed before it is kept.
    """

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms

    async def enter(self, job: Job) -> Outcome | None:
        assert job.request is not None
        due_ms = job.request.due_ms
        if due_ms is None:
            return None
        left_ms = due_ms - self._now_ms()
        if left_ms <= 0:
            return None
        await self._claiming.defer(job, due_ms=due_ms, deadline_ms=job.request.deadline_ms)
        # the time again: keeping it took some
        return Deferred(delay_ms=max(0, due_ms - self._now_ms()), reason="scheduled", due_ms=due_ms)

    async def leave(self, job: Job, outcome: Outcome | None) -> None:
        """Nothing was taken."""
