"""The gates of time: a request past its deadline is answered with an error, and one that is not due yet waits on the
broker, so that no worker holds it."""

from consumers.bodies import Fetching
from consumers.claiming import Claiming
from consumers.clock import NowMs
from consumers.job import Decoded, Job
from consumers.outcomes import Deferred, Dropped, Outcome, Refused
from consumers.providers.breakers import Breakers
from consumers.state.base import WaitingLimit
from lanekeeper.contract.problems import RequestProblem
from topology.codec.decoding import app_of

UNCOUNTED_MS = 60_000
"""A request that waits for at most this time does not count towards the limits of how many requests may wait, because
no tenant can publish very many requests in that time."""
DEBOUNCED_KEPT_MS = 3_600_000
"""For how long after its due time an update of a debounce key is known, in case older ones are late."""
UNIT_BYTES = 16 * 1024
"""A waiting request counts as one, plus one for each full 16 KiB of its body, in the message or in a store of large
bodies."""
WHICH_LIMIT = {
    WaitingLimit.TENANT: "its tenant has as many requests waiting as one may (each 16 KiB of a body count as one)",
    WaitingLimit.TOTAL: "as many requests wait as may in all",
    WaitingLimit.REPEATED: "as many requests wait as may, this one among them",
}


async def refuse_if_late(job: Job, decoded: Decoded, *, breakers: Breakers, now_ms: NowMs) -> Outcome | None:
    """The deadline gate."""
    if now_ms() < decoded.request.deadline_ms:
        return None
    return Refused(exceeded(job, decoded, breakers, now_ms=now_ms()))


def exceeded(job: Job, decoded: Decoded, breakers: Breakers, *, now_ms: int) -> RequestProblem:
    """The error for a request past its deadline. Its text says how long the request waited and ran (both together are
    the time since it was published or due), which pause made it wait, and what hinders all its providers."""
    bound_ms = decoded.request.deadline_ms - decoded.request.start_ms
    spent = f"{max(0, job.waited_ms(now_ms) - job.ran_ms)} ms in the queue"
    if job.redelivered:
        spent += " or with a worker that was lost"
    if job.attempts > 1:
        spent += " and in pauses between attempts"
    if job.ran_ms:
        spent += f", {job.ran_ms} ms in " + (f"{job.attempts} attempts" if job.attempts > 1 else "attempt 1")
    detail = f"not answered within {bound_ms} ms: {spent}"
    pause = breakers.brake.during(
        lane=job.lane_name,
        tenant=job.identity.tenant,
        app=app_of(job.routing_key),
        routes=decoded.chain.routes,
        from_ms=decoded.request.start_ms,
        to_ms=decoded.request.deadline_ms,
    )
    if pause is not None:
        return RequestProblem("deadline_exceeded", f"{detail}; {pause.told}{job.last_failure}", brief=detail)
    if decoded.chain.routes and (why := breakers.hindrance(decoded.chain.routes)) is not None:
        return unavailable(job, why, detail)
    return RequestProblem("deadline_exceeded", detail + job.last_failure)


def unavailable(job: Job, why: str, detail: str) -> RequestProblem:
    """The error for a request whose time is over while nothing could be called for it, because of `why`."""
    detail = f"{why} ({detail}){job.last_failure}"
    return RequestProblem("provider_unavailable", detail, brief="no provider may be called")


async def defer_until_due(
    job: Job, decoded: Decoded, *, claiming: Claiming, bodies: Fetching, now_ms: NowMs
) -> Outcome | None:
    """The schedule gate: defers a request until its due time (`x-lane-delay-ms`, `x-lane-at`). A request that has ended
    already, or was cancelled before it arrived, does not wait: the claim gate answers it.

    The wait is noted in the store before the request is published to the broker's delay queues, because once it is
    published, another worker may take it at any time. Requests that wait for long take space on the broker's disks, so
    they are counted, and refused above a limit. A request with a debounce key is answered `superseded` if it is not the
    last update of its key: when it arrives, or when it is due. Raises StoreUnavailable."""
    due_ms = decoded.request.due_ms
    if due_ms is None:
        return None
    if (left_ms := due_ms - now_ms()) <= 0:
        # a repeated message of a request that has ended must not supersede others
        if decoded.request.debounce is None or (job.hop.due_ms is None and await claiming.has_ended(job)):
            return None
        return await _superseded(job, decoded, due_ms, claiming=claiming)
    # a request that a worker has deferred before was counted then, and is not refused now
    is_counted = job.hop.due_ms is None and left_ms > UNCOUNTED_MS
    if is_counted:
        weight = 1 + await bodies.size_of(job.message) // UNIT_BYTES
        limit = await claiming.reserve(job, weight=weight, until_ms=due_ms)
        if limit is not WaitingLimit.WITHIN:
            return None if await claiming.has_ended(job) else _too_many(limit)
    defer = claiming.defer_for_long if is_counted else claiming.defer
    if not await defer(job, due_ms=due_ms, deadline_ms=decoded.request.deadline_ms):
        return None
    if (superseded := await _superseded(job, decoded, due_ms, claiming=claiming)) is not None:
        return superseded
    # the clock is read again, because the store may have needed some time
    return Deferred(delay_ms=max(0, due_ms - now_ms()), reason="scheduled", due_ms=due_ms)


async def _superseded(job: Job, decoded: Decoded, due_ms: int, *, claiming: Claiming) -> Outcome | None:
    key = decoded.request.debounce
    if key is None or job.attempts:  # an attempt was made: what has begun goes on
        return None
    if await claiming.debounce(job, key, until_ms=due_ms + DEBOUNCED_KEPT_MS):
        return None
    return Dropped(RequestProblem("superseded", "a newer request has the same x-lane-debounce"))


def _too_many(limit: WaitingLimit) -> Refused:
    """The refusal of one message, which is not stored as the outcome of its request: an earlier message of the request
    may wait."""
    detail = (
        f"x-lane-delay-ms or x-lane-at is {UNCOUNTED_MS // 1000} s ahead or more, and {WHICH_LIMIT[limit]}: "
        "wait until some are due, or ask for a shorter delay"
    )
    return Refused(RequestProblem("too_many_waiting", detail), is_repeat=limit is WaitingLimit.REPEATED)
