"""The route gate: lets a request pass if its lane and tenant may use its model, and a provider may be called for it.

While the circuit breakers of all its providers are open, a request waits at this gate for at most `HOLD_S` seconds.
After that the request is deferred, so that requests for other providers can pass it.
"""

import asyncio
import random

from consumers.job import Decoded, Job, NowMs
from consumers.outcomes import Deferred, Outcome, ended, stopped_by
from consumers.providers.breakers import Breakers

HOLD_S = 3.0
"""For how many seconds a request keeps its slot (the right to be worked on) while it waits for a provider to recover;
then it is deferred."""
LEAST_WAIT_MS = 200
"""The shortest time, in ms, for which a request that waits for a provider to recover is deferred."""
STAGGER_S = 0.2
"""Each request that waits for a provider to recover waits up to this many seconds longer, at random. So one of them
makes the probe (the first call after an outage), and the others come after its result."""
SHARE_OF_OUTAGE = 0.25
"""A request that waits for a provider to recover is deferred by this share of the time for which the provider has been
down. So in a long outage the request does not come back every few seconds, and after a short outage it does not wait
for long."""
MOST_TARGETS = 5
"""A request that waits for a provider to recover is deferred by at most this many times its lane's target wait (the
setting `target_wait_s`): in the lane `critical`, whose target is a second, by at most five seconds. `SPREAD` lengthens
this time at random."""
SPREAD = 0.5
"""The delay of a request that waits for a provider to recover is lengthened at random by up to this share of the delay,
so that one request makes the first call before the others come back."""


class RouteGate:
    """Refuses requests for a model that their lane or tenant may not use. Other requests are held or deferred while the
    circuit breakers allow no call to any of their providers."""

    def __init__(self, breakers: Breakers, *, now_ms: NowMs, rng: random.Random) -> None:
        self._breakers = breakers
        self._now_ms = now_ms
        self._rng = rng

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        if decoded.chain.forbidden:
            return ended("forbidden_model", decoded.chain.forbidden)
        clock = asyncio.get_running_loop().time
        left_s = (decoded.request.deadline_ms - self._now_ms()) / 1000
        until_s = clock() + min(HOLD_S, left_s)
        while (wait_s := self._breakers.least_wait_s(decoded.chain.routes)) > 0:
            if job.stopped is not None:
                return stopped_by(job.stopped, doing="waited for a provider")
            if clock() + wait_s >= until_s:
                return self.later(job, decoded, wait_s)
            async with job.interruptible(None):
                await asyncio.sleep(wait_s + self._rng.uniform(0, STAGGER_S))
        return None

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Does nothing, because `enter` takes nothing that must be given back."""

    def later(self, job: Job, decoded: Decoded, wait_s: float) -> Outcome:
        """The outcome of a job for which no provider may be called in the next `wait_s` seconds: it is deferred, or
        refused if its deadline is before the end of that time."""
        left_ms = decoded.request.deadline_ms - self._now_ms()
        wait_ms = max(LEAST_WAIT_MS, round(1000 * wait_s))
        if wait_ms >= left_ms:
            return ended(
                "deadline_exceeded",
                f"no provider may be called for {wait_ms} ms (their last calls failed), "
                f"and {max(0, left_ms)} ms are left",
            )
        now_s = asyncio.get_running_loop().time()
        down_s = min(self._breakers.down_s(route, now_s) for route in decoded.chain.routes)
        stay_s = min(SHARE_OF_OUTAGE * down_s, MOST_TARGETS * decoded.lane.target_wait_s)
        delay_ms = round(max(wait_ms, 1000 * stay_s) * (1 + self._rng.uniform(0, SPREAD)))
        return Deferred(delay_ms=min(delay_ms, max(wait_ms, left_ms // 2)), reason="breaker")
