"""Everything that a request took (claim, caps, budget, a breaker's probe) is given back, however the request ends."""

import asyncio
import random
from typing import Any

import pytest

from consumers.failures import (
    UNREACHABLE,
    OverloadedError,
    RateLimitedError,
    RejectedError,
    SpendLimitError,
    TransientError,
)
from consumers.gates.budget import BudgetGate
from consumers.gates.caps import CapsGate
from consumers.gates.claim import ClaimGate
from consumers.gates.deadline import DeadlineGate
from consumers.gates.route import RouteGate
from consumers.job import Job
from consumers.limits.estimates import Estimates
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import AccountCaps, BudgetSpec
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Refused, Retried
from consumers.prices import Prices, Usage
from consumers.providers.base import Answer, OnEvent
from consumers.providers.breaker import FAILURES
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Registry
from consumers.spending import Cap, CapsSpec, Spending
from consumers.state.base import Granted, Identity, Stop
from lanekeeper.contract import names as n
from lanekeeper.telemetry.tracing import Tracing
from tests.support.allowances import MemoryAllowances
from tests.support.jobs import NOW_MS, Bench, attempts, handler, routes_of
from tests.support.virtual_time import virtually
from tests.support.waiting import until
from topology.codec.request import Request
from topology.lanes import CRITICAL

MODEL = "claude-sonnet-5-5"
BODY = b'{"model":"claude-sonnet-5-5","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'


class Provider:
    """A provider that answers after a few turns of the loop, or fails."""

    name = "anthropic"

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.takes_s = 0.0
        self.calls = 0

    async def stream(self, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        self.calls += 1
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return Answer(body=b"{}", model=MODEL, provider=self.name, usage=Usage(input_tokens=9, output_tokens=4))

    async def aclose(self) -> None: ...


class Ground:
    """The whole pipeline with one account."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.provider = Provider()
        limits = AccountCaps(requests=6000, input_tokens=600_000, output_tokens=600_000)
        spec = BudgetSpec(accounts={"anthropic": limits})
        self.budgets = own_accounts(spec)
        self.breakers = Breakers(rng=random.Random(1))
        self.store = MemoryAllowances()
        self.spending = Spending(self.store, CapsSpec(lanes={"critical": Cap(requests=10, usd=1)}))
        rng = random.Random(1)
        routes = RouteGate(self.breakers, now_ms=lambda: NOW_MS, rng=rng)
        budget = BudgetGate(
            self.budgets,
            self.breakers,
            Estimates(first_output_tokens=5, first_bytes_per_token=3.5),
            spec=spec,
            now_ms=lambda: NOW_MS,
            rng=rng,
            on_wait=lambda job, wait: None,
        )
        self.caps = CapsGate(
            self.spending,
            self.breakers,
            prices=Prices(),
            estimate=budget.amounts,
            now_ms=lambda: NOW_MS,
            rng=rng,
            publish=lambda _, __, **___: None,
        )
        self.handler = handler(
            attempts(
                Registry(self.provider, tracing=Tracing()),
                breakers=self.breakers,
                route_gate=routes,
                budget_gate=budget,
                replies=self.bench.replies,
                lifecycle=self.bench.lifecycle,
            ),
            gates=(
                DeadlineGate(now_ms=lambda: NOW_MS),
                ClaimGate(self.bench.claiming, now_ms=lambda: NOW_MS),
                routes,
                self.caps,
                budget,
            ),
            provider="anthropic",
            replies=self.bench.replies,
        )

    def job(self, **headers: Any) -> Job:
        return self.bench.job(body=BODY, headers=headers)

    async def held(self, job: Job) -> dict[str, Any]:
        """What a request still holds after all background work has ended; empty: nothing."""
        for _ in range(3):
            await self.spending.finish(within_s=30)
            await self.bench.claiming.finish(within_s=30)
        account = self.budgets.turns("anthropic/sonnet").account
        found = {
            "running": account.concurrency.running,
            "waiting": len(account.lines),
            "reservation": job.reserved,
            "caps": len(self.caps._held),
            "waiting for": job.waiting,
            "probing": [each for each in self.breakers._all.values() if each.state == "probing"],
        }
        return {what: value for what, value in found.items() if value}

    @property
    def counted(self) -> float:
        return self.store.used.get("cap lane critical requests", 0)

    async def deaths(self) -> int:
        """How many holders never released the claim, as reported to the next holder."""
        delivery = self.bench.delivery(body=BODY)
        delivery.redelivered = True
        found = await self.bench.store.claim(Identity("", "m-1"), self.bench.job(delivery=delivery).fingerprint)
        assert isinstance(found, Granted)
        return found.deaths

    async def open_breaker(self) -> None:
        """Open the breaker, and wait until it may be probed."""
        clock = asyncio.get_running_loop().time
        (route,) = routes_of("anthropic").of("critical", "", MODEL).routes
        for each in range(FAILURES):
            entered = await self.breakers.enter(route, clock(), request=str(each))
            assert entered
            await self.breakers.failed(entered, TransientError("down"), clock(), timeout_s=60)
        wait_s = self.breakers.wait_s(route, clock())
        assert wait_s > 0
        await asyncio.sleep(wait_s)


CUT = TransientError("cut", type="cut")
FAULT = ValueError("a fault of ours")


@pytest.mark.parametrize(
    ("error", "outcome", "counted"),
    [
        (None, Answered, 1),
        (OverloadedError("529"), Retried, 0),
        (TransientError("down", type=UNREACHABLE), Retried, 0),
        (RateLimitedError("429"), Retried, 0),
        (CUT, Retried, 1),
        (RejectedError("400", status=400), Buried, 0),
        (SpendLimitError("429", status=429), Buried, 0),
    ],
)
async def test_everything_is_given_back_after_a_call(error: Exception | None, outcome: type, counted: int) -> None:
    ground = Ground()
    ground.provider.error, job = error, ground.job()

    assert isinstance(await ground.handler.handle(job, lane=CRITICAL), outcome)

    assert await ground.held(job) == {}
    assert ground.counted == counted
    assert (job.claim is not None) == (outcome in (Answered, Buried)), "what has ended keeps it until it is stored"


async def test_everything_is_given_back_after_an_internal_error() -> None:
    ground = Ground()
    ground.provider.error, job = FAULT, ground.job()

    with pytest.raises(ValueError, match="a fault of ours"):
        await ground.handler.handle(job, lane=CRITICAL)

    assert await ground.held(job) == {}
    assert await ground.deaths() == 0


@pytest.mark.parametrize(("why", "outcome"), [(Stop.CANCELLED, Dropped), (Stop.FENCED, Deferred)])
async def test_everything_is_given_back_by_a_request_that_is_told_to_stop(why: Stop, outcome: type) -> None:
    ground = Ground()
    ground.provider.takes_s, job = 30, ground.job()
    working = asyncio.create_task(ground.handler.handle(job, lane=CRITICAL))
    await until(lambda: ground.provider.calls)
    job.stop(why)

    assert isinstance(await working, outcome)

    assert await ground.held(job) == {}
    assert ground.counted == 1, "it may have been paid"


@pytest.mark.parametrize("is_probe", [False, True])
def test_everything_is_given_back_wherever_the_request_is_cancelled(is_probe: bool) -> None:
    async def story(turns: int) -> bool:
        ground = Ground()
        if is_probe:
            await ground.open_breaker()
        ground.provider.takes_s, job = 30, ground.job()
        working = asyncio.create_task(ground.handler.handle(job, lane=CRITICAL))
        for _ in range(turns):
            await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

        assert await ground.held(job) == {}, turns
        assert ground.counted == (1 if ground.provider.calls else 0), turns
        assert await ground.deaths() == 0, turns
        return ground.provider.calls > 0

    called = [virtually(story(turns)) for turns in range(30)]
    assert called[-1]
    assert not called[0]


async def test_a_claim_is_released_although_the_worker_stops_during_the_release() -> None:
    ground = Ground()
    job, may_go = ground.job(), asyncio.Event()
    store, claiming = ground.bench.store, ground.bench.claiming
    assert isinstance(await claiming.claim(job), Granted)
    release = store.release

    async def release_slowly(*given: Any, **more: Any) -> None:
        await may_go.wait()
        await release(*given, **more)

    store.release = release_slowly  # type: ignore[method-assign]
    letting_go = asyncio.create_task(claiming.release(job))
    await asyncio.sleep(0)
    letting_go.cancel()
    await asyncio.wait([letting_go])
    may_go.set()
    await claiming.finish(within_s=30)
    assert letting_go.cancelled()
    assert await ground.deaths() == 0


async def test_a_request_takes_nothing_while_no_provider_may_be_called() -> None:
    ground = Ground()
    ground.provider.error = TransientError("500", status=500)
    for each in range(FAILURES):
        job = ground.bench.job(body=BODY, message_id=f"m-{each}")
        await ground.handler.handle(job, lane=CRITICAL)
        assert await ground.held(job) == {}

    calls, job = ground.provider.calls, ground.job(**{n.DEADLINE_MS: 300})
    outcome = await ground.handler.handle(job, lane=CRITICAL)

    assert isinstance(outcome, Refused)
    assert "no provider may be called for" in outcome.problem.detail
    assert (await ground.held(job), ground.counted, ground.provider.calls) == ({}, 0, calls)
