"""The claim gate: only one delivery of a request is worked on at a time; an ended request is answered from the
store."""

from typing import assert_never

from consumers.claiming import Claiming
from consumers.job import Asked, Job, NowMs
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.state.base import Conflict, Ended, Granted, Running
from lanekeeper.contract.problems import RequestProblem

DEATHS_AT_MOST = 4
"""A request is dead-lettered after this many holders of its claim have died: at its fifth delivery. The broker's count
is not used, because it also counts lost connections, after which the worker still lives and releases the claim."""
SUSPECT_FROM = 2
"""After this many deaths a request is a suspect, and only one suspect is worked on at a time. So the request that kills
workers is found, and a request that merely ran beside it is answered."""
SUSPECT_WAIT_MS = 1000
LEAST_WAIT_MS = 200
LONGEST_WAIT_MS = 5_000


class ClaimGate:
    """Takes the claim of (tenant, message id). `settle` completes it; a request that has not ended gives it back
    here."""

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms
        self._suspect: Job | None = None

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        """Raises StoreUnavailable if the store stays away: no provider is called without a claim."""
        match await self._claiming.claim(job):
            case Granted(deaths=deaths) if deaths >= DEATHS_AT_MOST:
                return Buried(
                    RequestProblem(
                        "poison", f"delivered {deaths + 1} times and never settled: its worker died or hung under it"
                    )
                )
            case Granted(deaths=deaths) if deaths >= SUSPECT_FROM:
                if self._suspect is not None:
                    await self._claiming.release(job)
                    return Deferred(delay_ms=SUSPECT_WAIT_MS, reason="suspect", due_ms=job.hop.due_ms)
                self._suspect = job
                return None
            case Granted():
                return None
            case Running(for_ms=for_ms):
                # wait as long as it has run already, which doubles the time between checks
                wait_ms = min(LONGEST_WAIT_MS, max(LEAST_WAIT_MS, for_ms))
                return Deferred(delay_ms=wait_ms, reason="running elsewhere", due_ms=job.hop.due_ms)
            case Ended(completion=completion, same_copy=same_copy):
                return Replayed(completion=completion, buries=same_copy and job.came_before)
            case Conflict():
                return Refused(
                    RequestProblem(
                        "idempotency_conflict",
                        "message_id: it was used with another body; give every request an id of its own",
                    )
                )

    async def leave(self, job: Job, asked: Asked, outcome: Outcome | None) -> None:
        """A request that has ended keeps its claim until the store has its outcome."""
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
