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


def test_requests_that_failed_together_are_retried_at_different_times() -> None:
    rng = random.Random(5)
    delays = {decide(OverloadedError("x"), attempts=5, max_attempts=9, rng=rng).delay_ms for _ in range(50)}  # type: ignore[union-attr]
    assert len(delays) > 40


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
