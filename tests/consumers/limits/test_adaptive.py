"""The assumed limits of an account, alone: announced, guessed, lowered by refusals, forgotten. Time is passed in."""

from typing import Any

import pytest

from consumers.limits.adaptive import Adaptive
from consumers.limits.base import Amounts
from consumers.limits.headers import BucketHeaders, RateHeaders
from consumers.limits.spec import AccountCaps

START = Amounts(50, 30_000, 8_000)


def limits(**caps: Any) -> Adaptive:
    return Adaptive(START, AccountCaps(**caps), now_s=0.0)


def told(requests: float | None = None, tokens: float | None = None, output: float | None = None) -> RateHeaders:
    return RateHeaders(BucketHeaders(limit=requests), BucketHeaders(limit=tokens), BucketHeaders(limit=output))


def test_a_limit_is_a_guess_until_it_is_announced_or_set() -> None:
    some = limits(input_tokens=9_000)
    assert some.guessed() == (True, False, True)
    some.learn(told(requests=60), now_s=0.0)
    assert some.guessed() == (False, False, True)


def test_only_guessed_limits_grow() -> None:
    some = limits(input_tokens=9_000)
    some.learn(told(requests=60), now_s=0.0)

    assert some.answered(10.0, pressed=True)
    assert some.per_minute() == (60, 9_000, 8_800)
    some.learn(told(output=8_000), now_s=10.0)
    assert not some.answered(20.0, pressed=True)


def test_a_guess_grows_by_a_tenth_of_the_first_guess_at_most_every_ten_seconds() -> None:
    some = limits()
    found = [some.answered(at_s, pressed=True) for at_s in (9.9, 10.0, 19.9, 20.0)]

    assert found == [False, True, False, True]
    assert some.per_minute() == (60, 36_000, 9_600)


def test_a_guess_does_not_grow_unless_a_request_waited() -> None:
    some = limits()
    assert not some.answered(10.0, pressed=False)
    assert some.per_minute() == START


def test_after_the_clock_was_set_back_a_step_is_due() -> None:
    some = limits()
    some.answered(1000.0, pressed=True)
    assert some.answered(500.0, pressed=True)


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


def test_a_low_limit_that_is_not_announced_again_is_forgotten_after_three_minutes() -> None:
    some = limits()
    some.learn(told(requests=10, tokens=40_000), now_s=0.0)
    assert not some.is_stale(179.9)
    assert some.is_stale(180.0)
    some.forget(180.0)

    assert some.per_minute() == (50, 40_000, 8_000)  # one above the first guess slows nobody down
    assert some.guessed() == (True, False, True)
    assert not some.is_stale(1000.0)


def test_a_low_limit_that_is_announced_again_lives_on() -> None:
    some = limits()
    some.learn(told(requests=10), now_s=0.0)
    assert not some.learn(told(requests=10), now_s=100.0)
    assert not some.is_stale(279.9)
    some.forget(279.9)
    assert some.per_minute().requests == 10
    assert some.is_stale(280.0)


def test_a_repeated_announcement_is_recorded_once_a_minute() -> None:
    some = limits()
    assert some.learn(told(requests=10), now_s=100.0)
    for at_s in (100.5, 130.0, 159.9):
        assert not some.learn(told(requests=10), now_s=at_s)
    assert some.is_stale(280.0)
    some.learn(told(requests=10), now_s=160.0)
    assert not some.is_stale(339.0)


def test_a_limit_as_high_as_the_first_guess_is_kept() -> None:
    some = limits()
    some.learn(told(requests=50), now_s=0.0)
    assert not some.is_stale(1000.0)
    some.forget(1000.0)
    assert some.guessed() == (False, True, True)


def test_what_was_announced_just_now_is_kept() -> None:
    some = limits()
    some.learn(told(requests=10), now_s=100.0)
    assert not some.is_stale(100.5)
    some.forget(100.5)
    assert some.per_minute().requests == 10


def test_a_single_lowered_limit_is_forgotten_too() -> None:
    some = limits(input_tokens=1_000)
    some.refused(100.0, (False, True, False))
    assert some.is_stale(280.0)


def test_what_refusals_lowered_is_forgotten_after_three_minutes_without_an_answer() -> None:
    some = limits(requests=100)
    some.refused(100.0)
    assert not some.is_stale(279.9)
    assert some.is_stale(280.0)
    some.forget(279.9)
    assert some.per_minute().requests == 50
    some.forget(280.0)
    assert some.per_minute().requests == 100


def test_a_forgotten_limit_is_guessed_again_from_the_beginning() -> None:
    some = limits()
    some.answered(10.0, pressed=True)
    some.learn(told(requests=10), now_s=20.0)
    some.forget(200.0)
    assert some.per_minute() == (50, 33_000, 8_800)


def test_a_provider_without_limits_in_its_headers_has_only_those_that_are_set() -> None:
    some = limits(input_tokens=9_000)
    assert some.learn_no_rate()
    assert not some.learn_no_rate()
    found = some.per_minute()
    assert found.input_tokens == 9_000
    assert found.requests >= 1e9
    assert found.output_tokens >= 1e9
    assert some.guessed() == (False, False, False)


def test_the_first_refusal_of_a_silent_provider_ends_that_belief_and_lowers_nothing_else() -> None:
    some = limits()
    some.learn_no_rate()
    some.refused(100.0)
    assert some.per_minute() == START
    some.refused(104.9)
    assert some.per_minute() == START
    assert not some.learn_no_rate()
    some.refused(105.0)
    assert some.per_minute().requests == 25


def test_who_has_spoken_of_limits_or_refused_is_not_silent() -> None:
    spoken, refused = limits(), limits()
    spoken.learn(told(requests=60), now_s=0.0)
    refused.refused(0.0)
    assert not spoken.learn_no_rate()
    assert not refused.learn_no_rate()


def test_another_process_goes_on_with_what_was_learned() -> None:
    some, other = limits(), limits()
    some.learn(told(requests=10), now_s=0.0)
    some.answered(10.0, pressed=True)
    some.refused(20.0)
    other.learned = some.learned
    assert other.per_minute() == some.per_minute() == (5, 16_500, 4_400)
