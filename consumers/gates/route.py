"""The route gate: which providers a request may be sent to, and whether one of them is known to answer.

A request waits here for a breaker for a short time only; after that it is deferred, so that others can pass it.
"""

import asyncio
import random

from consumers.job import Asked, Job, NowMs
from consumers.outcomes import Deferred, Outcome, Refused, ended_by, stopped_by
from consumers.providers.breakers import Breakers
from lanekeeper.contract.problems import RequestProblem

REASON = "breaker"
HOLD_S = 3.0
LEAST_WAIT_MS = 200
STAGGER_S = 0.2
"""One of the waiting requests makes the probe; the others wait this much longer, for its result."""
SHARE_OF_OUTAGE = 0.25
"""How long a request is delayed, as a part of the time that the provider has been down. After a long outage requests
come back less often than every few seconds; after an outage of a minute they are back soon."""
MOST_TARGETS = 5
"""A request is delayed by at most this many times its lane's target wait; in critical that is five seconds."""
SPREAD = 0.5
"""The delay is lengthened at random by up to this part, so that one request makes the probe before the others come
back."""


class RouteGate:
    """Ends requests for a model that their lane or tenant may not use; holds or defers the others while no provider may
    be called."""

    def __init__(self, breakers: Breakers, *, now_ms: NowMs, rng: random.Random) -> None:
        self._breakers = breakers
        self._now_ms = now_ms
        self._rng = rng

    async def enter(self, job: Job, asked: Asked) -> Outcome | None:
        if asked.chain.forbidden:
            return ended_by(RequestProblem("forbidden_model", asked.chain.forbidden))
        clock = asyncio.get_running_loop().time
        left_s = (asked.request.deadline_ms - self._now_ms()) / 1000
        until_s = clock() + min(HOLD_S, left_s)
        while (wait_s := self._breakers.least_wait_s(asked.chain.routes)) > 0:
            if job.stopped is not None:
                return stopped_by(job.stopped, doing="waited for a provider", due_ms=job.hop.due_ms)
            if clock() + wait_s >= until_s:
                return self.later(job, asked, wait_s)
            async with job.interruptible(None):
                await asyncio.sleep(wait_s + self._rng.uniform(0, STAGGER_S))
        return None

    async def leave(self, job: Job, asked: Asked, outcome: Outcome | None) -> None:
        """Does nothing: nothing was taken."""

    def later(self, job: Job, asked: Asked, wait_s: float) -> Outcome:
        """The outcome of a job for which no provider may be called."""
        left_ms = asked.request.deadline_ms - self._now_ms()
        wait_ms = max(LEAST_WAIT_MS, round(1000 * wait_s))
        if wait_ms >= left_ms:
            return Refused(
                RequestProblem(
                    "deadline_exceeded",
                    f"no provider may be called for {wait_ms} ms (their last calls failed), "
                    f"and {max(0, left_ms)} ms are left",
                )
            )
        stay_s = min(SHARE_OF_OUTAGE * self._down_s(asked), MOST_TARGETS * asked.lane.target_wait_s)
        delay_ms = round(max(wait_ms, 1000 * stay_s) * (1 + self._rng.uniform(0, SPREAD)))
        return Deferred(delay_ms=min(delay_ms, max(wait_ms, left_ms // 2)), reason=REASON, due_ms=job.hop.due_ms)

    def _down_s(self, asked: Asked) -> float:
        now_s = asyncio.get_running_loop().time()
        return min(self._breakers.down_s(each, now_s) for each in asked.chain.routes)
