"""When concurrency is the bottleneck each lane has its share of the calls, whatever lanes above it ask for."""

import pytest

from consumers.limits.account import Account
from consumers.limits.base import Amounts
from consumers.limits.concurrency import Concurrency
from consumers.limits.lines import Waiter
from consumers.limits.spec import AccountCaps, BudgetSpec

SHARES = (0.5, 0.25, 0.125)
CRITICAL, NORMAL, BATCH = 0, 1, 2
ALL = [Waiter(lane, Amounts(1, 1, 1), arrived_s=0.0) for lane in range(3)]


def due(credit: Concurrency) -> list[bool]:
    return [credit.is_due(lane) for lane in range(3)]


def test_a_lane_is_due_after_as_many_calls_as_follow_from_its_share() -> None:
    credit = Concurrency(1, SHARES)
    seen = [due(credit)]
    for _ in range(8):
        credit.begin(CRITICAL, [None, *ALL[1:]])
        seen.append(due(credit))

    assert [each[NORMAL] for each in seen] == [False] * 4 + [True] * 5
    assert [each[BATCH] for each in seen] == [False] * 8 + [True]
    assert not any(each[CRITICAL] for each in seen)  # it does not wait


def test_a_lane_saves_credit_for_at_most_one_call_which_its_call_uses_up() -> None:
    credit = Concurrency(1, SHARES)
    for _ in range(40):
        credit.begin(CRITICAL, [None, *ALL[1:]])
    credit.begin(NORMAL, [None, None, ALL[BATCH]])

    assert due(credit) == [False, False, True]
    for _ in range(3):
        credit.begin(CRITICAL, [None, ALL[NORMAL], None])
    assert not credit.is_due(NORMAL)
    credit.begin(CRITICAL, [None, ALL[NORMAL], None])
    assert credit.is_due(NORMAL)


def test_a_call_of_a_lane_without_enough_credit_uses_none() -> None:
    credit = Concurrency(1, SHARES)
    for _ in range(4):
        credit.begin(NORMAL, ALL)

    assert credit.is_due(NORMAL)


def test_the_more_credit_a_lane_has_the_fewer_calls_begin_before_its_request() -> None:
    credit = Concurrency(1, SHARES)

    assert [credit.calls_before(NORMAL, count) for count in (0, 1, 2)] == [5, 9, 13]
    credit.begin(CRITICAL, ALL)
    assert credit.calls_before(NORMAL, 0) == 4
    assert credit.calls_before(CRITICAL, 0) == 2


@pytest.mark.parametrize("concurrency", [1, None])
def test_a_lane_goes_first_by_its_credit_only_while_calls_are_limited_and_it_has_a_request(
    concurrency: int | None,
) -> None:
    account = Account("a", BudgetSpec(accounts={"a": AccountCaps(concurrency=concurrency)}), now_s=0.0)
    for number in range(100):
        account.join(Waiter(CRITICAL, Amounts(1, 1, 1), arrived_s=float(number)))
    first = Waiter(NORMAL, Amounts(1, 1, 1), arrived_s=0.0)
    account.join(first)
    assert account.due_for_a_call() == [False, False, False]

    for _ in range(8):
        waiter, _ = account.grant_next(0.0)
        if waiter is first or account.due_for_a_call()[NORMAL]:
            break
        assert waiter is not None
        assert waiter.reservation is not None
        account.settle(waiter.reservation, None, 0.0)

    assert account.due_for_a_call() == [False, concurrency is not None, False]
    account.leave(first)
    assert account.due_for_a_call() == [False, False, False]
