"""The route gate: who may be asked at all, and whether one of them is known to answer.

A short wait for a breaker is waited for here; a longer one is the request's own, and others pass it meanwhile.
"""

import asyncio
import random
from collections.abc import Sequence

from consumers.job import Deferred, Job, NowMs, Outcome, Refused, ended_by
from consumers.providers.breaker import Breakers
from consumers.providers.routes import Route, Routes
from lanekeeper.contract.problems import RequestProblem

REASON = "breaker"
HOLD_S = 3.0
LEAST_WAIT_MS = 200
STAGGER_S = 0.2
"""Of those that wait here one goes first, and the others see that it finds out."""
SHARE_OF_OUTAGE = 0.25
"""So much longer they stay away as the provider has been down: a flood of batch jobs does not go round the delays every
few seconds while it is down for an hour, and all are back soon after a minute."""
MOST_TARGETS = 5
"""But no longer than so many times what their lane should wait at most: a chat is back in five seconds."""
SPREAD = 0.5
"""Those that wait for the same probe come back over half as long again: one of them makes it."""


class RouteGate:
    """Ends what asks for a model that its lane or tenant may not have. `of`: as `Routes.of`, with those alone that are
    not known to fail now, or all of them where that is none."""

    def __init__(self, routes: Routes, breakers: Breakers, *, now_ms: NowMs, rng: random.Random) -> None:
        self._routes = routes
        self._breakers = breakers
        self._now_ms = now_ms
        self._rng = rng

    def of(self, lane: str, tenant: str, model: str) -> Sequence[Route]:
        routes = self._routes.of(lane, tenant, model)
        now_s = asyncio.get_running_loop().time()
        return [each for each in routes if self._breakers.wait_s(each, now_s) <= 0] or routes

    def after(self, job: Job) -> Sequence[Route]:
        """The job's route, then those that may be asked instead of it: what `Registry.stream` takes."""
        assert job.request is not None
        routes = self._routes.of(job.lane_name, job.identity.tenant, job.request.model)
        at = next((index for index, each in enumerate(routes) if each == job.route), 0)
        return routes[at:]

    async def enter(self, job: Job) -> Outcome | None:
        assert job.request is not None
        try:
            routes = self._routes.of(job.lane_name, job.identity.tenant, job.request.model)
        except RequestProblem as forbidden:
            return ended_by(forbidden)
        clock = asyncio.get_running_loop().time
        left_s = (job.request.deadline_ms - self._now_ms()) / 1000
        until_s = clock() + min(HOLD_S, left_s)
        while (wait_s := self._wait_s(routes)) > 0 and job.stopped is None:
            if clock() + wait_s >= until_s:
                return self.later(job, wait_s)
            await _sleep(job, wait_s + self._rng.uniform(0, STAGGER_S))
        return None

    async def leave(self, job: Job, outcome: Outcome | None) -> None:
        """Nothing was taken."""

    def has_other(self, job: Job) -> bool:
        """Whether another account than its route's may be asked for it."""
        assert job.request is not None
        routes = self.of(job.lane_name, job.identity.tenant, job.request.model)
        return job.route is not None and any(each.account != job.route.account for each in routes)

    def closed_s(self, job: Job) -> float:
        """How long no provider may be called for it, as far as is known; 0: one may."""
        assert job.request is not None
        return self._wait_s(self._routes.of(job.lane_name, job.identity.tenant, job.request.model))

    def later(self, job: Job, wait_s: float) -> Outcome:
        """What becomes of a job that no provider may be called for."""
        assert job.request is not None
        left_ms = job.request.deadline_ms - self._now_ms()
        wait_ms = max(LEAST_WAIT_MS, round(1000 * wait_s))
        if wait_ms >= left_ms:
            return Refused(
                RequestProblem(
                    "deadline_exceeded",
                    f"no provider may be called for {wait_ms} ms (their last calls failed), "
                    f"and {max(0, left_ms)} ms are left",
                )
            )
        assert job.lane is not None
        stay_s = min(SHARE_OF_OUTAGE * self._down_s(job), MOST_TARGETS * job.lane.target_wait_s)
        delay_ms = round(max(wait_ms, 1000 * stay_s) * (1 + self._rng.uniform(0, SPREAD)))
        return Deferred(delay_ms=min(delay_ms, max(wait_ms, left_ms // 2)), reason=REASON, due_ms=job.hop.due_ms)

    def _down_s(self, job: Job) -> float:
        assert job.request is not None
        now_s = asyncio.get_running_loop().time()
        routes = self._routes.of(job.lane_name, job.identity.tenant, job.request.model)
        return min(self._breakers.down_s(each, now_s) for each in routes)

    def _wait_s(self, routes: Sequence[Route]) -> float:
        now_s = asyncio.get_running_loop().time()
        return min(self._breakers.wait_s(each, now_s) for each in routes)


async def _sleep(job: Job, seconds: float) -> None:
    """`job.stop` ends it as it ends an attempt."""
    try:
        async with asyncio.timeout(None) as job.limit:
            await asyncio.sleep(seconds)
    except TimeoutError:
        pass
    finally:
        job.limit = None
