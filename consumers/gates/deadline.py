"""The deadline gate: a request past its deadline is answered with `deadline_exceeded`, and no provider is called."""

from consumers.job import Decoded, Job, NowMs
from consumers.outcomes import Outcome, Refused
from lanekeeper.contract.problems import RequestProblem


class DeadlineGate:
    """The gate (a check before the call to the provider) that refuses a request past its deadline."""

    def __init__(self, *, now_ms: NowMs) -> None:
        self._now_ms = now_ms

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        if self._now_ms() < decoded.request.deadline_ms:
            return None
        return Refused(exceeded(job, decoded))

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Does nothing, because `enter` takes nothing that must be given back."""


def exceeded(job: Job, decoded: Decoded) -> RequestProblem:
    """The error for a request past its deadline. Its text says how long the request waited and ran."""
    bound_ms = decoded.request.deadline_ms - decoded.request.start_ms
    spent = f"{job.wait_ms} ms waiting"
    if job.attempts:
        spent += f", {job.run_ms} ms in attempt {job.attempts}" if job.run_ms else f", {job.attempts} attempts made"
    return RequestProblem("deadline_exceeded", f"not answered within {bound_ms} ms: {spent}")
