"""No request is refused as too late although it could start in time; the forecast for the first in line is exact."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Feedback, Kind
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import AccountCaps, BudgetSpec
from consumers.limits.waiter import Waiter
from tests.support.examples import examples
from tests.support.virtual_time import virtually

CAPS = AccountCaps(requests=60, input_tokens=6_000, output_tokens=600)
SPEC = BudgetSpec(accounts={"a": CAPS})
"""Buckets of 10 s: 1,000 input tokens, with reserves of 300, 200 and 50 for the lanes."""
CRITICAL, NORMAL, BATCH = range(3)


def new_account(spec: BudgetSpec = SPEC) -> Account:
    return Account("a", spec, now_s=0.0)


def tokens(amount: float) -> Amounts:
    return Amounts(0, amount, 0)


def starts_s(account: Account, waiter: Waiter, now_s: float) -> float:
    """After how many seconds it starts, if the account is woken as it asks."""
    began_s = now_s
    while waiter.reservation is None:
        found, in_s = account.turn(now_s)
        now_s += in_s if found is None else 0.0
    return now_s - began_s


@settings(max_examples=examples(200), deadline=None)
@given(
    lane=st.integers(0, 2),
    wanted=st.floats(1, 2_000),
    level=st.floats(0, 1_000),
    saved=st.tuples(*(st.floats(0, 1) for _ in range(3))),
)
def test_a_single_waiting_request_starts_when_predicted(
    lane: int, wanted: float, level: float, saved: tuple[float, ...]
) -> None:
    account = new_account()
    bucket = account.buckets[1]
    bucket.level = level
    bucket.savings = [min(level / 3, part * reserve) for part, reserve in zip(saved, bucket.reserves, strict=True)]
    waiter = Waiter(lane, tokens(wanted), arrived_s=0.0)
    account.join(waiter)

    found = forecast.of(account, waiter, 0.0)

    assert found.seconds == found.least_s == pytest.approx(starts_s(account, waiter, 0.0), abs=0.001)


def test_a_large_request_of_the_top_lane_is_not_refused_if_it_may_use_other_lanes_reserves() -> None:
    async def story() -> None:
        budgets = own_accounts(SPEC)
        filler = await budgets.reserve("a", lane="critical", amounts=tokens(400), until=None)
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        # 600 are left; it needs 700, and leaves more than is held for the others and for its own lane
        await budgets.reserve("a", lane="critical", amounts=tokens(700), until=began_s + 2)

        assert loop.time() - began_s == pytest.approx(1, abs=0.01)
        budgets.settle(filler, filler.amounts)

    virtually(story())


def test_a_request_that_can_start_only_with_a_full_bucket_is_not_refused() -> None:
    account = new_account()
    account.buckets[1].lower(900)
    waiter = Waiter(NORMAL, tokens(2_000), arrived_s=0.0)
    account.join(waiter)

    assert forecast.of(account, waiter, 0.0).least_s == pytest.approx(1)


def test_a_returning_request_does_not_wait_for_later_requests_of_other_processes() -> None:
    account = new_account()
    account.buckets[1].lower(0)
    account.waiting_elsewhere = [(0.0, 5_000.0 if lane == BATCH else 0.0, 0.0) for lane in range(len(account.lanes))]
    back, fresh = (Waiter(BATCH, tokens(10), arrived_s=arrived_s) for arrived_s in (-60.0, 0.0))
    account.join(back)
    account.join(fresh)

    assert forecast.of(account, back, 0.0).least_s < 3
    assert forecast.of(account, fresh, 0.0).least_s > 50


def test_a_higher_lane_that_waits_for_output_tokens_is_not_assumed_to_use_input_tokens_meanwhile() -> None:
    account = new_account()
    account.buckets[2].lower(0)
    for _ in range(100):
        account.join(Waiter(CRITICAL, Amounts(1, 50, 50), arrived_s=0.0))
    waiter = Waiter(NORMAL, tokens(250), arrived_s=0.0)
    account.join(waiter)

    assert forecast.of(account, waiter, 0.0).least_s == pytest.approx(starts_s(account, waiter, 0.0))


def test_the_forecast_of_the_first_request_does_not_include_requests_behind_it() -> None:
    account = new_account(BudgetSpec(accounts={"a": AccountCaps(concurrency=1)}))
    for number in range(100):
        account.join(Waiter(BATCH, Amounts(1, 1, 1), arrived_s=float(number), until_s=130.0))
    first, _ = account.turn(100.0)
    assert first is not None
    assert first.reservation is not None
    account.settle(first.reservation, None, 110.0)  # a call takes ten seconds
    running, _ = account.turn(110.0)
    head = account.lines.heads[BATCH]
    assert running is not None
    assert head is not None

    assert forecast.first(account, BATCH, head.amounts, 110.0).least_s == pytest.approx(10)
    refused = [waiter for waiter, _ in forecast.hopeless(account, 110.0)]
    assert head not in refused
    assert refused


def test_the_learned_concurrency_after_an_overload_refuses_no_request() -> None:
    account = new_account(BudgetSpec(accounts={"a": CAPS}))
    account.join(Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=0.0))
    running, _ = account.turn(0.0)
    assert running is not None
    account.concurrency.call_s = 30.0
    for number in range(5):
        account.learn(Feedback(kind=Kind.OVERLOADED), float(number))
    assert account.concurrency.is_full
    waiter = Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=5.0, until_s=10.0)
    account.join(waiter)

    found = forecast.of(account, waiter, 5.0)

    assert (found.reason, found.is_known, found.least_s) == ("concurrency", False, 0.0)
    assert found.seconds > 5


def test_a_lane_saves_for_a_request_only_from_its_arrival_on() -> None:
    async def story() -> None:
        budgets = own_accounts(SPEC)
        loop = asyncio.get_running_loop()
        full = await budgets.reserve("a", lane="critical", amounts=tokens(1_000), until=None)
        budgets.settle(full, full.amounts)
        await asyncio.sleep(3)
        began_s = loop.time()

        # 50 are saved, the reserve, and 5 a second from now on; beside it 500 must be left, of which 300 are there
        await budgets.reserve("a", lane="batch", amounts=tokens(65), until=None)

        assert loop.time() - began_s == pytest.approx(2.65, abs=0.01)

    virtually(story())
