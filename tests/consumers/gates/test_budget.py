"""The budget gate: which account is charged, which request waits, which is refused, and what is given back."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from consumers.chain import Chain, Route
from consumers.gates.budget import BudgetGate
from consumers.job import Attempted, Job
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Kind, Reservation, Wait, WaitTooLong
from consumers.limits.estimates import Estimates
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import AccountCaps, BudgetSpec
from consumers.outcomes import Answered, Deferred, Dropped, Outcome, Refused
from consumers.providers.breakers import Breakers
from consumers.state.base import Stop
from tests.support.jobs import NOW_MS, Bench, asked, read
from tests.support.virtual_time import virtually
from topology.lanes import BATCH, CRITICAL, LaneSpec

BODY = json.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi " * 100}]}).encode()
DONE = Answered(body=b"{}", model="m", provider="one")


ONE = Route(provider="one", model="m", name="m", account="one/m")
TWO = Route(provider="two", model="m2", name="m2", account="two/m2")


class Ground:
    """A gate with two accounts, each with 60 requests a minute."""

    def __init__(self, *routes: Route) -> None:
        self.loop = asyncio.get_running_loop()
        self._began_s = self.loop.time()
        caps = AccountCaps(requests=60, input_tokens=60_000, output_tokens=60_000)
        self.spec = BudgetSpec(accounts={"one/m": caps, "two/m2": caps})
        self.budgets = own_accounts(self.spec)
        self.routes = routes or (ONE,)
        self.told: list[tuple[str, Wait]] = []
        self.gate = BudgetGate(
            self.budgets,
            Breakers(),
            Estimates(first_output_tokens=512, first_bytes_per_token=3.5),
            spec=self.spec,
            now_ms=self.now_ms,
            rng=random.Random(1),
            on_wait=lambda job, wait: self.told.append((job.id, wait)),
        )

    def now_ms(self) -> int:
        return NOW_MS + round(1000 * (self.loop.time() - self._began_s))

    def job(self, lane: LaneSpec = CRITICAL, *, deadline_ms: int | None = None) -> Job:
        headers = {} if deadline_ms is None else {"x-lane-deadline-ms": deadline_ms}
        key = f"{lane.name}.shop.chat.eu"
        job = Bench().job(lane=lane, body=BODY, headers=headers, routing_key=key, user_id="shop", reply_to=None)
        return read(job, Chain(self.routes), now_ms=self.now_ms())

    async def spend(self, name: str, requests: int = 0) -> None:
        """Use the whole budget, and this many requests more."""
        account = self.budgets.turns(name).account
        for bucket in account.buckets:
            bucket.parts = [0.0, 0.0, 0.0]
            bucket.level = 0.0
        account.buckets[0].level = -requests

    async def enter(self, job: Job) -> Outcome | None:
        return await self.gate.enter(job, asked(job))


def story(tell: Callable[[Ground], Awaitable[None]], *routes: Route) -> None:
    async def told() -> None:
        await tell(Ground(*routes))

    virtually(told())


def test_a_request_within_the_budget_passes_with_its_route_and_an_estimated_reservation() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()

        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == ONE
        assert job.reserved.reservation.amounts == Amounts(1, pytest.approx(len(BODY) / 3.5), 5)  # max_tokens
        assert on.told == []

    story(tell)


def test_the_actual_usage_is_settled_and_the_rest_is_given_back() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        job.attempted = Attempted(started_ms=on.now_ms(), usage=Amounts(1, 7, 2))
        await on.gate.leave(job, asked(job), DONE)

        account = on.budgets.turns("one/m").account
        assert [bucket.burst - bucket.level for bucket in account.buckets] == [1, 7, 2]
        assert account.concurrency.running == 0

    story(tell)


def test_a_request_that_was_never_sent_gives_everything_back() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        await on.gate.leave(job, asked(job), None)

        assert [bucket.burst - bucket.level for bucket in on.budgets.turns("one/m").account.buckets] == [0, 0, 0]

    story(tell)


def test_the_usage_of_an_answer_is_the_estimate_for_the_next_request_of_its_kind() -> None:
    async def tell(on: Ground) -> None:
        first, second = on.job(), on.job()
        await on.enter(first)
        first.attempted = Attempted(started_ms=on.now_ms(), usage=Amounts(1, 50, 2))
        await on.gate.leave(first, asked(first), DONE)
        await on.enter(second)

        assert second.reserved is not None
        assert second.reserved.reservation.amounts == Amounts(1, pytest.approx(50), pytest.approx(3))

    story(tell)


def test_a_request_that_has_to_wait_keeps_its_place_and_has_the_reason() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=5)
        job, began_s = on.job(), on.loop.time()

        assert await on.enter(job) is None
        assert on.loop.time() - began_s >= 6
        assert [(request, wait.reason) for request, wait in on.told] == [(job.id, "rpm")]
        assert on.told[0][1].seconds == pytest.approx(on.loop.time() - began_s, rel=0.5)

    story(tell)


def test_a_request_that_cannot_start_before_its_deadline_is_refused_at_once_with_the_figures() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=100)
        began_s = on.loop.time()
        outcome = await on.enter(on.job(deadline_ms=30_000))

        assert on.loop.time() == began_s
        assert isinstance(outcome, Refused)
        assert outcome.problem.code == "deadline_exceeded"
        assert "30000 ms" in outcome.problem.detail
        assert "rpm of one/m" in outcome.problem.detail
        assert on.budgets.waiting() == {}

    story(tell)


def test_a_request_that_would_wait_too_long_with_its_delivery_is_deferred_with_the_reason() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=1000)
        began_s = on.loop.time()
        outcome = await on.enter(on.job(BATCH))

        assert on.loop.time() - began_s == pytest.approx(on.spec.hold_s)
        assert outcome == Deferred(delay_ms=1000, reason="rpm")
        assert on.budgets.waiting() == {}

    story(tell)


def test_waiting_for_one_account_does_not_delay_a_lanes_requests_for_another() -> None:
    async def tell(on: Ground) -> None:
        lane = replace(BATCH, slots=4)
        await on.spend("one/m", requests=1000)
        waiting = [asyncio.ensure_future(on.enter(on.job(lane))) for _ in range(3)]
        await asyncio.sleep(0)
        began_s = on.loop.time()
        last = on.job(lane)
        outcome = await on.enter(last)  # the fourth slot

        assert isinstance(outcome, Deferred)
        assert outcome.reason == "rpm"
        assert on.loop.time() - began_s < 1
        on.routes = (TWO,)
        assert await on.enter(on.job(lane)) is None
        assert [each.done() for each in waiting] == [False] * 3
        for each in waiting:
            each.cancel()

    story(tell)


def test_a_short_wait_limit_at_one_account_does_not_apply_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(on: Ground) -> None:
        lane, reserve = replace(BATCH, slots=2, target_wait_s=3.0), on.budgets.reserve
        await on.spend("one/m", requests=1)
        on.routes = (ONE,)
        standing = asyncio.ensure_future(on.enter(on.job(lane)))
        await asyncio.sleep(0)
        on.routes = (ONE, TWO)

        async def fails_at_first(account: str, **asked: Any) -> Reservation:
            if account == "one/m":
                asked["on_wait"](Wait(0.1, "rpm"))
                raise WaitTooLong(Wait(9.0, "rpm"))
            await asyncio.sleep(1)
            return await reserve(account, **asked)

        async def soon(*_: object, **__: object) -> Wait:
            return Wait(0.1, "rpm")

        monkeypatch.setattr(on.budgets, "reserve", fails_at_first)
        monkeypatch.setattr(on.budgets, "predicted_wait", soon)
        job = on.job(lane)

        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == TWO
        standing.cancel()

    story(tell)


def test_while_no_other_request_comes_the_pauses_between_deferrals_grow() -> None:
    async def tell(on: Ground) -> None:
        lane = replace(BATCH, slots=2)
        await on.spend("one/m", requests=10_000)
        waiting = asyncio.ensure_future(on.enter(on.job(lane)))
        await asyncio.sleep(0)
        took_s = []
        for _ in range(8):
            began_s = on.loop.time()
            assert isinstance(await on.enter(on.job(lane)), Deferred)
            took_s.append(on.loop.time() - began_s)

        assert took_s[:3] == [pytest.approx(each) for each in (0.25, 0.5, 1.0)]
        assert took_s[-1] == pytest.approx(15)
        waiting.cancel()

    story(tell)


def test_a_deferred_request_goes_before_later_ones() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m")
        back = on.job(BATCH)
        await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(on.enter(on.job(BATCH))) for _ in range(2)]
        await asyncio.sleep(0.01)
        back.hop = replace(back.hop, redelivered=True)
        first = asyncio.ensure_future(on.enter(back))
        await asyncio.wait((first, *others), return_when=asyncio.FIRST_COMPLETED)

        assert [each.done() for each in (first, *others)] == [True, False, False]
        for each in others:
            each.cancel()

    story(tell)


def test_a_paused_account_defers_requests_that_can_wait_and_refuses_others() -> None:
    async def tell(on: Ground) -> None:
        on.budgets.learn("one/m", Heard(kind=Kind.SPEND_LIMIT))
        waits = [await on.enter(on.job(BATCH)) for _ in range(50)]
        assert {each.reason for each in waits if isinstance(each, Deferred)} == {"paused"}
        delays = sorted(each.delay_ms for each in waits if isinstance(each, Deferred))
        assert (len(delays), delays[0] >= 900_000, delays[-1] <= 960_000) == (50, True, True)
        assert delays[1] - delays[0] > 50, "the first finds out before the next is back"
        assert isinstance(await on.enter(on.job(CRITICAL)), Refused)

    story(tell)


def test_a_request_goes_to_the_next_provider_if_the_wait_is_too_long_for_its_lane() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=30)
        job, began_s = on.job(), on.loop.time()

        assert await on.enter(job) is None
        assert on.loop.time() == began_s
        assert job.reserved is not None
        assert job.reserved.route == TWO
        assert job.reserved.reservation.account == "two/m2"
        assert "one/m" not in on.budgets.waiting()

    story(tell, ONE, TWO)


@pytest.mark.parametrize(("lane", "taken"), [(CRITICAL, TWO), (BATCH, ONE)])
def test_a_request_stays_with_its_provider_if_the_wait_is_short_for_its_lane(lane: LaneSpec, taken: Route) -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=5)
        job = on.job(lane)
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == taken

    story(tell, ONE, TWO)


def test_a_request_whose_call_could_not_end_before_its_deadline_is_refused_without_a_call() -> None:
    async def tell(on: Ground) -> None:
        known = on.job()
        assert await on.enter(known) is None
        known.attempted = Attempted(started_ms=on.now_ms(), run_ms=4000, usage=Amounts(1, 10, 10))
        await on.gate.leave(known, asked(known), Answered(body=b"{}", model="m", provider="one"))
        assert await on.enter(on.job(deadline_ms=3000)) is None, "what may begin at once may try"
        await on.spend("one/m", requests=5)

        refused = await on.enter(on.job(deadline_ms=9000))

        assert isinstance(refused, Refused)
        assert "its call may take 6000 ms" in refused.problem.detail
        assert await on.enter(on.job(deadline_ms=20_000)) is None

    story(tell)


def test_if_all_providers_have_long_waits_the_shortest_is_chosen() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=60)
        await on.spend("two/m2", requests=20)
        job = on.job()
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == TWO

    story(tell, ONE, TWO)


def test_a_paused_account_is_skipped() -> None:
    async def tell(on: Ground) -> None:
        on.budgets.learn("one/m", Heard(kind=Kind.SPEND_LIMIT))
        job = on.job()
        assert await on.enter(job) is None
        assert job.reserved is not None
        assert job.reserved.route == TWO

    story(tell, ONE, TWO)


def test_after_a_failed_call_the_reservation_moves_to_another_account_and_the_first_is_settled() -> None:
    async def tell(on: Ground) -> None:
        job = on.job()
        await on.enter(job)
        assert await on.gate.move(job, asked(job), TWO, Amounts(1))

        assert job.reserved is not None
        assert job.reserved.route == TWO
        assert job.reserved.reservation.account == "two/m2"
        spent = [bucket.burst - bucket.level for bucket in on.budgets.turns("one/m").account.buckets]
        assert spent == [1, 0, 0]  # the request is counted, its tokens are not

    story(tell, ONE, TWO)


def test_after_a_failed_call_without_budget_elsewhere_the_reservation_stays() -> None:
    async def tell(on: Ground) -> None:
        await on.spend("two/m2")
        job = on.job()
        await on.enter(job)
        kept = job.reserved
        assert not await on.gate.move(job, asked(job), TWO, None)

        assert job.reserved is kept
        assert on.budgets.waiting() == {}

    story(tell, ONE, TWO)


@pytest.mark.parametrize(("why", "outcome"), [(Stop.CANCELLED, Dropped), (Stop.FENCED, Deferred)])
def test_a_request_that_is_told_to_stop_ends_its_wait_for_the_budget(why: Stop, outcome: type) -> None:
    async def tell(on: Ground) -> None:
        await on.spend("one/m", requests=50)
        job, began_s = on.job(), on.loop.time()
        entering = asyncio.ensure_future(on.enter(job))
        await asyncio.sleep(3)
        job.stop(why)

        assert isinstance(await entering, outcome)
        assert on.loop.time() - began_s == pytest.approx(3)
        assert on.budgets.waiting() == {}

    story(tell)
