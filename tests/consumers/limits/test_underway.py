"""Calls under way explain a refusal only if what they may hold can be as much as was missing."""

import pytest

from consumers.limits.base import Amounts, Reservation
from consumers.limits.running_calls import RunningCalls


def call(tokens: float) -> Reservation:
    return Reservation(account="a", lane="critical", amounts=Amounts(1, tokens, 5), at_s=7.0)


def running(*calls: Reservation) -> RunningCalls:
    some = RunningCalls()
    for each in calls:
        some.begin(each)
    return some


def test_the_largest_call_may_have_needed_half_more_input_than_was_reserved() -> None:
    some = running(call(100), call(40))

    assert some.needs(149)
    assert not some.needs(150)


def test_without_calls_nothing_explains_a_refusal() -> None:
    ended = call(100)
    some = running(ended)
    some.end(ended)

    assert not some.needs(0)
    assert not some.needs(0.5)
    assert not some.hold(0.1, 0.0)


@pytest.mark.parametrize(("missing", "explained"), [(-1, False), (0, False), (0.5, True), (75, True), (75.1, False)])
def test_calls_hold_up_to_half_of_their_input_in_addition(missing: float, explained: bool) -> None:
    assert running(call(100), call(50)).hold(missing, 0.0) == explained


def test_what_was_missing_is_reserved_by_the_calls_in_proportion() -> None:
    large, small = call(100), call(50)
    running(large, small).hold(30, 0.0)

    assert large.amounts == pytest.approx((1, 120, 5))
    assert small.amounts == pytest.approx((1, 60, 5))


def test_held_input_explains_one_wave_of_refusals_a_minute() -> None:
    some = running(call(1_000_000))

    at_s = (1000.0, 1000.5, 1004.9, 1005.0, 1060.0, 1060.1)
    assert [some.hold(1, each) for each in at_s] == [True, True, True, False, False, True]


def test_when_the_clock_jumps_the_wave_and_the_beginnings_jump_with_it() -> None:
    one = call(1_000_000)
    some = running(one)
    some.hold(1, 1000.0)
    some.shift(-500.0)

    assert one.at_s == -493.0
    assert [some.hold(1, each) for each in (504.0, 506.0)] == [True, False]
