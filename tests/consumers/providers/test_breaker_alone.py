"""One breaker, without those who ask it: when it opens, for how long, and whose probe closes it. Time is passed in."""

import random

import pytest

from consumers.providers.breaker import Breaker, Failure, State


def breaker() -> Breaker:
    return Breaker(random.Random(3))


def failed(some: Breaker, count: int, *, at_s: float = 0.0, requests: int = 3, is_unreached: bool = False) -> State:
    for each in range(count):
        some.failed(Failure(at_s, f"r-{each % requests}", is_unreached), probe=False)
    return some.state


def test_at_first_it_lets_every_call_through() -> None:
    some = breaker()
    assert (some.state, some.wait_s(0.0), some.is_doubted) == (State.CLOSED, 0.0, False)


@pytest.mark.parametrize(("count", "state"), [(9, State.CLOSED), (10, State.OPEN)])
def test_ten_failures_open_it(count: int, state: State) -> None:
    assert failed(breaker(), count) is state


@pytest.mark.parametrize(("requests", "state"), [(2, State.CLOSED), (3, State.OPEN)])
def test_failures_of_two_requests_alone_do_not_open_it(requests: int, state: State) -> None:
    assert failed(breaker(), 30, requests=requests) is state


def test_three_failures_to_connect_in_a_row_open_it_even_those_of_one_request() -> None:
    assert failed(breaker(), 2, requests=1, is_unreached=True) is State.CLOSED
    assert failed(breaker(), 3, requests=1, is_unreached=True) is State.OPEN
    mixed = breaker()
    failed(mixed, 2, is_unreached=True)
    failed(mixed, 1)
    assert failed(mixed, 2, is_unreached=True) is State.CLOSED
    assert failed(mixed, 1, is_unreached=True) is State.OPEN


@pytest.mark.parametrize(("later_s", "state"), [(120.0, State.OPEN), (120.1, State.CLOSED)])
def test_failures_of_more_than_two_minutes_ago_do_not_count(later_s: float, state: State) -> None:
    some = breaker()
    failed(some, 5, at_s=50.0)
    assert failed(some, 5, at_s=50.0 + later_s) is state


@pytest.mark.parametrize(("count", "doubted"), [(2, False), (3, True), (9, True), (10, False)])
def test_it_is_doubted_from_three_failures_on_until_it_opens(count: int, doubted: bool) -> None:
    some = breaker()
    failed(some, count)
    assert some.is_doubted == doubted


def test_each_time_it_opens_for_twice_as_long_up_to_five_seconds() -> None:
    waits: list[list[float]] = []
    for seed in range(200):
        some = Breaker(random.Random(seed))
        waits.append([])
        for at_s in range(0, 700, 100):
            some.open(at_s)
            waits[-1].append(some.wait_s(at_s))

    for each, most_s in zip(zip(*waits, strict=True), (1, 2, 4, 5, 5, 5, 5), strict=True):
        assert most_s / 2 <= min(each) < 0.52 * most_s
        assert 0.98 * most_s < max(each) <= most_s


def test_it_has_been_down_since_it_first_opened() -> None:
    some = breaker()
    some.open(7.0)
    some.open(12.0)
    assert some.down_since_s == 7.0


def test_its_wait_falls_with_time_and_is_never_less_than_nothing() -> None:
    some = breaker()
    some.open(100.0)
    wait_s = some.wait_s(100.0)
    assert some.wait_s(100.0 + wait_s / 2) == pytest.approx(wait_s / 2)
    assert some.wait_s(200.0) == 0.0


def test_while_one_call_probes_the_others_look_again_within_a_second() -> None:
    some = breaker()
    some.open(100.0)
    assert some.probe(110.0) == 30.0
    assert [some.wait_s(each) for each in (110.0, 139.0, 139.75, 140.0, 150.0)] == [1.0, 1.0, 0.25, 0.0, 0.0]


def test_only_a_failure_of_the_probe_opens_it_again() -> None:
    some = breaker()
    some.open(100.0)
    some.probe(110.0)
    some.failed(Failure(111.0, "other", True), probe=False)
    after_another = some.state
    some.failed(Failure(112.0, "probe", False), probe=True)
    assert (after_another, some.state) == (State.PROBING, State.OPEN)
    assert some.wait_s(112.0) >= 1.0


def test_a_late_failure_does_not_lengthen_an_open_breaker() -> None:
    some = breaker()
    some.open(100.0)
    before = some.wait_s(100.0)
    some.failed(Failure(100.5, "late", True), probe=True)
    assert some.wait_s(100.0) == before


def test_after_a_probe_without_a_result_the_next_call_is_the_probe_at_once() -> None:
    some = breaker()
    some.open(100.0)
    some.probe(110.0)
    some.unknown(111.0, probe=False)
    assert some.state is State.PROBING
    some.unknown(111.0, probe=True)
    assert (some.state, some.wait_s(111.0)) == (State.OPEN, 0.0)


def test_a_closed_breaker_stays_closed_when_a_call_ends_without_a_result() -> None:
    some = breaker()
    some.unknown(5.0, probe=True)
    assert some.state is State.CLOSED
