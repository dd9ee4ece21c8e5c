"""The claim gate: lets only one delivery of a request pass at a time, by a record in the store (the claim). A request
that has ended is answered from the store.

After it comes the body gate, so that no body is fetched for a request that has ended or that another worker runs.
"""

from typing import assert_never

from consumers.bodies import Fetching
from consumers.claiming import Claiming
from consumers.clock import NowMs, now_ms
from consumers.decoding import Decoding
from consumers.job import Decoded, Job
from consumers.outcomes import (
    Answered,
    Buried,
    Deferred,
    Dropped,
    Outcome,
    Refused,
    Replayed,
    Retried,
    ended,
    ended_by,
    stopped_by,
)
from consumers.state.base import Conflict, Ended, Granted, Running
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyTooLarge
from lanekeeper.contract.names import BODY
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import logs, signals

DEATHS_AT_MOST = 4
"""After this many workers have died while they worked on a request (had its claim in the store), the request goes to
the queue `lane.dead` at its next delivery. The broker's delivery count is not used, because it also counts deliveries
that ended because the connection was lost while the worker lived on; such a worker releases the claim."""
SUSPECT_FROM = 2
"""A request is a suspect if at least this many workers have died while they worked on it. A worker runs only one
suspect at a time, so that the request which kills workers is identified, and a suspect that only ran at the same time
as that request is answered."""
SUSPECT_WAIT_MS = 1000
"""For how long a suspect is deferred while the worker runs another one."""
LEAST_WAIT_MS = 200
LONGEST_WAIT_MS = 5_000
"""For how long a delivery is deferred while another worker is working on its request."""
FETCH_WITHIN_S = 60.0
"""The time limit for fetching the large body of a request."""
AGAIN_MS = 2000
"""For how long a request is deferred if the store that has its body is unavailable."""
log = logs.logger()


class ClaimGate:
    """Takes the claim of a request, so that no other delivery of the same request (identified by tenant and message id)
    runs at the same time. When the request has ended, `settle.py` stores its outcome, which completes the claim;
    otherwise this gate releases the claim."""

    def __init__(self, claiming: Claiming, *, now_ms: NowMs = now_ms) -> None:
        self._claiming = claiming
        self._now_ms = now_ms
        self._suspect: Job | None = None

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Raises StoreUnavailable if the store does not answer: no provider is called without a claim."""
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
        if job.progress is not None and isinstance(outcome, Retried):
            job.progress.tell("retrying", attempt=job.attempts, delay_ms=outcome.delay_ms, error=outcome.brief)
        match outcome:
            case Answered() | Refused() | Buried() | Dropped() | Replayed():
                return
            case Retried(delay_ms=delay_ms) | Deferred(delay_ms=delay_ms):
                await self._claiming.release(job, due_ms=self._now_ms() + delay_ms)
            case None:
                await self._claiming.release(job)
            case _:
                assert_never(outcome)


async def fetch_body(
    job: Job, decoded: Decoded, *, fetching: Fetching, decoding: Decoding, now_ms: NowMs
) -> Outcome | None:
    """The body gate: if the message has only the body's address, fetches the body and decodes it into `job.decoded`.
    The body stays in memory until the attempt is over."""
    kept = decoded.request.kept
    if kept is None:
        return None
    raw: bytes | None = None
    left_s = max(0.0, (decoded.request.deadline_ms - now_ms()) / 1000)
    try:
        async with job.interruptible(min(FETCH_WITHIN_S, left_s)):
            raw = await fetching.fetch(kept)
        if raw is not None:
            job.decoded = await decoding.decode_body(raw, job, decoded.lane)
            return None
    except BodyTooLarge as error:
        return ended("too_large", f"header {BODY}: {error}")
    except BodyError as error:
        return ended("invalid_request", f"header {BODY}: {error}")
    except RequestProblem as problem:
        return ended_by(problem)
    except BodiesUnavailable as error:
        log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
    if job.stopped is not None:
        return stopped_by(job.stopped, doing="was fetched")
    return Deferred(delay_ms=AGAIN_MS, reason="body unavailable")
