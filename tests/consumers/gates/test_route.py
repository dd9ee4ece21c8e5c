"""The route gate: it refuses forbidden models, and waits for breakers."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from consumers.failures import TransientError
from consumers.gates import HOLD_S, await_route, later
from consumers.job import Decoded, Job, Route
from consumers.outcomes import Deferred, Outcome, Refused
from consumers.providers.breakers import FAILURES, Breakers
from consumers.providers.routes import ProviderModels, Routes, RoutesSpec
from tests.support.jobs import NOW_MS, Bench, decoded, read
from tests.support.virtual_time import virtually
from topology.lanes import BATCH, CRITICAL, LaneSpec

MODEL = "claude-sonnet-5-5"


class Ground:
    """A gate with two providers, or with the given ones."""

    def __init__(self, *names: str, **more: Any) -> None:
        providers = tuple(ProviderModels(name=name) for name in names or ("one", "two"))
        self.routes = Routes(RoutesSpec(providers=providers, **more))
        self.breakers = Breakers(rng=random.Random(1))
        self.rng = random.Random(1)

    def job(self, **headers: Any) -> Job:
        body = b'{"model":"%s","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}' % MODEL.encode()
        job = Bench().job(body=body, headers=headers)
        return read(job, self.routes.of("critical", "", MODEL))

    async def enter(self, job: Job) -> Outcome | None:
        return await await_route(job, decoded(job), breakers=self.breakers, now_ms=lambda: NOW_MS, rng=self.rng)

    def later(self, job: Job, of: Decoded) -> Outcome:
        return later(job, of, 1.0, breakers=self.breakers, now_ms=lambda: NOW_MS, rng=self.rng)

    @property
    def all(self) -> tuple[Route, ...]:
        return self.routes.of("critical", "", MODEL).routes

    async def break_(self, route: Route, *, times: int = 1) -> None:
        """Open the route's breaker by failing this many probes; 7 keep it open for 2.5 to 5 s."""
        clock = asyncio.get_running_loop().time
        for each in range(FAILURES + times - 1):
            await asyncio.sleep(self.breakers.wait_s(route, clock()))
            entered = await self.breakers.enter(route, clock(), request=str(each))
            assert entered
            await self.breakers.failed(entered, TransientError("down"), clock(), timeout_s=60)


def test_a_request_waits_if_the_breaker_closes_soon() -> None:
    async def story() -> None:
        ground = Ground()
        for route in ground.all:
            await ground.break_(route)
        began_s = asyncio.get_running_loop().time()

        assert await ground.enter(ground.job()) is None

        assert 0 < asyncio.get_running_loop().time() - began_s <= HOLD_S

    virtually(story())


def test_a_request_is_delayed_with_the_reason_if_the_breaker_stays_open_long() -> None:
    async def story() -> None:
        ground = Ground("one")
        for route in ground.all:
            await ground.break_(route, times=7)

        outcome = await ground.enter(ground.job())

        assert isinstance(outcome, Deferred)
        assert outcome.reason == "breaker"
        wait_s = min(ground.breakers.wait_s(each, asyncio.get_running_loop().time()) for each in ground.all)
        assert wait_s - 0.001 <= outcome.delay_ms / 1000 <= 1.5 * wait_s + 0.001

    virtually(story())


@pytest.mark.parametrize(("lane", "least_s", "most_s"), [(CRITICAL, 5, 7.5), (BATCH, 30, 45)])
def test_the_delay_grows_with_the_outage_within_the_lanes_limits(lane: LaneSpec, least_s: float, most_s: float) -> None:
    async def story() -> None:
        ground = Ground("one")
        (route,) = ground.all
        while ground.breakers.down_s(route, asyncio.get_running_loop().time()) < 120:
            await ground.break_(route)
        job = ground.job()

        outcome = ground.later(job, replace(decoded(job), lane=lane))

        assert isinstance(outcome, Deferred)
        assert least_s <= outcome.delay_ms / 1000 <= most_s + 2

    virtually(story())


def test_a_request_whose_deadline_comes_before_the_breaker_closes_is_refused_at_once() -> None:
    async def story() -> None:
        ground = Ground("one")
        for route in ground.all:
            await ground.break_(route, times=7)

        outcome = await ground.enter(ground.job(**{"x-lane-deadline-ms": 2000}))

        assert isinstance(outcome, Refused)
        assert outcome.problem.code == "provider_unavailable"
        assert "one: its last calls failed" in outcome.problem.detail
        assert "and 2000 ms are left" in outcome.problem.detail

    virtually(story())


def test_a_request_whose_deadline_comes_during_a_short_wait_is_refused_at_once() -> None:
    async def story() -> None:
        ground = Ground("one")
        for route in ground.all:
            await ground.break_(route)
        began_s = asyncio.get_running_loop().time()

        outcome = await ground.enter(ground.job(**{"x-lane-deadline-ms": 100}))

        assert isinstance(outcome, Refused)
        assert asyncio.get_running_loop().time() == began_s

    virtually(story())


async def test_a_request_is_deferred_for_at_most_half_of_the_time_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground()
    monkeypatch.setattr(Breakers, "down_s", lambda *_: 1000.0)
    job = ground.job(**{"x-lane-deadline-ms": 8000})
    outcome = ground.later(job, decoded(job))
    assert isinstance(outcome, Deferred)
    assert outcome.delay_ms == 4000
