"""No request is refused as too late although it could start in time; the forecast for the first in line is exact."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers.limits import forecast
from consumers.limits.account import Account, Waiter
from consumers.limits.base import NOTHING, AccountCaps, Amounts, BudgetSpec, Reservation, Wait
from consumers.limits.budgets import own_budgets
from tests.support.budget import with_buckets_of
from tests.support.examples import examples
from tests.support.virtual_time import virtually

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


@pytest.mark.parametrize("is_here", [True, False])
def test_a_lane_below_with_waiting_requests_saves_on_when_its_reserve_is_full(is_here: bool) -> None:
    account = new_account()
    account.buckets[1].level, account.buckets[1].savings = 150, [0.0, 0.0, 40.0]
    if is_here:
        account.join(Waiter(BATCH, tokens(60), arrived_s=0.0))
    else:
        account.waiting_elsewhere = [NOTHING, NOTHING, (1.0, 1.0, 1.0)]
    waiter = Waiter(CRITICAL, tokens(300), arrived_s=0.0)
    account.join(waiter)

    # 300 and the savings of 40 must be there; of 100 a second normal saves 20 and batch 5
    assert forecast.of(account, waiter, 0.0).seconds == pytest.approx(190 / 75)
    assert not is_here or starts_s(account, waiter, 0.0) == pytest.approx(190 / 75)


def test_a_request_that_may_start_at_the_last_moment_is_not_hopeless() -> None:
    for lane in (CRITICAL, NORMAL, BATCH):
        account = new_account()
        account.buckets[1].lower(0)
        waiter = Waiter(lane, tokens(200), arrived_s=0.0)
        account.join(waiter)
        waiter.until_s = forecast.first(account, lane, waiter.amounts, 0.0).seconds

        assert list(forecast.hopeless(account, 0.0)) == []


def test_for_each_call_before_it_a_request_waits_one_call_longer() -> None:
    account = new_account(BudgetSpec(accounts={"a": AccountCaps(concurrency=1)}))
    account.calls.call_s = 10.0
    account.calls.begin(Reservation(account="a", lane="critical", amounts=NOTHING), CRITICAL, ())
    waiters = [Waiter(BATCH, Amounts(1, 1, 1), arrived_s=float(each), until_s=10.0 * each + 15) for each in range(3)]
    for waiter in waiters:
        account.join(waiter)

    assert [forecast.of(account, waiter, 3.0).seconds for waiter in waiters] == [10, 20, 30]
    assert forecast.first(account, BATCH, Amounts(1, 1, 1), 3.0).seconds == 10
    assert list(forecast.hopeless(account, 3.0)) == []
    assert [waiter for waiter, _ in forecast.hopeless(account, 20.0)] == waiters[:2], "the third takes their place"


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


def test_at_best_those_before_use_what_other_lanes_leave_and_a_request_its_lanes_savings() -> None:
    account = new_account()
    account.buckets[1].lower(0)
    for amount in (30, 20):
        waiter = Waiter(BATCH, tokens(amount), arrived_s=0.0)
        account.join(waiter)

    found = forecast.of(account, waiter, 0.0)

    assert found.seconds == pytest.approx(30 / 100 + 20 / 5)


def test_a_new_request_is_behind_those_of_its_lane_here_and_in_other_processes() -> None:
    account = new_account()
    account.buckets[1].lower(0)
    account.join(Waiter(BATCH, tokens(30), arrived_s=0.0))
    account.waiting_elsewhere = [NOTHING, NOTHING, (0.0, 10.0, 0.0)]

    assert forecast.wait(account, BATCH, tokens(20), 0.0).seconds == pytest.approx(40 / 100 + 20 / 5)


def test_a_request_that_can_start_only_with_a_full_bucket_is_not_refused() -> None:
    account = new_account()
    account.buckets[1].lower(900)
    waiter = Waiter(NORMAL, tokens(2_000), arrived_s=0.0)
    account.join(waiter)

    assert forecast.of(account, waiter, 0.0).seconds == pytest.approx(1)


def test_requests_that_will_surely_be_too_late_are_found_in_each_lane() -> None:
    for lane in (CRITICAL, NORMAL, BATCH):
        account = new_account()
        account.buckets[1].lower(0)
        late, in_time = (Waiter(lane, tokens(200), arrived_s=0.0, until_s=until_s) for until_s in (0.1, 60.0))
        account.join(late)
        account.join(in_time)

        assert [waiter for waiter, _ in forecast.hopeless(account, 0.0)] == [late]


def test_a_forecast_counts_what_has_flowed_in_until_now() -> None:
    def waits_s(now_s: float) -> list[float]:
        found = []
        for kind in range(3):
            account = new_account()
            account.buckets[1].lower(0)
            waiter = Waiter(CRITICAL, tokens(900), arrived_s=0.0, until_s=1.0)
            account.join(waiter)
            if kind == 0:
                wait = forecast.of(account, waiter, now_s)
            elif kind == 1:
                wait = forecast.first(account, CRITICAL, waiter.amounts, now_s)
            else:
                ((_, wait),) = forecast.hopeless(account, now_s)
            found.append(wait.seconds)
        return found

    assert waits_s(3.0) == [pytest.approx(each - 3.0) for each in waits_s(0.0)]


def test_a_higher_lane_that_waits_for_output_tokens_is_not_assumed_to_use_input_tokens_meanwhile() -> None:
    account = new_account()
    account.buckets[2].lower(0)
    for _ in range(100):
        account.join(Waiter(CRITICAL, Amounts(1, 50, 50), arrived_s=0.0))
    waiter = Waiter(NORMAL, tokens(250), arrived_s=0.0)
    account.join(waiter)

    assert forecast.of(account, waiter, 0.0).seconds == pytest.approx(starts_s(account, waiter, 0.0))


def test_a_lane_saves_for_a_request_only_from_its_arrival_on() -> None:
    async def story() -> None:
        budgets = own_budgets(SPEC)
        with_buckets_of(10, budgets.queue("a").account)
        loop = asyncio.get_running_loop()
        full = await budgets.reserve("a", lane="critical", amounts=tokens(1_000), until=None)
        budgets.settle(full, full.amounts)
        await asyncio.sleep(3)
        began_s = loop.time()

        # 50 are saved, the reserve, and 5 a second from now on; beside it 500 must be left, of which 300 are there
        await budgets.reserve("a", lane="batch", amounts=tokens(65), until=None)

        assert loop.time() - began_s == pytest.approx(2.65, abs=0.01)

    virtually(story())


@pytest.mark.parametrize(("spec", "is_known"), [(BudgetSpec(), False), (SPEC, True)])
def test_a_wait_for_a_limit_that_is_only_assumed_is_told_as_not_known_and_refuses_no_request(
    spec: BudgetSpec, is_known: bool
) -> None:
    account = new_account(spec)
    account.buckets[1].lower(0)

    found = forecast.wait(account, NORMAL, tokens(100), 0.0)

    assert (found.reason, found.is_known, found.seconds > 0) == ("itpm", is_known, True)
    assert found.is_too_late(0.0, 0.1) is is_known


def test_a_request_that_need_not_wait_has_a_known_wait_of_nothing() -> None:
    assert forecast.wait(new_account(BudgetSpec()), NORMAL, tokens(1), 0.0) == Wait(0.0, "rpm")


def test_of_calls_those_that_are_not_hopeless_come_before_the_next_one() -> None:
    account = new_account(BudgetSpec(accounts={"a": AccountCaps(concurrency=1)}))
    account.calls.call_s = 10.0
    account.calls.begin(Reservation(account="a", lane="critical", amounts=NOTHING), CRITICAL, ())
    waiters = [Waiter(BATCH, Amounts(1, 1, 1), arrived_s=0.0, until_s=until_s) for until_s in (100.0, 100.0, 25.0)]
    for waiter in waiters:
        account.join(waiter)

    assert [waiter for waiter, _ in forecast.hopeless(account, 3.0)] == waiters[2:]


@pytest.mark.parametrize(("needs", "ahead"), [((0, 0, 10), None), ((1, 0, 10), (0, 10, 10)), ((0, 10, 10), None)])
def test_a_request_waits_for_a_bucket_in_debt_only_if_it_or_one_before_it_needs_something_of_it(
    needs: tuple[float, float, float], ahead: tuple[float, float, float] | None
) -> None:
    account = new_account()
    account.buckets[1].level = -500
    if ahead is not None:
        account.waiting_elsewhere = [Amounts(*ahead), NOTHING, NOTHING]

    found = forecast.wait(account, CRITICAL, Amounts(*needs), 0.0)

    assert (found.reason, found.seconds > 4) == (("rpm", False) if needs == (0, 0, 10) else ("itpm", True))


def test_if_nothing_must_flow_in_for_those_before_it_a_request_waits_only_for_its_own_part() -> None:
    account = new_account()
    account.buckets[1].level, account.buckets[1].savings = 100, [0.0, 0.0, 0.0]
    account.join(Waiter(BATCH, tokens(30), arrived_s=0.0))

    assert forecast.wait(account, BATCH, tokens(20), 0.0).seconds == pytest.approx(20 / 5)
