"""When a lane may take from a bucket, and how long it waits."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.limits.bucket import Bucket, flows_in_s

SHARES = (0.3, 0.2, 0.05)
CRITICAL, NORMAL, BATCH = 0, 1, 2


def bucket(per_minute: float = 60) -> Bucket:
    return Bucket(per_minute, per_minute / 6, shares=SHARES, now_s=0)


def test_a_lane_may_use_everything_except_the_reserves_of_higher_lanes() -> None:
    some = bucket()
    while some.wait_s(BATCH, 1) == 0:
        some.take(BATCH, 1)

    assert 5 <= some.level <= 6  # of ten: three are critical's reserve, two normal's
    assert some.wait_s(CRITICAL, 3) == some.wait_s(NORMAL, 2) == 0


def test_critical_may_use_everything_except_what_lower_lanes_have_saved() -> None:
    some = bucket()
    while some.wait_s(CRITICAL, 1) == 0:
        some.take(CRITICAL, 1)

    assert 2.5 <= some.level < 3.5
    assert some.wait_s(NORMAL, 2) == some.wait_s(BATCH, 0.5) == 0


def test_what_the_first_request_of_a_higher_lane_needs_is_kept_for_it() -> None:
    some = bucket()
    some.level, some.savings = 6.0, [0.0, 2.0, 0.5]
    assert some.wait_s(BATCH, 0.9) == 0
    some.want(CRITICAL, 4.0)

    assert some.wait_s(BATCH, 0.9) > 0
    assert some.wait_s(BATCH, 0.4) == 0  # critical has saved that much


def test_a_lane_saves_more_than_its_reserve_for_a_larger_request() -> None:
    some = bucket()
    some.level, some.savings = 0.0, [0.0, 0.0, 0.0]
    some.want(BATCH, 3.0)
    some.refill(70)

    assert some.savings[BATCH] == 3.0
    assert some.wait_s(BATCH, 3.0) == 0


def test_savings_for_a_request_that_left_its_line_go_as_slowly_as_they_came() -> None:
    some = bucket()
    some.want(BATCH, 5.0)
    some.savings[BATCH] = 4.5
    some.want(BATCH, 0)
    some.refill(10)

    assert some.savings[BATCH] == pytest.approx(4.0)
    some.refill(1000)
    assert some.savings[BATCH] == 0.5


def test_what_is_given_back_returns_to_the_lanes_savings_and_fills_the_bucket_no_further_than_its_size() -> None:
    some = bucket()
    own = some.take(NORMAL, 1.5)
    assert (own, some.level, some.savings[NORMAL]) == (1.5, 8.5, 0.5)
    some.give_back(NORMAL, 1.0, from_savings=own)
    assert (some.level, some.savings[NORMAL]) == (9.5, 1.5)
    some.give_back(NORMAL, 1.0, from_savings=own)
    assert (some.level, some.savings[NORMAL]) == (10.0, 2.0)


def test_a_request_larger_than_can_ever_be_free_goes_when_the_bucket_is_full_and_no_higher_lane_waits() -> None:
    some = bucket()
    assert some.wait_s(BATCH, 9.0) == 0
    some.want(CRITICAL, 1.0)
    assert some.wait_s(BATCH, 9.0) > 0


def test_savings_of_less_than_one_are_held_and_debts_are_not() -> None:
    some = bucket()
    some.savings = [0.0, 0.75, -0.25]
    assert [some.held(lane) for lane in (CRITICAL, NORMAL, BATCH)] == [0.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("per_s", "filling", "in_s"),
    [
        (10, [], 10),
        (0, [], inf),
        (10, [(4, 10)], 4 + 60 / 20),
        (10, [(10, 5)], 10),
        (10, [(11, 5)], 10),
        (0, [(5, 10)], 5 + 100 / 10),
        (10, [(4, 20), (2, 10)], 2 + 2 + 40 / 40),
    ],
)
def test_a_hundred_flow_in_faster_after_each_lane_that_has_saved_enough(
    per_s: float, filling: list[tuple[float, float]], in_s: float
) -> None:
    assert flows_in_s(100, per_s, filling) == in_s


@given(
    level=st.floats(0, 10),
    parts=st.tuples(st.floats(0, 3), st.floats(0, 2), st.floats(0, 0.5)),
    amount=st.floats(0.1, 20),
    lane=st.integers(0, 2),
    above=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_the_predicted_wait_is_just_long_enough(
    level: float, parts: tuple[float, ...], amount: float, lane: int, above: float
) -> None:
    some = bucket()
    some.level, some.savings = level, list(parts)
    if lane > CRITICAL:
        some.want(CRITICAL, above)
    some.want(lane, amount)
    in_s = some.wait_s(lane, amount)
    if in_s > 0.01:
        some.refill(in_s - 0.005)
        assert some.wait_s(lane, amount) > 0
    some.refill(in_s + 0.001)
    assert some.wait_s(lane, amount) == 0
