"""The claim gate: one delivery of a request is worked at a time, and what has ended is answered from the store."""

from typing import assert_never

from consumers.claiming import Claiming
from consumers.job import Asked, Job, NowMs
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.state.base import Conflict, Ended, Granted, Running
from lanekeeper.contract.problems import RequestProblem

DEATHS_AT_MOST = 4
"""With so many holders that died under it a request is buried: it is delivered for the fifth time. Not the broker's
count, which also counts lost connections: the worker lives then, and lets go."""
SUSPECT_FROM = 2
"""From so many deaths on a request is worked on while no other suspect is: the one that kills is found out by that, and
whoever only stood beside it is answered."""
SUSPECT_WAIT_MS = 1000
LEAST_WAIT_MS = 200
LONGEST_WAIT_MS = 5_000


class ClaimGate:
    """Takes the claim of (tenant, message id); `settle` completes it, and what did not end gives it back here."""

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms
        self._suspect: Job | None = None

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        """Raises StoreUnavailable where the store stays away: no provider is called without a claim."""
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
                # the longer it has run, the longer it may: as many looks as a doubling back-off
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
        """What has ended keeps its claim until the store has the completion."""
        if self._suspect is job:
            self._suspect = None
        match outcome:
            case Answered() | Refused() | Buried() | Dropped() | Replayed():
                return
            case Retried(delay_ms=delay_ms) | Deferred(delay_ms=delay_ms):
                await self._claiming.release(job, due_ms=self._now_ms() + delay_ms)
            case None:
                await self._claiming.release(job)
            case _:
                assert_never(outcome)
