"""The route gate: lets a request pass if its lane and tenant may use its model, and a provider may be called for it.

While all its providers are paused or their circuit breakers are open, a request waits here for at most `HOLD_S`. After
that the request is deferred, so that requests for other providers can pass it.
"""

import asyncio
import random

from consumers.clock import NowMs
from consumers.gates.timing import unavailable
from consumers.job import Decoded, Job
from consumers.outcomes import Deferred, Outcome, ended, ended_by, stopped_by
from consumers.providers.breakers import Breakers

HOLD_S = 3.0
LEAST_WAIT_MS = 200
"""The shortest deferral."""
STAGGER_S = 0.2
"""Each request waits up to this many seconds longer, at random. So one of them makes the probe (the first call after an
outage), and the others come after its result."""
SHARE_OF_OUTAGE = 0.25
"""A request is deferred by this share of the time for which the provider has been down. So in a long outage the request
does not come back every few seconds, and after a short outage it does not wait for long."""
MOST_TARGETS = 5
"""A request is deferred by at most this many times its lane's target wait (the setting `target_wait_s`): in the lane
`critical`, whose target is a second, by at most five seconds. `SPREAD` lengthens this time at random."""
SPREAD = 0.5
"""The delay is lengthened at random by up to this share, so that one request makes the first call before the others
come back."""


async def await_route(
    job: Job, decoded: Decoded, *, breakers: Breakers, now_ms: NowMs, rng: random.Random
) -> Outcome | None:
    """The route gate."""
    if decoded.chain.forbidden:
        return ended("forbidden_model", decoded.chain.forbidden)
    clock = asyncio.get_running_loop().time
    left_s = (decoded.request.deadline_ms - now_ms()) / 1000
    until_s = clock() + min(HOLD_S, left_s)
    while (wait_s := breakers.least_wait_s(decoded.chain.routes)) > 0:
        if job.stopped is not None:
            return stopped_by(job.stopped, doing="waited for a provider")
        if clock() + wait_s >= until_s:
            return later(job, decoded, wait_s, breakers=breakers, now_ms=now_ms, rng=rng)
        async with job.interruptible(None):
            await asyncio.sleep(wait_s + rng.uniform(0, STAGGER_S))
    return None


def later(
    job: Job, decoded: Decoded, wait_s: float, *, breakers: Breakers, now_ms: NowMs, rng: random.Random
) -> Outcome:
    """The outcome of a job for which no provider may be called in the next `wait_s` seconds: it is deferred, or refused
    if its deadline is before the end of that time."""
    left_ms = decoded.request.deadline_ms - now_ms()
    wait_ms = max(LEAST_WAIT_MS, round(1000 * wait_s))
    routes = decoded.chain.routes
    if wait_ms >= left_ms:
        why = breakers.hindrance(routes) or "its last calls failed"
        detail = f"no provider may be called for {wait_ms} ms, and {max(0, left_ms)} ms are left"
        return ended_by(unavailable(job, why, detail))
    now_s = asyncio.get_running_loop().time()
    down_s = min(breakers.down_s(route, now_s) for route in routes)
    stay_s = min(SHARE_OF_OUTAGE * down_s, MOST_TARGETS * decoded.lane.target_wait_s)
    delay_ms = round(max(wait_ms, 1000 * stay_s) * (1 + rng.uniform(0, SPREAD)))
    is_paused = any(breakers.pauses.since_s(route) is not None or breakers.brake.of_route(route) for route in routes)
    return Deferred(delay_ms=min(delay_ms, max(wait_ms, left_ms // 2)), reason="paused" if is_paused else "breaker")
