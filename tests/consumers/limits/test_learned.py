"""Learned values are read by the version that wrote them; anything else is refused as a whole."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.limits import learned
from consumers.limits.account import Account, Waiter
from consumers.limits.base import AccountCaps, Amounts, BucketHeaders, BudgetSpec, Feedback, Kind, RateHeaders
from consumers.limits.learned import Adaptive, Bursts
from tests.support.examples import examples

RATE = RateHeaders(BucketHeaders(limit=60, remaining=50), BucketHeaders(limit=9_000, remaining=5_000), BucketHeaders())
HEARD = (
    Feedback(kind=Kind.ANSWERED, rate=RATE, counted=Amounts(1, 1_000, 10)),
    Feedback(kind=Kind.ANSWERED),
    Feedback(kind=Kind.RATE_LIMITED, rate=RATE),
    Feedback(kind=Kind.RATE_LIMITED, retry_after_s=3.0),
    Feedback(kind=Kind.OVERLOADED),
)
heard = st.lists(st.tuples(st.sampled_from(HEARD), st.integers(0, 400)), max_size=12)
numbers = st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3), st.booleans())
values = st.recursive(numbers, lambda inner: st.lists(inner, max_size=4), max_leaves=6)


def account_that(said: list[tuple[Feedback, int]]) -> tuple[Account, float]:
    account, now_s = Account("a", BudgetSpec(), now_s=0), 0.0
    for each, later_s in said:
        now_s += later_s
        account.learn(each, now_s)
    return account, now_s


def written() -> dict[str, Any]:
    account, _ = account_that([(each, 1) for each in HEARD])
    found: dict[str, Any] = json.loads(learned.to_json(account.learned()))
    return found


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(said=heard)
def test_another_process_reads_learned_values_unchanged(said: list[tuple[Feedback, int]]) -> None:
    account, now_s = account_that(said)
    other = Account("a", BudgetSpec(), now_s=now_s)
    other.load(learned.from_json(learned.to_json(account.learned())))

    assert other.learned() == account.learned()
    assert other.per_minute() == account.per_minute()
    assert [bucket.burst for bucket in other.buckets] == [bucket.burst for bucket in account.buckets]
    assert [bucket.most for bucket in other.buckets] == [bucket.most for bucket in account.buckets]


@pytest.mark.parametrize(
    "text",
    ["", "?", "null", "3", '"?"', "[]", "{}", "[[], [], 0]", '{"version": 2}', b"\xff", "[" * 100_000, "1" * 5_000],
)
def test_text_that_is_not_learned_values_is_refused(text: str | bytes) -> None:
    with pytest.raises(learned.UnreadableError):
        learned.from_json(text)


def test_a_limit_that_is_announced_again_is_news_only_after_a_while() -> None:
    account, _ = account_that([(HEARD[0], 0)])
    for now_s, told_s in ((learned.NEWS_S - 1, 0), (learned.NEWS_S + 1, learned.NEWS_S + 1), (5, 5)):
        account.learn(HEARD[0], now_s)
        assert account.learned().limits.told_s[0] == told_s


@pytest.mark.parametrize("version", [0, 1, 99, "2", None, [2]])
def test_learned_values_of_another_version_are_refused_although_every_field_is_there(version: object) -> None:
    with pytest.raises(learned.UnreadableError, match="version"):
        learned.from_json(json.dumps(written() | {"version": version}))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=values, data=st.data())
def test_a_field_with_another_value_is_refused_or_harmless(value: object, data: st.DataObject) -> None:
    found = written()
    part = data.draw(st.sampled_from([found, found["limits"], found["bursts"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = value
    try:
        read = learned.from_json(json.dumps(found))
    except learned.UnreadableError:
        return
    account = Account("a", BudgetSpec(), now_s=500.0)
    account.load(read)
    for at, each in enumerate(HEARD):
        account.learn(each, 500.0 + at)
    account.join(waiter := Waiter(0, Amounts(1, 10, 10), arrived_s=506.0))

    assert account.grant_next(1_000_000.0)[0] is waiter


START = Amounts(50, 30_000, 8_000)


def limits(**caps: Any) -> Adaptive:
    return Adaptive(START, AccountCaps(**caps), now_s=0.0)


def told(requests: float | None = None, tokens: float | None = None, output: float | None = None) -> RateHeaders:
    return RateHeaders(BucketHeaders(limit=requests), BucketHeaders(limit=tokens), BucketHeaders(limit=output))


def test_only_guessed_limits_grow() -> None:
    some = limits(input_tokens=9_000)
    some.learn(told(requests=60), now_s=0.0)

    assert some.answered(10.0, pressed=True)
    assert some.per_minute() == (60, 9_000, 8_800)
    some.learn(told(output=8_000), now_s=10.0)
    assert not some.answered(20.0, pressed=True)


def test_the_lower_of_the_announced_limit_and_the_operators_cap_counts() -> None:
    some = limits(requests=30)
    for announced, found in ((60, 30), (20, 20)):
        some.learn(told(requests=announced), now_s=0.0)
        assert some.per_minute().requests == found


@pytest.mark.parametrize(
    ("announced", "stale"), [(49, [True, False, False, True]), (50, [False] * 4), (None, [False] * 4)]
)
def test_a_limit_below_the_first_guess_is_stale_after_three_minutes_or_when_the_clock_was_set_back(
    announced: float | None, stale: list[bool]
) -> None:
    some = limits()
    some.learn(told(requests=announced), now_s=1000.0)
    assert [some.is_stale(at_s) for at_s in (999.9, 1000.0, 1179.9, 1180.0)] == stale


def test_a_guess_grows_by_a_tenth_of_the_first_guess_at_most_every_ten_seconds() -> None:
    some = limits()
    found = [some.answered(at_s, pressed=True) for at_s in (9.9, 10.0, 19.9, 20.0)]

    assert found == [False, True, False, True]
    assert some.per_minute() == (60, 36_000, 9_600)


def test_a_lowered_limit_comes_back_by_a_tenth_and_slower_near_the_end() -> None:
    some = limits(requests=100)
    some.refused(0.0)
    steps = []
    for at_s in range(10, 200, 10):
        if not some.answered(at_s, pressed=False):
            break
        steps.append(some.per_minute().requests)

    assert steps == pytest.approx([60, 70, *(70 + 2.5 * each for each in range(1, 13))], abs=7.6)
    assert steps[:2] == pytest.approx([60, 70])
    assert steps[-1] == 100
    assert steps[-2] == pytest.approx(97.5)


@pytest.mark.parametrize(("after_s", "counts"), [(0.5, False), (4.9, False), (5.0, True), (-1.0, True)])
def test_refusals_within_five_seconds_count_once(after_s: float, counts: bool) -> None:
    some = limits(requests=100)
    some.refused(100.0)
    some.refused(100.0 + after_s)
    assert some.per_minute().requests == (25 if counts else 50)


def test_a_limit_never_falls_below_a_sixty_fourth() -> None:
    some = limits(requests=6_400)
    for at_s in range(0, 100, 5):
        some.refused(at_s)
    assert some.per_minute().requests == 100


def test_a_refusal_that_shows_what_is_spent_lowers_that_by_a_fifth() -> None:
    some = limits(requests=100, input_tokens=1_000, output_tokens=1_000)
    some.refused(0.0, (False, True, False))
    assert some.per_minute() == (100, 800, 1_000)


def test_what_refusals_lowered_is_forgotten_after_three_minutes_without_an_answer() -> None:
    some = limits(requests=100)
    some.refused(100.0)
    assert not some.is_stale(279.9)
    assert some.is_stale(280.0)
    some.forget(279.9)
    assert some.per_minute().requests == 50
    some.forget(280.0)
    assert some.per_minute().requests == 100


def test_the_first_refusal_of_a_silent_provider_ends_that_belief_and_lowers_nothing_else() -> None:
    some = limits()
    some.learn_no_rate()
    some.refused(100.0)
    assert some.per_minute() == START
    some.refused(104.9)
    assert some.per_minute() == START
    assert not some.learn_no_rate()
    some.refused(105.0)
    assert some.per_minute() == (25, 15_000, 4_000)


KNOWN = (False, False, False)
GUESSED = (True, True, True)
NONE_SPENT = (False, False, False)
SILENT = BucketHeaders()


def requests(remaining: float | None, *, limit: float | None = 60) -> RateHeaders:
    return RateHeaders(BucketHeaders(limit=limit, remaining=remaining), SILENT, SILENT)


def tokens(remaining: float, *, limit: float = 60_000) -> RateHeaders:
    return RateHeaders(SILENT, BucketHeaders(limit=limit, remaining=remaining), SILENT)


def sizes_s(bursts: Bursts) -> list[float]:
    return [each.burst_s for each in bursts.sizes(guessed=KNOWN)]


def proven(seconds: float, most_s: float = 60.0) -> Bursts:
    """All three buckets are proven to hold so much."""
    bursts = Bursts(most_s)
    left = 6_000 * seconds
    bursts.learn(
        RateHeaders(*(BucketHeaders(limit=360_000, remaining=left + each) for each in (0, 500, 500))), Amounts()
    )
    return bursts


def test_what_was_left_and_what_the_call_took_was_there_before() -> None:
    bursts = Bursts(60)

    assert bursts.learn(requests(19), Amounts(1, 0, 0))
    assert sizes_s(bursts)[0] == 20.0
    assert not bursts.learn(requests(19.2), Amounts(1, 0, 0))  # a hundredth more is no news
    assert bursts.learn(requests(29), Amounts(1, 0, 0))
    assert not bursts.learn(requests(5), Amounts(1, 0, 0))
    assert sizes_s(bursts)[0] == 30.0


def test_what_is_left_of_tokens_may_have_been_rounded_up() -> None:
    bursts = Bursts(60)
    bursts.learn(tokens(10_500), Amounts(1, 1_000, 0))
    assert sizes_s(bursts)[1] == 11.0

    bursts = Bursts(60)
    bursts.learn(tokens(499), Amounts(1, 1_000, 0))  # perhaps a debt, so nothing is proven
    assert sizes_s(bursts)[1] == 0.0


def test_a_full_bucket_that_may_be_smaller_than_the_providers_loses_a_little_at_a_call() -> None:
    assert [each.lost_part for each in proven(20).sizes(guessed=KNOWN)] == [0.05] * 3
    assert [each.lost_part for each in proven(60).sizes(guessed=KNOWN)] == [0.0] * 3
    assert [each.lost_part for each in Bursts(60).sizes(guessed=GUESSED)] == [0.0] * 3


def test_a_bucket_explains_a_refusal_if_less_is_left_than_two_usual_requests_take() -> None:
    bursts = Bursts(60)
    bursts.learn(RateHeaders(SILENT, SILENT, SILENT), Amounts(1, 4_000, 0))
    bursts.learn(RateHeaders(SILENT, SILENT, SILENT), Amounts(1, 0, 0))  # its input was not counted: no news

    assert bursts.spent(tokens(8_499)) == (False, True, False)
    assert bursts.spent(tokens(8_500)) == NONE_SPENT
    bursts.learn(RateHeaders(SILENT, SILENT, SILENT), Amounts(1, 14_000, 0))  # a tenth of the way to it
    assert bursts.spent(tokens(10_499)) == (False, True, False)
    assert bursts.spent(tokens(10_500)) == NONE_SPENT


def test_a_bucket_explains_a_refusal_if_less_than_a_hundredth_or_one_is_left() -> None:
    bursts = Bursts(60)

    assert bursts.spent(requests(9.9, limit=1000))[0]
    assert not bursts.spent(requests(10, limit=1000))[0]
    assert bursts.spent(requests(0.9))[0]
    assert not bursts.spent(requests(1))[0]
    assert bursts.spent(requests(0, limit=None))[0]
    assert not bursts.spent(requests(None))[0]


def test_a_refusal_halves_what_is_spent_or_all_and_counts_once_within_five_seconds() -> None:
    bursts = proven(40)
    assert bursts.refused((True, False, False), 100.0)
    assert sizes_s(bursts) == [20.0, 40.0, 40.0]
    for at_s in (100.5, 104.9):
        assert bursts.refused((True, False, False), at_s)
        assert sizes_s(bursts) == [20.0, 40.0, 40.0]
    bursts.refused(NONE_SPENT, 105.0)
    assert sizes_s(bursts) == [10.0, 20.0, 20.0]


def test_a_cut_size_comes_back_by_a_tenth_every_ten_seconds() -> None:
    bursts = proven(40)
    bursts.refused(NONE_SPENT, 100.0)

    assert not bursts.answered(100.5)
    assert not bursts.answered(109.9)
    assert bursts.answered(110.0)
    assert sizes_s(bursts) == pytest.approx([22.0] * 3)
    assert not bursts.answered(119.9)
    for second in range(120, 300, 10):
        bursts.answered(second)
    assert sizes_s(bursts) == [40.0] * 3
    assert not bursts.answered(400.0)


def test_a_size_never_falls_below_a_second() -> None:
    bursts = proven(6)
    for at_s in range(0, 60, 5):
        bursts.refused(NONE_SPENT, at_s)

    assert sizes_s(bursts) == pytest.approx([1.0] * 3)


def test_in_a_small_bucket_more_is_reserved_for_input_before_it_is_cut() -> None:
    bursts = proven(4)
    margins, sizes = [], []
    for at_s in range(100, 120, 5):
        assert bursts.refused((False, True, False), at_s)
        margins.append(bursts.margin)
        sizes.append(sizes_s(bursts)[1])

    assert margins == pytest.approx([0.2, 0.4, 0.5, 0.5])
    assert sizes == [4.0, 4.0, 4.0, 2.0]


def test_the_margin_falls_by_a_hundredth_every_ten_seconds() -> None:
    bursts = proven(4)
    bursts.widen(100.0)
    bursts.answered(109.9)
    assert bursts.margin == pytest.approx(0.2)
    assert bursts.answered(110.0)
    assert bursts.margin == pytest.approx(0.198)


def test_limits_are_lowered_when_half_of_the_latest_calls_were_refused_by_buckets_of_the_smallest_size() -> None:
    bursts = proven(6)
    assert [bursts.refused(NONE_SPENT, 5.0 * number) for number in range(7)] == [True] * 6 + [False]
    for _ in range(2):
        bursts.answered(31.0)
    assert bursts.refused(NONE_SPENT, 35.0)
