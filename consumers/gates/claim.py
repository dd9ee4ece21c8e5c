"""The claim gate: one delivery of a request is worked at a time, and what has ended is answered from the store."""

from consumers.claiming import Claiming
from consumers.job import Answered, Buried, Deferred, Dropped, Job, Outcome, Refused, Replayed
from consumers.state.base import Conflict, Ended, Granted, Running
from topology.contract.problems import RequestProblem

LEAST_WAIT_MS = 200
LONGEST_WAIT_MS = 5_000


class ClaimGate:
    """Takes the claim of (tenant, message id); `settle` completes it, and what did not end gives it back here."""

    def __init__(self, claiming: Claiming) -> None:
        self._claiming = claiming

    async def enter(self, job: Job) -> Outcome | None:
        """Raises StoreUnavailable where the store stays away: no provider is called without a claim."""
        match await self._claiming.claim(job):
            case Granted():
                return None
            case Running(for_ms=for_ms):
                # the longer it has run, the longer it may: as many looks as a doubling back-off
                wait_ms = min(LONGEST_WAIT_MS, max(LEAST_WAIT_MS, for_ms))
                return Deferred(delay_ms=wait_ms, reason="running elsewhere", due_ms=job.hop.due_ms)
            case Ended(completion=completion, same_copy=same_copy):
                return Replayed(completion=completion, buries=same_copy and job.redelivered)
            case Conflict():
                return Refused(
                    RequestProblem(
                        "idempotency_conflict",
                        "message_id: it was used with another body; give every request an id of its own",
                    )
                )

    async def leave(self, job: Job, outcome: Outcome | None) -> None:
        """What has ended keeps its claim until the store has the completion."""
        match outcome:
            case Answered() | Refused() | Buried() | Dropped() | Replayed():
                return
            case _:
                await self._claiming.release(job)
