"""The sizes of an account's buckets, without the account: what is proven, cut and given back. Time is passed in."""

import pytest

from consumers.limits.base import Amounts
from consumers.limits.burst import Bursts
from consumers.limits.headers import BucketHeaders, RateHeaders

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


def test_without_proof_little_is_used_at_once_and_least_of_a_guessed_limit() -> None:
    assert [each.burst_s for each in Bursts(60).sizes(guessed=(True, False, False))] == [5.0, 10.0, 10.0]
    assert [each.burst_s for each in Bursts(2).sizes(guessed=(True, False, False))] == [2.0, 2.0, 2.0]


def test_what_was_left_and_what_the_call_took_was_there_before() -> None:
    bursts = Bursts(60)

    assert bursts.learn(requests(19), Amounts(1, 0, 0))
    assert sizes_s(bursts)[0] == 20.0
    assert not bursts.learn(requests(19.2), Amounts(1, 0, 0))  # a hundredth more is no news
    assert bursts.learn(requests(29), Amounts(1, 0, 0))
    assert not bursts.learn(requests(5), Amounts(1, 0, 0))
    assert sizes_s(bursts)[0] == 30.0


def test_a_call_that_took_the_last_proves_what_it_took() -> None:
    bursts = Bursts(60)
    bursts.learn(requests(0), Amounts(4, 0, 0))
    assert sizes_s(bursts)[0] == 4.0


def test_no_more_is_proven_than_the_setting_and_reaching_it_is_news() -> None:
    bursts = Bursts(30)
    bursts.learn(requests(29.9), Amounts())

    assert bursts.learn(requests(45), Amounts())
    assert sizes_s(bursts)[0] == 30.0
    assert not bursts.learn(requests(45), Amounts())


def test_what_is_left_of_tokens_may_have_been_rounded_up() -> None:
    bursts = Bursts(60)
    bursts.learn(tokens(10_500), Amounts(1, 1_000, 0))
    assert sizes_s(bursts)[1] == 11.0

    bursts = Bursts(60)
    bursts.learn(tokens(499), Amounts(1, 1_000, 0))  # perhaps a debt, so nothing is proven
    assert sizes_s(bursts)[1] == 0.0


@pytest.mark.parametrize("told", [requests(None), requests(5, limit=None)], ids=["without what is left", "or a limit"])
def test_headers_that_lack_one_of_the_two_prove_nothing(told: RateHeaders) -> None:
    assert not Bursts(60).learn(told, Amounts(1, 0, 0))


def test_a_full_bucket_that_may_be_smaller_than_the_providers_loses_a_little_at_a_call() -> None:
    assert [each.lost_part for each in proven(20).sizes(guessed=KNOWN)] == [0.05] * 3
    assert [each.lost_part for each in proven(60).sizes(guessed=KNOWN)] == [0.0] * 3
    assert [each.lost_part for each in Bursts(60).sizes(guessed=GUESSED)] == [0.0] * 3


def test_what_was_proven_for_a_limit_is_forgotten_with_the_limit() -> None:
    bursts = proven(20)
    bursts.forget((True, False, False))

    assert sizes_s(bursts) == [10.0, 20.0, 20.0]


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


def test_a_single_cut_size_comes_back_too() -> None:
    bursts = proven(40)
    bursts.refused((False, True, False), 100.0)

    assert bursts.answered(110.0)
    assert sizes_s(bursts) == pytest.approx([40.0, 22.0, 40.0])


def test_answers_between_refusals_mean_that_smaller_sizes_have_helped() -> None:
    bursts = proven(1)
    for at_s in range(0, 50, 5):
        bursts.refused((True, False, False), at_s)
    for at_s in range(50, 60):
        bursts.answered(at_s)

    assert bursts.refused((True, False, False), 60.0)


def test_a_size_never_falls_below_a_second() -> None:
    bursts = proven(6)
    for at_s in range(0, 60, 5):
        bursts.refused(NONE_SPENT, at_s)

    assert sizes_s(bursts) == pytest.approx([1.0] * 3)


def test_a_size_of_half_a_second_is_neither_cut_nor_raised_by_a_refusal() -> None:
    bursts = proven(0.5)
    assert bursts.refused((True, False, False), 100.0)

    assert sizes_s(bursts) == [0.5] * 3


def test_a_size_of_half_a_second_stays_while_larger_ones_are_cut() -> None:
    bursts = proven(0.5)
    bursts.learn(RateHeaders(SILENT, *(BucketHeaders(limit=60_000, remaining=40_500) for _ in range(2))), Amounts())
    bursts.refused(NONE_SPENT, 100.0)

    assert sizes_s(bursts) == [0.5, 20.0, 20.0]


def test_the_size_of_another_bucket_does_not_matter_for_the_margin() -> None:
    bursts = proven(4)
    bursts.learn(RateHeaders(SILENT, BucketHeaders(limit=60_000, remaining=40_500), SILENT), Amounts())
    bursts.refused((False, True, False), 100.0)
    assert bursts.margin == 0.0
    bursts.refused((True, False, True), 110.0)
    assert bursts.margin == 0.0


def test_in_a_small_bucket_more_is_reserved_for_input_before_it_is_cut() -> None:
    bursts = proven(4)
    margins, sizes = [], []
    for at_s in range(100, 120, 5):
        assert bursts.refused((False, True, False), at_s)
        margins.append(bursts.margin)
        sizes.append(sizes_s(bursts)[1])

    assert margins == pytest.approx([0.2, 0.4, 0.5, 0.5])
    assert sizes == [4.0, 4.0, 4.0, 2.0]


def test_a_bucket_of_five_seconds_is_cut_at_once() -> None:
    bursts = proven(5)
    bursts.refused((False, True, False), 100.0)

    assert (bursts.margin, sizes_s(bursts)[1]) == (0.0, 2.5)


def test_the_margin_falls_by_a_hundredth_every_ten_seconds() -> None:
    bursts = proven(4)
    bursts.widen(100.0)
    bursts.answered(109.9)
    assert bursts.margin == pytest.approx(0.2)
    assert bursts.answered(110.0)
    assert bursts.margin == pytest.approx(0.198)


def test_if_smaller_sizes_do_not_end_the_refusals_that_is_reported() -> None:
    bursts = proven(1)
    told = [bursts.refused((True, False, False), at_s) for at_s in range(0, 50, 5)]

    assert told == [True] * 6 + [False] * 4  # half of the latest responses, each new one counting a tenth
