"""Whether a failed attempt is tried again, and when: a table of errors, attempts and time left."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers import retry
from consumers.failures import (
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    SpendLimitError,
    TransientError,
)
from consumers.job import Buried, Refused, Retried
from consumers.retry import RetryPolicy

POLICY = RetryPolicy(base_s=1.0, cap_s=8.0)


class Drawn(random.Random):
    """Draws the low or the high end of every range."""

    def __init__(self, *, high: bool) -> None:
        super().__init__()
        self._high = high

    def uniform(self, a: float, b: float) -> float:
        return b if self._high else a


def decide(error: ProviderError, **given: Any) -> Retried | Refused | Buried:
    how = {"attempts": 1, "max_attempts": 4, "left_ms": 600_000, "rng": Drawn(high=True), "policy": POLICY, **given}
    return retry.decide(error, **how)


def delays_ms(error: ProviderError, attempts: int) -> tuple[int, int]:
    low, high = (decide(error, attempts=attempts, max_attempts=99, rng=Drawn(high=high)) for high in (False, True))
    assert isinstance(low, Retried)
    assert isinstance(high, Retried)
    return low.delay_ms, high.delay_ms


@pytest.mark.parametrize(
    ("error", "bounds"),
    [
        # at once, then up to 1, 2, 4, 8 and no more
        (TransientError("x"), [(0, 0), (0, 1000), (0, 2000), (0, 4000), (0, 8000), (0, 8000)]),
        (OverloadedError("x"), [(500, 1000), (1000, 2000), (2000, 4000), (4000, 8000), (4000, 8000)]),
        (RateLimitedError("x"), [(500, 1000), (1000, 2000), (2000, 4000), (4000, 8000), (4000, 8000)]),
        (RateLimitedError("x", retry_after_s=5), [(5000, 5500)] * 3),
        (RateLimitedError("x", retry_after_s=40), [(40_000, 41_000)] * 3),
        (RateLimitedError("x", retry_after_s=0), [(0, 0)] * 2),
        (OverloadedError("x", retry_after_s=5), [(5000, 5500)] * 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_how_long_is_waited_after_each_attempt(error: ProviderError, bounds: list[tuple[int, int]]) -> None:
    assert [delays_ms(error, attempt + 1) for attempt in range(len(bounds))] == bounds


def test_nobody_waits_as_long_as_one_account_told_where_another_may_be_asked() -> None:
    outcome = decide(RateLimitedError("x", retry_after_s=3600), left_ms=60_000, has_other=True)
    assert isinstance(outcome, Retried)
    assert outcome.delay_ms == 1000


@given(told_s=st.floats(0, 86_400), seed=st.integers())
def test_never_before_the_time_that_was_told(told_s: float, seed: int) -> None:
    outcome = decide(RateLimitedError("x", retry_after_s=told_s), left_ms=10**9, rng=random.Random(seed))
    assert isinstance(outcome, Retried)
    assert told_s * 1000 <= outcome.delay_ms <= told_s * 1000 + 1001


def test_those_that_failed_together_do_not_come_back_together() -> None:
    rng = random.Random(5)
    delays = {decide(OverloadedError("x"), attempts=5, max_attempts=9, rng=rng).delay_ms for _ in range(50)}  # type: ignore[union-attr]
    assert len(delays) > 40


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RejectedError("400 invalid_request_error: …", status=400), 400),
        (RejectedError("403", status=403), 403),
        (RejectedError("unsendable"), 400),
        (SpendLimitError("429 …", status=429), 429),
        (SpendLimitError("400 …", status=400), 400),
    ],
)
@pytest.mark.parametrize("attempts", [1, 4])
def test_what_the_provider_refused_for_good_is_never_tried_again(
    error: ProviderError, status: int, attempts: int
) -> None:
    outcome = decide(error, attempts=attempts)
    assert isinstance(outcome, Buried)
    assert (outcome.problem.code, outcome.problem.status) == ("provider_rejected", status)
    assert outcome.problem.detail == error.detail


@pytest.mark.parametrize("error", [TransientError("gone"), OverloadedError("gone"), RateLimitedError("gone")])
@pytest.mark.parametrize("attempts", [4, 5])
def test_after_the_last_attempt_it_is_buried_with_the_last_error(error: ProviderError, attempts: int) -> None:
    outcome = decide(error, attempts=attempts)
    assert isinstance(outcome, Buried)
    assert outcome.problem.code == "attempts_exhausted"
    assert outcome.problem.detail == f"all {attempts} attempts failed; the last: gone"


@pytest.mark.parametrize(
    ("error", "left_ms", "retried"),
    [
        (TransientError("x"), 1, True),
        (TransientError("x"), 0, False),
        (TransientError("x"), -5, False),
        (RateLimitedError("x", retry_after_s=5), 5501, True),
        (RateLimitedError("x", retry_after_s=5), 5500, False),
        (RateLimitedError("x", retry_after_s=86_400), 600_000, False),
    ],
)
def test_no_delay_begins_that_would_end_after_the_deadline(error: ProviderError, left_ms: int, retried: bool) -> None:
    outcome = decide(error, left_ms=left_ms)
    if retried:
        assert isinstance(outcome, Retried)
    else:
        assert isinstance(outcome, Refused)
        assert outcome.problem.code == "deadline_exceeded"
        assert f"{max(0, left_ms)} ms are left" in outcome.problem.detail


def test_the_error_goes_with_the_retry() -> None:
    outcome = decide(TransientError("no connection"))
    assert isinstance(outcome, Retried)
    assert outcome.error == "no connection"
