"""The requests in line: their places and sums. Time is passed in."""

from consumers.limits.base import Amounts
from consumers.limits.lines import Lines, Waiter


def waiter(lane: int, arrived_s: float, *, tokens: float = 10, until_s: float | None = None) -> Waiter:
    return Waiter(lane, Amounts(1, tokens, 2), arrived_s=arrived_s, until_s=until_s)


def lines(*waiters: Waiter) -> Lines:
    made = Lines(4)
    for each in waiters:
        made.join(each)
    return made


def test_requests_of_a_lane_stand_by_arrival_and_then_in_the_order_of_joining() -> None:
    late, first, second, early = waiter(1, 9), waiter(1, 5), waiter(1, 5), waiter(1, 3)
    some = lines(late)
    assert [some.join(each) for each in (first, second, early)] == [True, False, True]

    assert list(some) == [early, first, second, late]
    assert some.heads == [None, early, None, None]
    assert some.firsts(1, 2) == [early, first]
    assert (len(some), some.count(1), some.count(0), some.is_empty) == (4, 4, 0, False)


def test_only_when_the_first_one_leaves_does_the_next_become_the_first_of_its_lane() -> None:
    first, second, stranger = waiter(1, 5), waiter(1, 6), waiter(1, 5.5)
    third = waiter(1, 7)
    some = lines(first, second, third)

    assert not some.leave(stranger)
    assert len(some) == 3
    assert not some.leave(third)
    assert some.leave(first)
    assert some.heads[1] is second
    assert first not in some
    assert second in some
    assert some.leave(second)
    assert some.is_empty
    assert not some.leave(second)


def test_what_a_lane_needs_is_the_sum_of_its_waiting_requests() -> None:
    first, second, third = waiter(1, 1, tokens=0.1), waiter(1, 2, tokens=0.2), waiter(1, 3, tokens=0.3)
    some = lines(first, second, third, waiter(2, 0, tokens=99))

    assert some.sums(1) == [3.0, 0.1 + 0.2 + 0.3, 6.0]
    some.leave(second)
    assert some.sums(1)[0] == 2.0
    some.leave(first)
    some.leave(third)
    assert some.sums(1) == [0.0, 0.0, 0.0]


def test_the_requests_before_one_are_summed_wherever_it_is_in_line() -> None:
    first, second, third = waiter(1, 1, tokens=10), waiter(1, 2, tokens=20), waiter(1, 3, tokens=40)
    some = lines(first, second, third)

    assert some.before(first) == ([0.0, 0.0, 0.0], 0)
    assert some.before(second) == ([1.0, 10.0, 2.0], 1)
    assert some.before(third) == ([2.0, 30.0, 4.0], 2)


def test_when_the_clock_jumps_arrivals_and_ends_jump_with_it() -> None:
    bounded, unbounded = waiter(1, 5.0, until_s=20.0), waiter(1, 6.0)
    some = lines(bounded, unbounded)
    some.shift(100.0)

    assert (bounded.arrived_s, bounded.until_s) == (105.0, 120.0)
    assert (unbounded.arrived_s, unbounded.until_s) == (106.0, None)
    assert bounded in some
