"""No request is refused as too late although it could start in time; the forecast for the first in line is exact."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers.limits import forecast
from consumers.limits.account import Account, Waiter
from consumers.limits.base import AccountCaps, Amounts, BudgetSpec
from consumers.limits.budgets import own_budgets
from tests.support.budget import with_buckets_of
from tests.support.examples import examples
from tests.support.virtual_time import virtually

pytestmark = pytest.mark.slow

CAPS = AccountCaps(requests=60, input_tokens=6_000, output_tokens=600)
SPEC = BudgetSpec(accounts={"a": CAPS})
"""Buckets of 10 s: 1,000 input tokens, with reserves of 300, 200 and 50 for the lanes."""
CRITICAL, NORMAL, BATCH = range(3)


def new_account(spec: BudgetSpec = SPEC) -> Account:
    return with_buckets_of(10, Account("a", spec, now_s=0.0))


def tokens(amount: float) -> Amounts:
    return Amounts(0, amount, 0)


def starts_s(account: Account, waiter: Waiter, now_s: float) -> float:
    """After how many seconds it starts, if the account is woken as it asks."""
    began_s = now_s
    while waiter.reservation is None:
        found, in_s = account.grant_next(now_s)
        now_s += in_s if found is None else 0.0
    return now_s - began_s


@settings(max_examples=examples(200), deadline=None)
@given(
    lane=st.integers(0, 2),
    wanted=st.floats(1, 2_000),
    level=st.floats(0, 1_000),
    saved=st.tuples(*(st.floats(0, 1) for _ in range(3))),
)
@example(lane=NORMAL, wanted=600, level=450, saved=(0, 0, 0.8)).via("batch has saved its reserve after 2 s")
@example(lane=CRITICAL, wanted=300, level=150, saved=(0, 0, 0.8)).via("batch after 2 s, normal after 10 s")
@example(lane=NORMAL, wanted=10, level=0, saved=(0, -0.5, 0)).via("the lane has a debt")
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

    assert found.seconds == pytest.approx(starts_s(account, waiter, 0.0), abs=0.001)


def test_a_large_request_of_the_top_lane_is_not_refused_if_it_may_use_other_lanes_reserves() -> None:
    async def story() -> None:
        budgets = own_budgets(SPEC)
        with_buckets_of(10, budgets.queue("a").account)
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

    assert forecast.of(account, waiter, 0.0).seconds == pytest.approx(1)


@pytest.mark.parametrize(("spec", "is_known"), [(BudgetSpec(), False), (SPEC, True)])
def test_a_wait_for_a_limit_that_is_only_assumed_is_told_as_not_known_and_refuses_no_request(
    spec: BudgetSpec, is_known: bool
) -> None:
    account = new_account(spec)
    account.buckets[1].lower(0)

    found = forecast.wait(account, NORMAL, tokens(100), 0.0)

    assert (found.reason, found.is_known, found.seconds > 0) == ("itpm", is_known, True)
    assert found.is_too_late(0.0, 0.1) is is_known
