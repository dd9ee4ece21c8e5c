"""No request is refused as too late that would have been in time; the forecast for the first in line is exact."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Kind
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import AccountCaps, BudgetSpec
from consumers.limits.waiter import Waiter
from tests.support.examples import examples
from tests.support.virtual_time import virtually

CAPS = AccountCaps(requests=60, input_tokens=6_000, output_tokens=600)
SPEC = BudgetSpec(accounts={"a": CAPS})
"""Buckets of 10 s: 1,000 input tokens, of which 300, 200 and 50 are the lanes' reserves."""
CRITICAL, NORMAL, BATCH = range(3)


def new_account(spec: BudgetSpec = SPEC) -> Account:
    return Account("a", spec, now_s=0.0)


def tokens(amount: float) -> Amounts:
    return Amounts(0, amount, 0)


def starts_s(account: Account, waiter: Waiter, now_s: float) -> float:
    """In how many seconds, woken as the account says."""
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
def test_the_only_one_in_line_begins_when_it_was_predicted(
    lane: int, wanted: float, level: float, saved: tuple[float, ...]
) -> None:
    account = new_account()
    bucket = account.buckets[1]
    bucket.level = level
    bucket.parts = [min(level / 3, part * reserve) for part, reserve in zip(saved, bucket.reserves, strict=True)]
    waiter = Waiter(lane, tokens(wanted), arrived_s=0.0)
    account.join(waiter)

    found = forecast.of(account, waiter, 0.0)

    assert found.seconds == found.least_s == pytest.approx(starts_s(account, waiter, 0.0), abs=0.001)


def test_a_large_request_of_the_top_lane_is_not_refused_that_may_take_what_is_held_for_others() -> None:
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


def test_what_is_larger_than_could_ever_be_left_is_not_refused_that_begins_when_the_bucket_is_full() -> None:
    account = new_account()
    account.buckets[1].lower(900)
    waiter = Waiter(NORMAL, tokens(2_000), arrived_s=0.0)
    account.join(waiter)

    assert forecast.of(account, waiter, 0.0).least_s == pytest.approx(1)


def test_what_comes_back_is_not_told_to_wait_for_those_of_other_processes_that_came_later() -> None:
    account = new_account()
    account.buckets[1].lower(0)
    account.elsewhere[BATCH] = (0.0, 5_000.0, 0.0)
    back, fresh = (Waiter(BATCH, tokens(10), arrived_s=arrived_s) for arrived_s in (-60.0, 0.0))
    account.join(back)
    account.join(fresh)

    assert forecast.of(account, back, 0.0).least_s < 3
    assert forecast.of(account, fresh, 0.0).least_s > 50


def test_a_lane_above_that_waits_for_output_is_not_thought_to_take_the_input_meanwhile() -> None:
    account = new_account()
    account.buckets[2].lower(0)
    for _ in range(100):
        account.join(Waiter(CRITICAL, Amounts(1, 50, 50), arrived_s=0.0))
    waiter = Waiter(NORMAL, tokens(250), arrived_s=0.0)
    account.join(waiter)

    assert forecast.of(account, waiter, 0.0).least_s == pytest.approx(starts_s(account, waiter, 0.0))


def test_where_calls_are_short_the_first_does_not_wait_for_those_behind_it() -> None:
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


def test_how_many_calls_run_at_once_after_an_overload_is_a_guess_and_refuses_nobody() -> None:
    account = new_account(BudgetSpec(accounts={"a": CAPS}))
    account.join(Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=0.0))
    running, _ = account.turn(0.0)
    assert running is not None
    account.concurrency.call_s = 30.0
    for number in range(5):
        account.learn(Heard(kind=Kind.OVERLOADED), float(number))
    assert account.concurrency.is_full
    waiter = Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=5.0, until_s=10.0)
    account.join(waiter)

    found = forecast.of(account, waiter, 5.0)

    assert (found.reason, found.is_known, found.least_s) == ("concurrency", False, 0.0)
    assert found.seconds > 5


def test_a_lane_saves_for_its_request_from_when_that_comes() -> None:
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
