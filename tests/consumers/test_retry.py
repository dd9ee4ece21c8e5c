"""What a failed attempt means, and that requests that failed together do not come back together."""

import random

import pytest

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
    RejectedError,
    RetryPolicy,
    TransientError,
    decide,
)
from consumers.outcomes import Retried


def test_requests_that_failed_together_are_retried_at_different_times() -> None:
    rng, policy, delays = random.Random(5), RetryPolicy(), set[int]()
    for _ in range(50):
        outcome = decide(OverloadedError("x"), attempts=3, max_attempts=9, left_ms=600_000, rng=rng, policy=policy)
        assert isinstance(outcome, Retried)
        delays.add(outcome.delay_ms)
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
