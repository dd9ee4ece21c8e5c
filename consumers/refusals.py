"""The errors and deferrals of requests that get no call in time: for their deadline, their provider or their budget."""

import asyncio
import random

from consumers.clock import NowMs
from consumers.job import Decoded, Job
from consumers.outcomes import Deferred, Outcome, end_with_problem
from consumers.providers.breakers import Breakers
from lanekeeper.contract.problems import ProviderFailure, RequestProblem

LEAST_WAIT_MS = 200
"""The shortest deferral of a request that runs elsewhere, or for which no provider may be called."""
SPREAD = 0.5
"""A delay is lengthened at random by up to this share, so that requests do not come back together."""
SHARE_OF_OUTAGE = 0.25
"""A request is deferred by this share of the time for which the provider has been down."""
MOST_TARGETS = 3
"""A request is deferred by at most this many times its lane's target wait (the setting `target_wait_s`)."""


def exceeded(job: Job, decoded: Decoded, breakers: Breakers, *, now_ms: int) -> RequestProblem:
    """The error for a request past its deadline. Its text says how long the request waited and ran, and what hindered
    it."""
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
        app=job.app,
        routes=decoded.chain.routes,
        from_ms=decoded.request.start_ms,
        to_ms=decoded.request.deadline_ms,
    )
    if pause is not None:
        return RequestProblem(
            "deadline_exceeded",
            f"{detail}; {pause.description}{job.last_failure}",
            brief=detail,
            provider=job.provider_failure,
        )
    if decoded.chain.routes and (why := breakers.hindrance(decoded.chain.routes)) is not None:
        return unavailable(job, why, detail, breakers.last_failure(decoded.chain.routes))
    return RequestProblem("deadline_exceeded", detail + job.last_failure, provider=job.provider_failure)


def unavailable(job: Job, why: str, detail: str, failure: ProviderFailure | None) -> RequestProblem:
    """The error for a request whose time is over while nothing could be called for it, because of `why`. `failure`:
    what the provider answered to others, if it has answered nothing to this request."""
    detail = f"{why} ({detail}){job.last_failure}"
    return RequestProblem(
        "provider_unavailable", detail, brief="no provider may be called", provider=job.provider_failure or failure
    )


def later(
    job: Job, decoded: Decoded, wait_s: float, *, breakers: Breakers, now_ms: NowMs, rng: random.Random
) -> Outcome:
    """The outcome of a job for which no provider may be called in the next `wait_s` seconds: it is deferred, or refused
    if its deadline is before the end of that time. A paused provider may be mended and called at any moment, so a
    request that waits for one is refused only when its time is over."""
    left_ms = decoded.request.deadline_ms - now_ms()
    wait_ms = no_call_ms = max(LEAST_WAIT_MS, round(1000 * wait_s))
    routes = decoded.chain.routes
    is_paused = any(breakers.pauses.since_s(route) is not None or breakers.brake.of_route(route) for route in routes)
    if is_paused:
        wait_ms = min(wait_ms, max(LEAST_WAIT_MS, left_ms // 2))
    if wait_ms >= left_ms:
        why = breakers.hindrance(routes) or "its last calls failed"
        detail = f"no provider may be called for {no_call_ms} ms, and {max(0, left_ms)} ms are left"
        return end_with_problem(unavailable(job, why, detail, breakers.last_failure(routes)))
    now_s = asyncio.get_running_loop().time()
    down_s = min(breakers.down_s(route, now_s) for route in routes)
    stay_s = min(SHARE_OF_OUTAGE * down_s, MOST_TARGETS * decoded.lane.target_wait_s)
    delay_ms = round(max(wait_ms, 1000 * stay_s) * (1 + rng.uniform(0, SPREAD)))
    return Deferred(delay_ms=min(delay_ms, max(wait_ms, left_ms // 2)), reason="paused" if is_paused else "breaker")
