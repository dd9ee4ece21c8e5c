"""The parts of the budget, each alone: pure functions, with time passed in."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.limits import headers
from consumers.limits.adaptive import Adaptive
from consumers.limits.base import Amounts
from consumers.limits.bucket import Bucket
from consumers.limits.burst import Size
from consumers.limits.concurrency import REGAIN_S, Concurrency
from consumers.limits.estimates import Estimates, UsageClass, task_of
from consumers.limits.headers import BucketHeaders, RateHeaders
from consumers.limits.spec import AccountCaps

SHARES = (0.3, 0.2, 0.05)
CRITICAL, NORMAL, BATCH = 0, 1, 2
NOW_S = 1_790_000_000.0
SOON = "2026-09-21T14:13:30Z"


def bucket(per_minute: float = 60) -> Bucket:
    return Bucket(per_minute, Size(10, 0.0), shares=SHARES, now_s=0)


# ---- buckets ---------------------------------------------------------------------------------------------------------


def wait_s(some: Bucket, lane: int, amount: float) -> float:
    return some.wait_s(lane, amount)


def test_a_lane_may_use_everything_except_the_reserves_of_higher_lanes() -> None:
    some = bucket()
    while wait_s(some, BATCH, 1) == 0:
        some.take(BATCH, 1)

    assert 5 <= some.level <= 6  # of ten: three are critical's reserve, two normal's
    assert wait_s(some, CRITICAL, 3) == wait_s(some, NORMAL, 2) == 0


def test_critical_may_use_everything_except_what_lower_lanes_have_saved() -> None:
    some = bucket()
    while wait_s(some, CRITICAL, 1) == 0:
        some.take(CRITICAL, 1)

    assert 2.5 <= some.level < 3.5
    assert wait_s(some, NORMAL, 2) == wait_s(some, BATCH, 0.5) == 0


def test_what_the_first_request_of_a_higher_lane_needs_is_kept_for_it() -> None:
    some = bucket()
    some.level, some.savings = 6.0, [0.0, 2.0, 0.5]
    assert wait_s(some, BATCH, 0.9) == 0
    some.want(CRITICAL, 4.0)

    assert wait_s(some, BATCH, 0.9) > 0
    assert wait_s(some, BATCH, 0.4) == 0  # critical has saved that much


def test_a_lane_saves_more_than_its_reserve_for_a_larger_request() -> None:
    some = bucket()
    some.level, some.savings = 0.0, [0.0, 0.0, 0.0]
    some.want(BATCH, 3.0)
    some.refill(70)

    assert some.savings[BATCH] == 3.0
    assert wait_s(some, BATCH, 3.0) == 0


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
    assert wait_s(some, BATCH, 9.0) == 0
    some.want(CRITICAL, 1.0)
    assert wait_s(some, BATCH, 9.0) > 0


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
    in_s = wait_s(some, lane, amount)
    if in_s > 0.01:
        some.refill(in_s - 0.005)
        assert wait_s(some, lane, amount) > 0
    some.refill(in_s + 0.001)
    assert wait_s(some, lane, amount) == 0


# ---- headers ---------------------------------------------------------------------------------------------------------


def test_limits_and_remaining_amounts_are_read_from_response_headers() -> None:
    found = headers.read(
        {
            "anthropic-ratelimit-requests-limit": "1000",
            "anthropic-ratelimit-requests-remaining": "999",
            "anthropic-ratelimit-requests-reset": SOON,
            "anthropic-ratelimit-input-tokens-limit": "2000000",
            "anthropic-ratelimit-output-tokens-remaining": "17000",
        },
        now_s=NOW_S,
    )

    assert found == RateHeaders(
        BucketHeaders(limit=1000, remaining=999), BucketHeaders(limit=2_000_000), BucketHeaders(remaining=17_000)
    )


@pytest.mark.parametrize("absurd", ["-1", "nan", "inf", "1e400", "many", "", "0", "9" * 19, "٣", "1,000"])
def test_an_absurd_limit_is_ignored(absurd: str) -> None:
    assert headers.read({"anthropic-ratelimit-requests-limit": absurd}, now_s=NOW_S) is None


def test_a_bucket_with_an_absurd_reset_time_is_ignored() -> None:
    for reset in ("3000-01-01T00:00:00Z", "yesterday", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00"):
        told = {"anthropic-ratelimit-requests-limit": "5", "anthropic-ratelimit-requests-reset": reset}
        assert headers.read(told, now_s=NOW_S) is None


def test_more_remaining_than_the_limit_is_not_believed() -> None:
    told = {"anthropic-ratelimit-requests-limit": "5", "anthropic-ratelimit-requests-remaining": "6"}
    found = headers.read(told, now_s=NOW_S)

    assert found is not None
    assert found.requests == BucketHeaders(limit=5)


def test_a_remaining_amount_above_the_limit_by_rounding_counts_as_the_limit() -> None:
    told = {"anthropic-ratelimit-input-tokens-limit": "247800", "anthropic-ratelimit-input-tokens-remaining": "248000"}
    found = headers.read(told, now_s=NOW_S)

    assert found is not None
    assert found.input_tokens == BucketHeaders(limit=247_800, remaining=247_800)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                f"anthropic-ratelimit-{name}-{what}"
                for name in ("requests", "input-tokens")
                for what in ("limit", "remaining", "reset")
            ]
        ),
        st.text(max_size=30),
    )
)
def test_any_header_values_are_read_without_an_exception(told: dict[str, str]) -> None:
    found = headers.read(told, now_s=NOW_S)
    for each in found if found else ():
        assert each.limit is None or each.limit > 0
        assert each.remaining is None or each.remaining >= 0


# ---- learning --------------------------------------------------------------------------------------------------------

START = Amounts(50, 30_000, 8_000)


def test_the_providers_limits_are_adopted_up_to_the_settings() -> None:
    limits = Adaptive(START, AccountCaps(requests=500), now_s=0)
    assert limits.per_minute() == (500, 30_000, 8_000)

    assert limits.learn(
        RateHeaders(BucketHeaders(limit=1000), BucketHeaders(limit=2_000_000), BucketHeaders()), now_s=0
    )
    assert limits.per_minute() == (500, 2_000_000, 8_000)
    assert not limits.learn(RateHeaders(BucketHeaders(limit=1000), BucketHeaders(), BucketHeaders()), now_s=0)
    limits.learn(RateHeaders(BucketHeaders(limit=100), BucketHeaders(), BucketHeaders()), now_s=0)
    assert limits.per_minute() == (100, 2_000_000, 8_000)


def test_without_limits_in_headers_the_limits_grow_while_they_are_used_up_without_refusals() -> None:
    limits = Adaptive(START, AccountCaps(), now_s=0)
    for second in range(100):
        limits.answered(second, pressed=True)
    grown = limits.per_minute()
    for second in range(100, 200):
        limits.answered(second, pressed=False)

    assert grown.requests == pytest.approx(50 + 9 * 5)
    assert limits.per_minute() == grown


def test_an_unexplained_refusal_halves_the_limits_once_and_they_recover_in_steps() -> None:
    limits = Adaptive(START, AccountCaps(requests=100, input_tokens=1, output_tokens=1), now_s=0)
    for at_s in (10.0, 10.1, 12.0):
        limits.refused(at_s)
    assert limits.per_minute().requests == 50

    found = []
    for second in range(13, 200):
        limits.answered(second, pressed=False)
        found.append(limits.per_minute().requests)
    assert found == sorted(found)
    assert found[-1] == 100
    assert found[8] == 50
    assert found[40] < 100


def test_an_overload_halves_the_concurrency_and_each_round_of_answers_adds_one() -> None:
    calls = Concurrency(None, SHARES)
    for _ in range(10):
        calls.begin(0, ())
    assert not calls.is_full
    limits = []
    for at_s in (0.0, 0.0, 0.0, 0.5):
        calls.overloaded(at_s)
        limits.append(calls.limit)
    assert limits == [math.inf, math.inf, 5, 5]
    for _ in range(6):
        calls.end(1.0)
    before = calls.is_full
    calls.begin(0, ())
    assert (before, calls.is_full) == (False, True)

    for _ in range(5):
        calls.answered()
    assert calls.limit == pytest.approx(6, abs=0.2)
    for _ in range(1000):
        calls.answered()
    assert not calls.is_limited


def test_overloads_within_a_second_count_once_and_later_ones_lower_the_limit_again() -> None:
    calls = Concurrency(None, SHARES)
    for _ in range(8):
        calls.begin(0, ())
    limits = []
    for at_s in (0.0, 0.0, 0.0, 0.9, 1.0, 1.9, 2.0):
        calls.overloaded(at_s)
        limits.append(calls.limit)
    assert limits == [math.inf, math.inf, 4, 4, 2, 2, 1]


def test_a_limit_beyond_twice_the_most_calls_that_ever_ran_ends() -> None:
    calls = Concurrency(None, SHARES)
    calls.begin(0, ())
    for _ in range(3):
        calls.overloaded(0.0)
    limits = []
    for _ in range(3):
        limits.append(calls.limit)
        calls.answered()
    assert limits == [1.0, 2.0, math.inf]


def test_without_a_limit_of_calls_none_waits() -> None:
    calls = Concurrency(None, SHARES)
    calls.begin(0, ())
    assert calls.wait_s(1000) == 0


def test_a_single_overload_delays_no_request() -> None:
    calls = Concurrency(None, SHARES)
    calls.begin(0, ())
    for second in range(100):
        calls.overloaded(10.0 * second)
        assert not calls.is_limited
        for _ in range(9):
            calls.answered()
    assert not calls.is_limited


def test_concurrency_recovers_with_time_alone_while_long_calls_run() -> None:
    calls = Concurrency(None, SHARES)
    calls.begin(0, ())
    for second in (2.0, 4.0, 6.0):  # one long stream, and three short calls that are refused
        calls.begin(0, ())
        calls.overloaded(second)
        calls.end(0.05)
    was_full = [calls.is_full]

    calls.regain(6.0 + REGAIN_S / 2)
    was_full.append(calls.is_full)
    assert calls.regains_in_s(6.0 + REGAIN_S / 2) == REGAIN_S / 2
    calls.regain(6.0 + REGAIN_S)
    was_full.append(calls.is_full)
    assert was_full == [True, True, False]
    calls.overloaded(6.0 + REGAIN_S)  # it still is
    assert calls.regains_in_s(6.0 + REGAIN_S) == REGAIN_S
    calls.regain(6.0 + 100 * REGAIN_S)
    assert not calls.is_limited
    assert calls.regains_in_s(0) == math.inf


def test_the_configured_concurrency_is_not_exceeded_with_time() -> None:
    calls = Concurrency(1, SHARES)
    calls.begin(0, ())
    calls.overloaded(1.0)
    calls.regain(1000.0)
    assert calls.limit == 1


def test_one_call_is_always_allowed() -> None:
    calls = Concurrency(1, SHARES)
    for second in range(10):
        calls.overloaded(2.0 * second)

    before = calls.is_full
    calls.begin(0, ())
    assert (before, calls.is_full) == (False, True)
    assert math.isfinite(calls.wait_s(3))


# ---- estimates -------------------------------------------------------------------------------------------------------

CHAT = UsageClass("critical", "support.chat", "m")


def estimates() -> Estimates:
    return Estimates(first_output_tokens=512, first_bytes_per_token=3.5)


def test_the_first_estimate_is_by_size_and_at_most_max_tokens() -> None:
    assert estimates().input_tokens("m", 3500) == 1000
    assert estimates().output_tokens(CHAT, max_tokens=4096) == 512
    assert estimates().output_tokens(CHAT, max_tokens=100) == 100


def test_the_estimate_is_the_earlier_usage_of_the_same_kind_of_request() -> None:
    some = estimates()
    for tokens in (90, 110) * 50:
        some.learn(CHAT, body_bytes=1000, input_tokens=250, output_tokens=tokens)

    assert 100 <= some.output_tokens(CHAT, max_tokens=4096) <= 120
    assert some.input_tokens("m", 2000) == pytest.approx(500)
    assert some.output_tokens(UsageClass("batch", "support.chat", "m"), max_tokens=4096) == 512


def test_the_kind_of_a_request_is_two_words_of_its_routing_key() -> None:
    assert task_of("critical.support.chat.eu.7") == "support.chat"
    assert task_of("batch.crm") == "crm"
    assert task_of("batch") == ""
