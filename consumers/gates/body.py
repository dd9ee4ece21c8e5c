"""The body gate: fetches a request's body if it is not in the message. It comes after the claim gate (which lets only
one delivery of a request pass), so that no body is fetched for a request that has ended or that another worker runs."""

from consumers.bodies.fetching import Fetching
from consumers.decoding import Decoding
from consumers.job import Decoded, Job, NowMs
from consumers.outcomes import Deferred, Outcome, ended, ended_by, stopped_by
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyTooLarge
from lanekeeper.contract.names import BODY
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import logs, signals

FETCH_WITHIN_S = 60.0
"""The time limit, in seconds, for fetching the large body of a request."""
AGAIN_MS = 2000
"""If the store that has a request's body is unavailable, the request is deferred by this many ms; then the worker tries
again to fetch the body, and so on until the request's deadline."""
log = logs.logger()


class BodyGate:
    """Fetches the body of a request whose message has only the body's address, and decodes it into `job.decoded`. The
    body stays in memory until the attempt is over."""

    def __init__(self, fetching: Fetching, decoding: Decoding, *, now_ms: NowMs) -> None:
        self._fetching = fetching
        self._decoding = decoding
        self._now_ms = now_ms

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        kept = decoded.request.kept
        if kept is None:
            return None
        raw: bytes | None = None
        left_s = max(0.0, (decoded.request.deadline_ms - self._now_ms()) / 1000)
        try:
            async with job.interruptible(min(FETCH_WITHIN_S, left_s)):
                raw = await self._fetching.fetch(kept)
            if raw is not None:
                job.decoded = await self._decoding.decode_body(raw, job, decoded.lane)
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

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Does nothing, because `enter` takes nothing that must be given back."""
