"""The claim gate: lets only one delivery of a request pass at a time. For this it uses a record in the store (the
claim). A request that has ended is answered from the store."""

from typing import assert_never

from consumers.claiming import Claiming
from consumers.job import Decoded, Job, NowMs
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried, ended
from consumers.state.base import Conflict, Ended, Granted, Running

DEATHS_AT_MOST = 4
"""After this many workers have died while they worked on a request (had its claim in the store), the request goes to
the queue `lane.dead` at its next delivery. The broker's delivery count is not used, because it also counts deliveries
that ended because the connection was lost while the worker lived on; such a worker releases the claim."""
SUSPECT_FROM = 2
"""A request is a suspect if at least this many workers have died while they worked on it. A worker runs only one
suspect at a time, so that the request which kills workers is identified, and a suspect that only ran at the same time
as that request is answered."""
SUSPECT_WAIT_MS = 1000
"""For how many ms a suspect (a request on which several workers were working when they died) is deferred while the
worker runs another suspect."""
LEAST_WAIT_MS = 200
"""If another worker is working on a request, a further delivery of the request is deferred by at least this many ms."""
LONGEST_WAIT_MS = 5_000
"""If another worker is working on a request, a further delivery of the request is deferred by at most this many ms."""


class ClaimGate:
    """Takes the claim of a request, that is, records in the store that this worker runs it, so that no other delivery
    of the same request (identified by tenant and message id) runs at the same time. When the request has ended,
    `settle.py` stores its outcome, which completes the claim; otherwise this gate releases the claim."""

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms
        self._suspect: Job | None = None

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Take the claim of the request. Return None if the store grants it, otherwise the outcome of the delivery.
        Raises StoreUnavailable if the store does not answer: no provider is called without a claim."""
        match await self._claiming.claim(job):
            case Granted(deaths=deaths) if deaths >= DEATHS_AT_MOST:
                return ended(
                    "poison", f"delivered {deaths + 1} times and never settled: its worker died or hung under it"
                )
            case Granted(deaths=deaths) if deaths >= SUSPECT_FROM:
                if self._suspect is not None:
                    await self._claiming.release(job)
                    return Deferred(delay_ms=SUSPECT_WAIT_MS, reason="suspect")
                self._suspect = job
                return None
            case Granted():
                return None
            case Running(for_ms=for_ms):
                # wait as long as the other delivery has run already, which doubles the time between two checks
                wait_ms = min(LONGEST_WAIT_MS, max(LEAST_WAIT_MS, for_ms))
                return Deferred(delay_ms=wait_ms, reason="running elsewhere")
            case Ended(completion=completion, is_same_message=is_same_message):
                return Replayed(completion=completion, buries=is_same_message and job.came_before)
            case Conflict():
                return ended(
                    "idempotency_conflict",
                    "message_id: it was used with another body; give every request an id of its own",
                )

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Release the claim of a request that has not ended. A request that has ended keeps its claim until its outcome
        is stored."""
        if self._suspect is job:
            self._suspect = None
        if job.trail is not None and isinstance(outcome, Retried):
            job.trail.tell("retrying", attempt=job.attempts, delay_ms=outcome.delay_ms, error=outcome.brief)
        match outcome:
            case Answered() | Refused() | Buried() | Dropped() | Replayed():
                return
            case Retried(delay_ms=delay_ms) | Deferred(delay_ms=delay_ms):
                await self._claiming.release(job, due_ms=self._now_ms() + delay_ms)
            case None:
                await self._claiming.release(job)
            case _:
                assert_never(outcome)
