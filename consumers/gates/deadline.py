"""The deadline gate: a request past its deadline is answered `deadline_exceeded`, and the provider is not called."""

from consumers.job import Asked, Job, NowMs
from consumers.outcomes import Outcome, Refused
from lanekeeper.contract.problems import RequestProblem


class DeadlineGate:
    """Ends a request that is past its deadline, wherever it spent the time."""

    def __init__(self, *, now_ms: NowMs) -> None:
        self._now_ms = now_ms

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        if self._now_ms() < asked.request.deadline_ms:
            return None
        return Refused(exceeded(job, asked))

    async def leave(self, job: Job, asked: Asked, outcome: Outcome | None) -> None:
        """Does nothing: nothing was taken."""


def exceeded(job: Job, asked: Asked) -> RequestProblem:
    """The problem of a request past its deadline; its detail says where the time was spent."""
    bound_ms = asked.request.deadline_ms - asked.request.start_ms
    spent = f"{job.wait_ms} ms waiting"
    if job.attempts:
        spent += f", {job.run_ms} ms in attempt {job.attempts}" if job.run_ms else f", {job.attempts} attempts made"
    return RequestProblem("deadline_exceeded", f"not answered within {bound_ms} ms: {spent}")
