"""Whether and when a failed attempt is retried: a table of errors, attempts and remaining time."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers import failures
from consumers.failures import (
    BROKEN_OFF,
    FORBIDDEN,
    NO_ACCESS,
    NO_ACCOUNT,
    REJECTED,
    SERVER_ERROR,
    TIMED_OUT,
    TOO_LARGE,
    UNSENT,
    AccountError,
    AnswerTooLargeError,
    Meaning,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    RetryPolicy,
    TransientError,
)
from consumers.outcomes import DeadLettered, Refused, Retried
from lanekeeper.contract.problems import ProviderFailure

POLICY = RetryPolicy(base_s=1.0, cap_s=8.0)


class Drawn(random.Random):
    """A random source that returns the low or the high end of every range."""

    def __init__(self, *, high: bool) -> None:
        super().__init__()
        self._high = high

    def uniform(self, a: float, b: float) -> float:
        return b if self._high else a


def decide(error: ProviderError, **given: Any) -> Retried | Refused | DeadLettered:
    how = {"attempts": 1, "max_attempts": 4, "left_ms": 600_000, "rng": Drawn(high=True), "policy": POLICY, **given}
    return failures.decide(error, **how)


def delays_ms(error: ProviderError, attempts: int) -> tuple[int, int]:
    low, high = (decide(error, attempts=attempts, max_attempts=99, rng=Drawn(high=high)) for high in (False, True))
    assert isinstance(low, Retried)
    assert isinstance(high, Retried)
    return low.delay_ms, high.delay_ms


@pytest.mark.parametrize(
    ("error", "bounds"),
    [
        # short at first, then twice as long each time, up to 8 s
        (TransientError("x"), [(250, 375), (500, 750), (1000, 1500), (2000, 3000), (4000, 6000), (8000, 12_000)]),
        (OverloadedError("x"), [(1000, 1500), (2000, 3000), (4000, 6000), (8000, 12_000), (8000, 12_000)]),
        (RateLimitedError("x"), [(1000, 1500), (2000, 3000), (4000, 6000), (8000, 12_000), (8000, 12_000)]),
        (RateLimitedError("x", retry_after_s=5), [(5000, 5500)] * 3),
        (RateLimitedError("x", retry_after_s=40), [(40_000, 41_000)] * 3),
        (RateLimitedError("x", retry_after_s=0), [(250, 250)] * 2),
        (OverloadedError("x", retry_after_s=5), [(5000, 5500)] * 2),
        (TransientError("x", retry_after_s=5), [(5000, 5500)] * 2),
        (OverloadedError("x", retry_after_s=1), [(1000, 1500), (2000, 3000), (4000, 6000)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_pause_after_each_attempt_is_within_its_bounds(error: ProviderError, bounds: list[tuple[int, int]]) -> None:
    assert [delays_ms(error, attempt + 1) for attempt in range(len(bounds))] == bounds


@pytest.mark.parametrize(
    ("error", "steps_ms"), [(OverloadedError("x"), [1000, 4909, 24_092]), (TransientError("x"), [250, 2605, 27_145])]
)
def test_all_pauses_of_a_request_together_last_as_long_as_a_short_outage(
    error: ProviderError, steps_ms: list[int]
) -> None:
    policy, rng = RetryPolicy(base_s=1, span_s=30, cap_s=60), Drawn(high=False)
    found = [decide(error, attempts=attempts, policy=policy, rng=rng) for attempts in (1, 2, 3)]
    assert [each.delay_ms for each in found if isinstance(each, Retried)] == pytest.approx(steps_ms, abs=2)
    assert sum(steps_ms) == pytest.approx(30_000, abs=5)


def test_after_the_last_attempt_its_error_is_told() -> None:
    error = RateLimitedError("x", retry_after_s=4.2, status=429, type="rate_limit_error")
    outcome = decide(error, attempts=4, max_attempts=4)
    assert isinstance(outcome, Refused | DeadLettered)
    assert outcome.problem.code == "attempts_exhausted"
    assert outcome.problem.detail == "all 4 attempts failed; the last: x"
    assert outcome.problem.provider == ProviderFailure(status=429, type="rate_limit_error", retry_after_ms=4200)


def test_an_error_that_is_final_is_not_retried() -> None:
    error = TransientError("x", status=500)
    error.is_final = True
    outcome = decide(error)
    assert isinstance(outcome, DeadLettered)
    assert (outcome.problem.code, outcome.problem.status) == ("provider_rejected", 500)


@pytest.mark.parametrize(("left_ms", "is_retried"), [(376, True), (375, False)])
def test_a_retry_that_could_begin_only_at_the_deadline_is_not_made(left_ms: int, is_retried: bool) -> None:
    outcome = decide(TransientError("x"), left_ms=left_ms)
    if is_retried:
        assert outcome == Retried(delay_ms=375, error="x", brief="TransientError")
    else:
        assert isinstance(outcome, Refused | DeadLettered)
        assert outcome.problem.code == "deadline_exceeded"
        assert outcome.problem.detail == ("attempt 1 failed (x), and the next could start in 375 ms: 375 ms are left")


@pytest.mark.parametrize(("status", "told"), [(422, 422), (0, 400)])
def test_a_refusal_has_the_providers_status(status: int, told: int) -> None:
    outcome = decide(RejectedError("x", status=status))
    assert isinstance(outcome, Refused | DeadLettered)
    assert (outcome.problem.code, outcome.problem.status) == ("provider_rejected", told)


def test_a_retry_after_of_one_account_is_not_waited_for_if_another_can_be_called() -> None:
    outcome = decide(RateLimitedError("x", retry_after_s=3600), left_ms=60_000, has_other=True)
    assert isinstance(outcome, Retried)
    assert outcome.delay_ms == 1500


@given(told_s=st.floats(0, 86_400), seed=st.integers())
def test_no_retry_comes_before_its_retry_after_is_over(told_s: float, seed: int) -> None:
    outcome = decide(RateLimitedError("x", retry_after_s=told_s), left_ms=10**9, rng=random.Random(seed))
    assert isinstance(outcome, Retried)
    assert told_s * 1000 <= outcome.delay_ms <= max(250, told_s * 1000 + 1001)


def pauses_ms(
    error: ProviderError, *, max_attempts: int, deadline_ms: int, call_ms: int, policy: RetryPolicy, seed: int
) -> list[int]:
    """All pauses of a request whose attempts all fail after `call_ms`."""
    rng, left_ms, found = random.Random(seed), deadline_ms, []
    for attempts in range(1, max_attempts):
        left_ms -= call_ms
        outcome = decide(error, attempts=attempts, max_attempts=max_attempts, left_ms=left_ms, rng=rng, policy=policy)
        if not isinstance(outcome, Retried):
            break
        found.append(outcome.delay_ms)
        left_ms -= outcome.delay_ms
    return found


FAILURES = [TransientError("x"), OverloadedError("x"), RateLimitedError("x"), OverloadedError("x", retry_after_s=1)]


@given(
    seed=st.integers(),
    error=st.sampled_from(FAILURES),
    max_attempts=st.integers(1, 100),
    deadline_ms=st.integers(1, 10**8),
    call_ms=st.integers(0, 10_000),
    base_s=st.floats(0.01, 10),
    span_s=st.floats(0.01, 10_000),
)
def test_no_pause_is_shorter_than_the_minimum_or_ends_after_the_deadline(
    seed: int,
    error: ProviderError,
    max_attempts: int,
    deadline_ms: int,
    call_ms: int,
    base_s: float,
    span_s: float,
) -> None:
    policy = RetryPolicy(base_s=base_s, span_s=span_s, cap_s=600)
    how = {"max_attempts": max_attempts, "deadline_ms": deadline_ms, "call_ms": call_ms, "seed": seed}
    pauses = pauses_ms(error, policy=policy, **how)
    assert all(pause >= 1000 * policy.floor_s for pause in pauses)
    assert all(pause <= 901_000 for pause in pauses)
    assert sum(pauses) < deadline_ms


def test_requests_that_failed_together_are_retried_at_different_times() -> None:
    rng = random.Random(5)
    delays = {decide(OverloadedError("x"), attempts=5, max_attempts=9, rng=rng).delay_ms for _ in range(50)}  # type: ignore[union-attr]
    assert len(delays) > 40


@pytest.mark.parametrize(
    ("error", "brief"),
    [
        (
            OverloadedError("a prompt", status=529, type="overloaded_error", request_id="req_01/a@b:c.d-e"),
            "overloaded_error 529 (req_01/a@b:c.d-e)",
        ),
        (TransientError("a prompt", status=500, type="a prompt", request_id="a prompt"), "TransientError 500 (?)"),
        (TransientError("a prompt", type="cut", request_id="a" * 101), "cut (?)"),
        (TransientError("a prompt", type="a\n", request_id="a\n"), "TransientError (?)"),
        (TransientError("a prompt", type="cut"), "cut"),
        (AnswerTooLargeError("a prompt"), "too_large"),
    ],
)
def test_the_brief_of_a_failure_has_names_and_ids_and_no_text(error: ProviderError, brief: str) -> None:
    assert error.brief == brief


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (TransientError("x", type="unreachable"), UNSENT),
        (AccountError("x", reason="x", type="credentials"), NO_ACCESS),
        (AccountError("x", reason="x", status=401), NO_ACCOUNT),
        (TransientError("x", type="timeout"), TIMED_OUT),
        (TransientError("x", type="timeout", status=500), SERVER_ERROR),
        (TransientError("x", type="api_error", status=400), SERVER_ERROR),
        (TransientError("x", type="cut"), BROKEN_OFF),
        (RejectedError("x", status=400), REJECTED),
        (RejectedError("x", status=403), FORBIDDEN),
        (AnswerTooLargeError("x"), TOO_LARGE),
    ],
)
def test_retry_failover_and_breaker_follow_from_the_failures_class_type_and_status(
    error: ProviderError, means: Meaning
) -> None:
    assert error.means is means
