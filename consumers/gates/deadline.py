"""The deadline gate: a request past its deadline is answered `deadline_exceeded`, and the provider is not called."""

from consumers.job import Job, NowMs, Outcome, Refused
from lanekeeper.contract.problems import RequestProblem


class DeadlineGate:
    """Ends a request that is past its deadline, wherever it spent the time."""

    def __init__(self, *, now_ms: NowMs) -> None:
        self._now_ms = now_ms

    async def enter(self, job: Job) -> Outcome | None:
        assert job.request is not None
        if self._now_ms() < job.request.deadline_ms:
            return None
        return Refused(exceeded(job))

    async def leave(self, job: Job, outcome: Outcome | None) -> None:
        """Does nothing: nothing was taken."""


def exceeded(job: Job) -> RequestProblem:
    """The problem of a request past its deadline; it tells where the time was spent."""
    assert job.request is not None
    bound_ms = job.request.deadline_ms - job.request.start_ms
    spent = f"{job.wait_ms} ms waiting"
    if job.attempts:
        spent += f", {job.run_ms} ms in attempt {job.attempts}" if job.run_ms else f", {job.attempts} attempts made"
    return RequestProblem("deadline_exceeded", f"not answered within {bound_ms} ms: {spent}")
