"""The route gate: it refuses forbidden models, and waits for breakers."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from consumers.failures import AccountError, TransientError
from consumers.gates import await_route
from consumers.job import Decoded, Job, Route
from consumers.outcomes import Deferred, Outcome, Refused, Superseded
from consumers.providers.breakers import FAILURES, Breakers, Pauses
from consumers.providers.routes import ProviderModels, Routes, RoutesSpec
from consumers.refusals import later
from consumers.state.base import Stop
from tests.support.jobs import NOW_MS, Bench, decoded, read
from tests.support.virtual_time import virtually
from topology.lanes import NORMAL

MODEL = "claude-sonnet-5-5"


class Drawn(random.Random):
    """Draws the least or the most."""

    share = 0.0

    @override
    def uniform(self, a: float, b: float) -> float:
        return a + self.share * (b - a)


class Ground:
    """A gate with two providers, or with the given ones."""

    def __init__(self, *names: str, **more: Any) -> None:
        providers = tuple(ProviderModels(name=name) for name in names or ("one", "two"))
        self.routes = Routes(RoutesSpec(providers=providers, **more))
        self.breakers = Breakers(rng=random.Random(1))
        self.rng = Drawn()

    def job(self, **headers: Any) -> Job:
        body = b'{"model":"%s","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}' % MODEL.encode()
        job = Bench().job(body=body, headers=headers)
        return read(job, self.routes.of("critical", "", MODEL))

    async def enter(self, job: Job) -> Outcome | None:
        return await await_route(job, decoded(job), breakers=self.breakers, now_ms=lambda: NOW_MS, rng=self.rng)

    def later(self, job: Job, of: Decoded, wait_s: float) -> Outcome:
        return later(job, of, wait_s, breakers=self.breakers, now_ms=lambda: NOW_MS, rng=self.rng)

    @property
    def all(self) -> tuple[Route, ...]:
        return self.routes.of("critical", "", MODEL).routes

    async def break_(self, route: Route, *, times: int = 1) -> None:
        """Open the route's breaker by failing this many probes; 7 keep it open for 2.5 to 5 s."""
        clock = asyncio.get_running_loop().time
        for each in range(FAILURES + times - 1):
            await asyncio.sleep(self.breakers.wait_s(route, clock()))
            entered = self.breakers.enter(route, clock(), request=str(each))
            assert entered
            self.breakers.failed(entered, TransientError("down"), clock(), timeout_s=60)


def test_a_cancellation_ends_the_wait_for_a_provider() -> None:
    async def story() -> None:
        ground = Ground("one")
        (route,) = ground.all
        await ground.break_(route)
        job = ground.job()
        job.stop(Stop.CANCELLED)
        assert isinstance(await ground.enter(job), Superseded)

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


@pytest.mark.parametrize(("well_after_s", "is_let_through"), [(0.5, True), (10.0, False)])
def test_while_a_provider_is_paused_a_request_is_refused_only_when_its_time_is_over(
    well_after_s: float, is_let_through: bool
) -> None:
    async def story() -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()

        async def probe(route: Route, by_call: bool) -> None:
            if clock() < began_s + well_after_s:
                raise AccountError("no", reason="it refuses the key", status=401)

        ground = Ground("one")
        ground.breakers.pauses = Pauses(probe)
        ground.breakers.pauses.pause(ground.all[0], AccountError("no", reason="it refuses the key", status=401))

        job = ground.job(**{"x-lane-deadline-ms": 2900})
        outcome = await await_route(
            job,
            decoded(job),
            breakers=ground.breakers,
            now_ms=lambda: NOW_MS + round(1000 * (clock() - began_s)),
            rng=ground.rng,
        )

        assert (outcome is None) is is_let_through
        assert isinstance(outcome, Refused) is not is_let_through
        assert is_let_through or clock() - began_s > 2.89
        await ground.breakers.pauses.aclose()

    virtually(story())


REFUSED = AccountError("no", reason="it refuses the key", status=401)


async def _paused_ground(*, for_s: float) -> Ground:
    async def probe(route: Route, by_call: bool) -> None:
        raise REFUSED

    ground = Ground("one")
    ground.breakers.pauses = Pauses(probe)
    ground.breakers.pauses.pause(ground.all[0], REFUSED)
    await asyncio.sleep(for_s)
    return ground


@pytest.mark.parametrize("left_ms", [300, 5000, 10_000])
def test_a_pause_that_is_probed_again_too_late_refuses_no_request_that_has_time(left_ms: int) -> None:
    async def story() -> None:
        ground = await _paused_ground(for_s=60)
        job = ground.job(**{"x-lane-deadline-ms": left_ms})

        outcome = ground.later(job, decoded(job), 55.0)

        assert isinstance(outcome, Deferred)
        assert outcome.reason == "paused"
        assert outcome.delay_ms < left_ms, "an operator's probe may end the pause meanwhile"
        over = ground.job(**{"x-lane-deadline-ms": 150})
        assert isinstance(ground.later(over, decoded(over), 55.0), Refused)
        await ground.breakers.pauses.aclose()

    virtually(story())


def test_after_an_outage_of_a_day_a_deferred_request_is_back_within_45_seconds() -> None:
    async def story() -> None:
        ground = await _paused_ground(for_s=86_400)
        ground.rng.share = 1.0
        job = ground.job(**{"x-lane-deadline-ms": 3_600_000})

        outcome = ground.later(job, replace(decoded(job), lane=NORMAL), 2.0)

        assert isinstance(outcome, Deferred)
        assert outcome.delay_ms <= 45_000
        await ground.breakers.pauses.aclose()

    virtually(story())
