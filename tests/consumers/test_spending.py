"""Daily caps of lanes and tenants: prices, counting, and what happens to a request over a cap."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from secrets import token_hex
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers.gates import CapsGate
from consumers.job import Attempted, Chain, Job, LostCall, Route
from consumers.limits.base import Amounts
from consumers.outcomes import (
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    Refused,
    Replayed,
    Retried,
    Superseded,
)
from consumers.prices import Prices, Usage
from consumers.providers.breakers import Breakers
from consumers.spending import (
    PERIODS,
    Bound,
    Cap,
    CapsSpec,
    Hold,
    Over,
    Spending,
    Spent,
    Total,
)
from consumers.state.base import Completion, Stop, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench, decoded, read
from tests.support.memory_store import MemoryAllowances, daily
from tests.support.virtual_time import virtually
from topology.codec.bodies import user_hash
from topology.codec.headers import BatchHop, HopHeaders, hop_headers
from topology.lanes import CRITICAL, BatchSpec

pytestmark = pytest.mark.usefixtures("returned_at_once")
MODEL = "claude-sonnet-5-5"
CHEAP, DEAR = (
    Route(provider="anthropic", model=model, name=model, account=model)
    for model in ("claude-haiku-5-5", "claude-opus-5-5")
)
BATCHED = replace(CRITICAL, batches=BatchSpec(enabled=True))
ESTIMATE = Amounts(1, 1000, 500)
COST = (1000 * 2 + 500 * 10) / 1_000_000
ANSWERED = Answered(body=b"{}", model=MODEL, provider="anthropic")
RETRIED = Retried(delay_ms=0, error="")


def cost_of(model: str, input_tokens: int, output_tokens: int) -> float:
    return Prices().cost_usd(model, Usage(input_tokens=input_tokens, output_tokens=output_tokens)) or 0.0


async def take(spending: Spending, bounds: tuple[Bound, ...], spent: Spent) -> Hold | Over:
    return await spending.take(bounds, spent, publish=lambda _, **__: None)


def counted(store: MemoryAllowances) -> dict[str, float]:
    return {name: used for name, used in store.used.items() if name.startswith("cap ")}


class Clock:
    """Stands until it is put on."""

    def __init__(self, ms: int = NOW_MS) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


async def spend(spending: Spending, bounds: tuple[Bound, ...], spent: Spent) -> None:
    hold = await take(spending, bounds, spent)
    assert isinstance(hold, Hold)
    spending.correct(hold, spent)
    await spending.finish(within_s=30)


async def test_caps_are_of_lane_tenant_key_and_user_and_of_a_day_a_week_and_a_month() -> None:
    caps = CapsSpec(
        lanes={"batch": {"day": Cap(requests=1), "month": Cap(usd=2)}},
        tenants={"*": {"week": Cap(tokens=3)}},
        keys={"ci": daily(requests=4)},
        users={"*": {"month": Cap(requests=5)}},
    )
    spending = Spending(MemoryAllowances(), caps)

    assert {each.name: each.limit for each in spending.bounds("batch", "shop", key="ci", user="ab12")} == {
        "cap lane batch requests": 1,
        "cap lane batch usd month": 2,
        "held cap lane batch usd month shop": 2,
        "cap tenant shop tokens week": 3,
        "cap key shop/ci requests": 4,
        "cap user shop/ab12 requests month": 5,
    }
    assert [each.name for each in spending.bounds("critical", "shop", key="other")] == ["cap tenant shop tokens week"]


@pytest.mark.parametrize(
    ("per", "last", "first"),
    [
        ("day", "2026-11-28T23:59:59.999", "2026-11-29T00:00:00"),
        ("week", "2026-11-29T23:59:59.999", "2026-11-30T00:00:00"),
        ("month", "2026-12-31T23:59:59.999", "2027-01-01T00:00:00"),
        ("month", "2024-02-29T23:59:59.999", "2024-03-01T00:00:00"),
    ],
)
def test_a_week_begins_on_monday_and_a_month_on_its_first_day(per: str, last: str, first: str) -> None:
    last_ms, first_ms = (round(1000 * datetime.fromisoformat(f"{each}+00:00").timestamp()) for each in (last, first))

    before, after = PERIODS[per](last_ms), PERIODS[per](first_ms)

    assert (before.ends_ms, after.number) == (first_ms, before.number + 1)
    assert PERIODS[per](after.ends_ms - 1) == after


async def test_a_changed_cap_is_told_with_its_new_limit_alone_and_its_levels_are_reported_again() -> None:
    spending = Spending(MemoryAllowances(), CapsSpec(lanes={"batch": daily(requests=4)}))
    with capture_logs() as logs:
        before = spending.bounds("batch", "")
        for _ in range(3):
            await spend(spending, before, Spent(1))
        spending.spec = CapsSpec(lanes={"batch": daily(requests=8)})
        assert not spending.used()
        await spend(spending, before, Spent(1))  # it began before the change
        for _ in range(3):
            await spend(spending, spending.bounds("batch", ""), Spent(1))

    assert {(bound.limit, used) for bound, used in spending.used().items()} == {(8, 7)}
    assert [
        (each["percent"], each["used"], each["limit"]) for each in logs if each["event"] == signals.CAP_REACHED
    ] == [
        (50, 2, 4),
        (80, 4, 4),
        (100, 4, 4),
        (50, 5, 8),
        (80, 7, 8),
    ]


async def test_a_tenant_without_its_own_cap_has_the_cap_for_all_others() -> None:
    spending = Spending(MemoryAllowances(), CapsSpec(tenants={"shop": daily(requests=5), "*": daily(requests=1)}))

    assert [each.limit for each in spending.bounds("normal", "shop")] == [5]
    assert [(each.limit, each.who) for each in spending.bounds("normal", "other")] == [(1, "other")]


def told(logs: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(each["percent"], each["used"]) for each in logs if each["event"] == signals.CAP_REACHED]


async def test_a_cap_that_leaves_less_than_a_request_needs_is_used_up_until_its_day_ends() -> None:
    store, clock = MemoryAllowances(), Clock()
    spending = Spending(store, CapsSpec(lanes={"batch": daily(requests=10)}), now_ms=clock)
    bounds = spending.bounds("batch", "")
    await spend(spending, bounds, Spent(8))
    assert spending.used_up() == []

    assert isinstance(await take(spending, bounds, Spent(11)), Over)
    assert spending.used_up() == [], "no day would do for this request"
    assert isinstance(await take(spending, bounds, Spent(3)), Over)
    assert spending.used_up() == [bounds[0].name]
    clock.ms += 86_400_000
    assert spending.used_up() == []
    await spend(spending, bounds, Spent(1))
    assert spending.used_up() == [], "what the day before was full is not, although it is used again"


async def test_half_four_fifths_and_all_of_a_cap_are_each_reported_once_a_day() -> None:
    store, clock = MemoryAllowances(), Clock()
    spending = Spending(store, CapsSpec(lanes={"batch": daily(requests=10)}), now_ms=clock)
    bounds = spending.bounds("batch", "")

    with capture_logs() as logs:
        for _ in range(10):
            await spend(spending, bounds, Spent(1))
        for _ in range(3):
            assert isinstance(await take(spending, bounds, Spent(1)), Over)
        clock.ms += 86_400_000
        await spend(spending, bounds, Spent(8))  # the next day begins with more than half of the cap used
        assert isinstance(await take(spending, bounds, Spent(8)), Over)

    assert told(logs) == [(50, 5), (80, 8), (100, 10), (50, 8), (80, 8), (100, 8)]


async def test_if_the_store_fails_between_two_caps_the_first_is_given_back() -> None:
    store = MemoryAllowances()
    spending = Spending(store, CapsSpec(lanes={"batch": daily(requests=10, tokens=100)}))
    store.fails_at = 2

    with pytest.raises(StoreUnavailable):
        await take(spending, spending.bounds("batch", ""), Spent(1, 10))
    await spending.finish(within_s=30)

    assert counted(store) == {"cap lane batch requests": 0}


@pytest.mark.parametrize(("away_s", "counts"), [(100, 10), (200, 100)])
def test_what_is_held_is_corrected_when_the_store_is_back_within_three_minutes(away_s: int, counts: int) -> None:
    store = MemoryAllowances()
    spending = Spending(store, CapsSpec(lanes={"batch": {"month": Cap(tokens=1000)}}), now_ms=Clock())

    async def story() -> None:
        hold = await take(spending, spending.bounds("batch", ""), Spent(1, 100))
        assert isinstance(hold, Hold)
        store.is_away = True
        spending.correct(hold, Spent(1, 10))
        await asyncio.sleep(away_s)
        store.is_away = False
        await spending.finish(within_s=30)

    with capture_logs() as logs:
        virtually(story())

    assert counted(store) == {"cap lane batch tokens month": counts}
    assert [each["event"] for each in logs] == ([signals.CAP_UNCORRECTED] if counts == 100 else [])


async def test_an_amount_taken_yesterday_is_corrected_for_the_month_and_not_for_today() -> None:
    store, clock = MemoryAllowances(), Clock()
    caps = CapsSpec(lanes={"batch": {"day": Cap(tokens=100), "month": Cap(tokens=1000)}})
    spending = Spending(store, caps, now_ms=clock)
    hold = await take(spending, spending.bounds("batch", ""), Spent(1, 60))
    assert isinstance(hold, Hold)
    clock.ms += 86_400_000

    spending.correct(hold, Spent(1, 10))
    await spending.finish(within_s=30)

    assert store.used["cap lane batch tokens month"] == 10
    assert isinstance(await take(spending, spending.bounds("batch", ""), Spent(1, 100)), Hold)


@pytest.mark.parametrize(("limit", "used"), [(10, 3.0), (4, 3.0)])
async def test_what_was_granted_to_a_request_that_no_longer_waits_is_given_back(limit: int, used: float) -> None:
    may_answer = asyncio.Event()

    class Slow(MemoryAllowances):
        async def take(self, *given: Any, **more: Any) -> Any:
            await may_answer.wait()
            return await super().take(*given, **more)

    store = Slow()
    store.used["cap lane batch requests"] = 3
    spending = Spending(store, CapsSpec(lanes={"batch": daily(requests=limit)}))
    taking = asyncio.create_task(take(spending, spending.bounds("batch", ""), Spent(2)))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    may_answer.set()
    with capture_logs() as logs:
        await spending.finish(within_s=30)
        await spending.finish(within_s=30)
    assert counted(store) == {"cap lane batch requests": used}
    assert [each["event"] for each in logs if each["log_level"] == "error"] == []


class Ground:
    """A gate of caps, and jobs that enter it."""

    def __init__(self, **caps: Any) -> None:
        self.store = MemoryAllowances()
        self.clock = Clock()
        self.spending = Spending(self.store, CapsSpec(**caps), now_ms=self.clock)
        rng = random.Random(1)
        self.gate = CapsGate(
            self.spending,
            Breakers(),
            prices=Prices(),
            estimate=lambda _, __, ___: ESTIMATE,
            now_ms=self.clock,
            rng=rng,
            publish=lambda job, event, **figures: self.told.append((job.id, event, figures)),
        )
        self.told: list[tuple[str, str, dict[str, Any]]] = []

    def job(
        self,
        model: str = MODEL,
        *,
        max_tokens: int = 5,
        metadata: str = "{}",
        speed: str = "standard",
        now_ms: int = NOW_MS,
        routes: Sequence[Route] = (),
        **properties: Any,
    ) -> Job:
        body = (
            f'{{"model":"{model}","max_tokens":{max_tokens},"metadata":{metadata},"speed":"{speed}",'
            '"messages":[{"role":"user","content":"hi"}]}'
        )
        job = read(Bench().job(body=body.encode(), **properties), now_ms=now_ms)
        if routes:
            job.decoded = replace(decoded(job), chain=Chain(tuple(routes)))
        return job

    async def enter(self, job: Job) -> Outcome | None:
        return await self.gate.enter(job, decoded(job))

    async def through(
        self,
        job: Job,
        outcome: Outcome,
        *,
        usage: Amounts | None,
        cost_usd: float | None = None,
        lost: tuple[LostCall, ...] = (),
    ) -> None:
        assert await self.gate.enter(job, decoded(job)) is None
        job.attempted = Attempted(started_ms=NOW_MS, usage=usage, cost_usd=cost_usd, lost=lost)
        await self.gate.leave(job, decoded(job), outcome)
        await self.spending.finish(within_s=30)


async def test_what_a_killed_worker_held_gives_its_place_to_the_same_request_and_to_no_other() -> None:
    ground = Ground(lanes={"critical": daily(requests=1)})
    assert await ground.enter(ground.job(message_id="a")) is None
    assert isinstance(await ground.enter(ground.job(message_id="b")), Deferred)
    again = ground.job(message_id="a")
    assert await ground.enter(again) is None
    assert counted(ground.store) == {"cap lane critical requests": 1}

    again.attempted = Attempted(started_ms=NOW_MS, usage=ESTIMATE, cost_usd=0.02)
    await ground.gate.leave(again, decoded(again), ANSWERED)
    await ground.spending.finish(within_s=30)
    assert counted(ground.store) == {"cap lane critical requests": 1}


async def test_a_cap_holds_for_64_callers_at_once_whichever_of_their_routes_is_called() -> None:
    limit = 1.0
    ground = Ground(lanes={"critical": daily(usd=limit)})
    jobs = [ground.job(message_id=f"m-{k}", max_tokens=2000, routes=(CHEAP, DEAR)) for k in range(64)]
    outcomes = await asyncio.gather(*map(ground.enter, jobs))
    run = [job for job, outcome in zip(jobs, outcomes, strict=True) if outcome is None]
    dearest = cost_of(DEAR.model, 1000, 2000)
    assert len(run) == int(limit / dearest)
    assert all(isinstance(each, Deferred) for each in outcomes if each is not None), "they wait for what runs"
    for job in run:
        job.attempted = Attempted(started_ms=NOW_MS, usage=Amounts(1, 1000, 2000), cost_usd=dearest)
        await ground.gate.leave(job, decoded(job), ANSWERED)
    await ground.spending.finish(within_s=30)
    assert limit / 2 < ground.store.used["spent cap lane critical usd"] <= limit


async def test_a_request_in_fast_mode_holds_what_fast_mode_costs() -> None:
    held: list[float] = []
    for speed in ("standard", "fast"):
        ground = Ground(lanes={"critical": daily(usd=1)})
        assert await ground.enter(ground.job(max_tokens=2000, routes=(DEAR,), speed=speed)) is None
        held += counted(ground.store).values()
    assert held == [cost_of(DEAR.model, 1000, 2000), 2 * cost_of(DEAR.model, 1000, 2000)]


async def test_a_call_after_one_that_must_be_paid_is_made_only_if_there_is_enough_left_for_it() -> None:
    ground = Ground(lanes={"critical": daily(requests=2, tokens=13_000)})
    first, second = (ground.job(message_id=id, max_tokens=2000, routes=(CHEAP, DEAR)) for id in "ab")
    assert [await ground.enter(each) for each in (first, second)] == [None, None]

    assert await ground.gate.hold_again(first, decoded(first))
    assert await ground.gate.hold_again(first, decoded(first)), "for the fallback of a model that has refused"
    assert not await ground.gate.hold_again(second, decoded(second))
    assert counted(ground.store) == {"cap lane critical requests": 2, "cap lane critical tokens": 12_000}

    first.attempted = Attempted(started_ms=NOW_MS, usage=Amounts(1, 1000, 10), lost=(LostCall(CHEAP.model, ESTIMATE),))
    await ground.gate.leave(first, decoded(first), ANSWERED)
    await ground.spending.finish(within_s=30)
    assert counted(ground.store) == {"cap lane critical requests": 2, "cap lane critical tokens": 3000 + 1010 + 1500}


async def test_a_cap_in_dollars_leaves_out_routes_without_a_price() -> None:
    ground = Ground(lanes={"critical": daily(usd=1)})
    free = replace(DEAR, model="another", name="another")
    job = ground.job(routes=(CHEAP, free))
    assert await ground.enter(job) is None
    assert decoded(job).chain.routes == (CHEAP,)
    refused = await ground.enter(ground.job(routes=(free,)))
    assert isinstance(refused, Refused | DeadLettered)
    assert refused.problem.code == "forbidden_model"


async def test_a_tenant_leaves_its_neighbours_as_much_of_a_lanes_cap_as_its_own_calls_hold() -> None:
    ground = Ground(lanes={"critical": daily(tokens=100_000)})
    large = [ground.job(message_id=f"l-{k}", user_id="large", max_tokens=24_000) for k in range(64)]
    held = [each for each in large if await ground.enter(each) is None]
    assert len(held) == 2, "half of the cap"
    small = ground.job(user_id="small", max_tokens=4000)
    assert await ground.enter(small) is None

    for job in held:
        job.attempted = Attempted(started_ms=NOW_MS, usage=ESTIMATE)
        await ground.gate.leave(job, decoded(job), ANSWERED)
    await ground.spending.finish(within_s=30)
    assert await ground.enter(large[-1]) is None, "it only waited"


async def test_one_request_of_a_tenant_may_hold_all_that_is_left_of_a_lanes_cap() -> None:
    ground = Ground(lanes={"critical": daily(tokens=10_000)})
    first, second = (ground.job(message_id=id, user_id="only", max_tokens=9000) for id in "ab")
    assert await ground.enter(first) is None
    assert isinstance(await ground.enter(second), Deferred)


async def test_what_a_killed_worker_held_for_a_lane_with_batches_ends_with_its_request() -> None:
    ground = Ground(lanes={"critical": daily(tokens=2000)})
    assert await ground.enter(ground.job(message_id="a", lane=BATCHED)) is None
    again = ground.job(message_id="a", lane=BATCHED)
    assert await ground.enter(again) is None
    assert counted(ground.store) == {"cap lane critical tokens": 1500}


async def test_a_failure_is_counted_only_if_it_may_have_been_paid() -> None:
    ground = Ground(lanes={"critical": daily(tokens=10_000, usd=1)})

    await ground.through(ground.job(), RETRIED, usage=Amounts(1, 0, 0))
    assert set(ground.store.used.values()) == {0}
    await ground.through(ground.job(), RETRIED, usage=Amounts(1, 0, 1))

    assert ground.store.used["cap lane critical usd"] == pytest.approx(COST), "a single output token is paid"


@pytest.mark.parametrize(
    "outcome", [None, Refused(RequestProblem("deadline_exceeded", "")), Superseded(RequestProblem("cancelled", ""))]
)
async def test_a_call_that_was_interrupted_may_have_been_paid(outcome: Outcome) -> None:
    ground = Ground(lanes={"critical": daily(usd=1)})

    await ground.through(ground.job(), outcome, usage=None)

    assert ground.store.used["cap lane critical usd"] == pytest.approx(COST)


async def test_a_call_that_was_interrupted_is_counted_although_another_provider_answered() -> None:
    ground = Ground(lanes={"critical": daily(requests=10, tokens=10_000, usd=1)})
    job = ground.job()

    await ground.through(job, ANSWERED, usage=Amounts(1, 100, 50), cost_usd=0.01, lost=(LostCall(MODEL, ESTIMATE),))

    assert ground.store.used["cap lane critical requests"] == 1
    assert ground.store.used["cap lane critical tokens"] == 1650
    assert ground.store.used["cap lane critical usd"] == pytest.approx(0.01 + COST)


async def test_an_answer_whose_usage_is_not_known_counts_as_much_as_was_expected() -> None:
    ground = Ground(lanes={"critical": daily(requests=10, tokens=10_000, usd=1)})

    await ground.through(ground.job(), ANSWERED, usage=None)

    assert counted(ground.store) == {
        "cap lane critical requests": 1,
        "cap lane critical tokens": 1500,
        "cap lane critical usd": 0.007,
    }
    assert ground.spending.totals()["lane"]["critical"] == Total(1, 1500, 0.007)


async def test_a_request_larger_than_a_whole_cap_is_refused_instead_of_waiting_for_the_next_day() -> None:
    ground = Ground(lanes={"critical": daily(tokens=100)})

    assert isinstance(await ground.enter(ground.job()), Refused)


@pytest.mark.slow
@pytest.mark.parametrize(("left_ms", "most_ms"), [(60_000, 60_000), (3_600_000, 90_000)])
async def test_over_a_cap_a_request_waits_for_the_next_day_or_nearly_to_its_deadline(
    left_ms: int, most_ms: int
) -> None:
    ground, delays_ms = Ground(lanes={"critical": daily(requests=1)}), []
    ground.clock.ms = midnight_ms = NOW_MS // 86_400_000 * 86_400_000 + 86_400_000
    ground.clock.ms -= 30_000
    await ground.through(ground.job(), ANSWERED, usage=ESTIMATE)
    for _ in range(200):
        headers = {n.SENT_MS: ground.clock.ms, n.DEADLINE_MS: left_ms}
        outcome = await ground.enter(ground.job(headers=headers, now_ms=ground.clock.ms))
        assert isinstance(outcome, Deferred)
        assert outcome.reason == "lane"
        delays_ms.append(outcome.delay_ms)
    assert 30_000 <= min(delays_ms) < 35_000
    assert most_ms - 2000 < max(delays_ms) <= most_ms
    assert ground.clock.ms + max(delays_ms) > midnight_ms
    headers = {n.SENT_MS: ground.clock.ms, n.DEADLINE_MS: 30_000}
    assert isinstance(await ground.enter(ground.job(headers=headers, now_ms=ground.clock.ms)), Refused)


async def test_if_running_calls_hold_the_rest_of_a_cap_a_request_waits_for_them_and_not_for_the_next_day() -> None:
    ground = Ground(lanes={"critical": daily(requests=1)})
    await ground.enter(ground.job(message_id="another"))

    soon = await ground.enter(ground.job(headers={n.SENT_MS: NOW_MS}))
    later = await ground.enter(ground.job(headers={n.SENT_MS: NOW_MS - 100_000, n.DEADLINE_MS: 3_600_000}))

    assert isinstance(soon, Deferred)
    assert isinstance(later, Deferred)
    assert 1000 <= soon.delay_ms <= 2000
    assert 12_500 <= later.delay_ms <= 25_000


async def test_all_that_a_call_may_use_is_held_and_of_a_failure_only_what_was_likely_stays_counted() -> None:
    ground = Ground(lanes={"critical": daily(tokens=100_000)})
    job = ground.job(max_tokens=8000)

    await ground.enter(job)
    assert ground.store.used["cap lane critical tokens"] == 9000
    job.attempted = Attempted(started_ms=NOW_MS, usage=None)
    await ground.gate.leave(job, decoded(job), RETRIED)
    await ground.spending.finish(within_s=30)

    assert ground.store.used["cap lane critical tokens"] == 1500


async def test_a_request_counts_for_its_key_and_for_a_hash_of_its_user() -> None:
    ground = Ground(keys={"*": daily(requests=9)}, users={"*": daily(requests=9)})

    await ground.through(ground.job(headers={n.KEY: "ci"}, metadata='{"user_id":"ann"}'), ANSWERED, usage=ESTIMATE)
    await ground.through(ground.job(metadata="[]"), ANSWERED, usage=ESTIMATE)

    assert counted(ground.store) == {"cap key /ci requests": 1, f"cap user /{user_hash('ann')} requests": 1}


async def test_a_request_that_was_cancelled_is_not_counted() -> None:
    ground = Ground(lanes={"critical": daily(requests=1)})
    job = ground.job()
    job.stop(Stop.CANCELLED)
    assert await ground.enter(job) is None
    assert ground.store.used == {}


async def test_a_model_without_a_price_is_refused_under_a_cap_in_dollars() -> None:
    ground = Ground(lanes={"critical": daily(usd=1)})

    outcome = await ground.enter(ground.job(model="unpriced-1"))

    assert outcome is not None
    assert outcome.problem.code == "forbidden_model"  # type: ignore[union-attr]
    assert await Ground(lanes={"critical": daily(tokens=5000)}).enter(ground.job(model="unpriced-1")) is None


async def test_while_a_cap_cannot_be_checked_the_request_waits() -> None:
    ground = Ground(lanes={"critical": daily(usd=1)})
    ground.store.is_away = True

    outcome = await ground.enter(ground.job())

    assert isinstance(outcome, Deferred)
    assert outcome.reason == "store"


async def test_what_was_counted_is_given_back_if_no_call_was_made() -> None:
    ground = Ground(lanes={"critical": daily(requests=1)})
    job = ground.job()
    assert await ground.enter(job) is None
    await ground.gate.leave(job, decoded(job), Deferred(delay_ms=1, reason="rpm"))
    await ground.spending.finish(within_s=30)
    assert ground.store.used["cap lane critical requests"] == 0


async def test_without_a_cap_the_store_is_not_asked_and_usage_is_counted() -> None:
    ground = Ground()
    ground.store.is_away = True

    await ground.through(ground.job(user_id="shop"), ANSWERED, usage=ESTIMATE, cost_usd=0.5)

    assert ground.spending.totals()["tenant"]["shop"] == Total(1, 1500, 0.5)


async def test_a_reached_level_is_reported_although_the_store_fails_to_choose_the_reporter() -> None:
    store = MemoryAllowances()
    spending = Spending(store, CapsSpec(lanes={"batch": daily(requests=2)}))
    store.fails_at = 3

    with capture_logs() as logs:
        await spend(spending, spending.bounds("batch", ""), Spent(1))

    assert told(logs) == [(50, 1)]


def batched(**hop: Any) -> dict[str, Any]:
    """The headers of a request that was in a batch."""
    return hop_headers(HopHeaders(batch=BatchHop(ticket="t", **hop), first_seen_ms=NOW_MS))


async def gathered(ground: Ground) -> dict[str, Any]:
    """Lets a request into a batch. Returns how it comes back."""
    id = token_hex(4)
    job = ground.job(message_id=id, lane=BATCHED)
    assert await ground.enter(job) is None
    job.batch = BatchHop()
    await ground.gate.leave(job, decoded(job), Batched(params=b""))
    await ground.spending.finish(within_s=30)
    assert ground.store.used["cap lane critical requests"] == 1, "while it is in its batch"
    return {"message_id": id, "lane": BATCHED, "exchange": "lane.due", "headers": batched()}


@pytest.mark.parametrize("result", [b"{}", None], ids=["answered", "promoted"])
async def test_what_comes_back_from_a_batch_is_counted_once_at_what_it_cost(result: bytes | None) -> None:
    ground = Ground(lanes={"critical": daily(requests=1, usd=1)})
    job = ground.job(**await gathered(ground))
    job.batch_result = result
    await ground.through(job, ANSWERED, usage=Amounts(1, 1500, 700), cost_usd=0.01)
    await ground.gate.leave_last(job, decoded(job), ANSWERED)

    assert ground.store.used["cap lane critical requests"] == 1
    assert ground.store.used["cap lane critical usd"] == pytest.approx(0.01)


@pytest.mark.parametrize("outcome", [Deferred(delay_ms=1, reason="rpm"), None], ids=["deferred", "lost"])
async def test_what_is_held_for_a_request_of_a_batch_is_held_once_until_it_ends(outcome: Outcome | None) -> None:
    ground = Ground(lanes={"critical": daily(requests=1)})
    back = await gathered(ground)
    for _ in range(2):
        job = ground.job(**back)
        assert await ground.enter(job) is None, "it takes the place that it has"
        await ground.gate.leave(job, decoded(job), outcome)
        await ground.gate.leave_last(job, decoded(job), outcome)
        await ground.spending.finish(within_s=30)

    assert ground.store.used["cap lane critical requests"] == 1


async def test_an_answer_that_is_paid_for_passes_a_cap_that_is_newer_and_counts() -> None:
    ground = Ground(lanes={"critical": daily(requests=0)})
    job = ground.job(exchange="lane.due", headers=batched(result_bytes=0))
    job.batch_result = b"{}"
    job.decoded = replace(decoded(job), chain=Chain(forbidden="meanwhile"))

    await ground.through(job, ANSWERED, usage=ESTIMATE)

    assert ground.store.used["cap lane critical requests"] == 1


@pytest.mark.parametrize(
    ("outcome", "used"),
    [
        (Refused(RequestProblem("deadline_exceeded", "")), 0),
        (Superseded(RequestProblem("cancelled", "")), 0),
        (Replayed(completion=Completion(status="error", code="cancelled", body=b"", ended_ms=1)), 0),
        (Replayed(completion=Completion(status="ok", body=b"", ended_ms=1)), 1),
        (Deferred(delay_ms=1, reason="paused"), 1),
        (None, 1),
    ],
)
async def test_what_ends_before_the_gate_gives_back_what_was_counted(outcome: Outcome | None, used: int) -> None:
    ground = Ground(lanes={"critical": daily(requests=1)})
    job = ground.job(**await gathered(ground))

    assert await ground.gate.enter_first(job, decoded(job)) is None
    await ground.gate.leave_last(job, decoded(job), outcome)
    await ground.spending.finish(within_s=30)

    assert ground.store.used["cap lane critical requests"] == used
