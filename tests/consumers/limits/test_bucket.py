"""When a lane may take from a bucket, and how long it waits."""

from hypothesis import given
from hypothesis import strategies as st

from consumers.limits.bucket import Bucket

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


def test_a_request_larger_than_can_ever_be_free_goes_when_the_bucket_is_full_and_no_higher_lane_waits() -> None:
    some = bucket()
    assert some.wait_s(BATCH, 9.0) == 0
    some.want(CRITICAL, 1.0)
    assert some.wait_s(BATCH, 9.0) > 0


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
