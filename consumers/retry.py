"""Decides whether a failed attempt is retried, and when. No other code decides that. Does no I/O and reads no clock."""

import math
import random
from dataclasses import dataclass
from typing import assert_never

from consumers.failures import ProviderError, Retry
from consumers.outcomes import Buried, Refused, Retried, ended

JITTER = 0.5
"""Each pause before a retry is lengthened at random by up to this share of its length, so that requests that failed
together do not come back together. Full jitter (a pause between zero and the computed value) made the pauses too short:
four attempts took 0.8 to 2.7 s in all."""
LEAST_FACTOR = 2.0
STEP_PART_OF_TIME_LEFT = 0.5
"""The pause before a retry, without its random part, is at most this share of the time left until the request's
deadline, so that there is time for the next attempt and for one more after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait between the attempts of a request. A step is a pause without its random part.

    The first step is `floor_s`, or `base_s` after a rate limit or an overload. Each further step is the step before it
    times a factor, which is the same for all steps, and at least 2. The factor is chosen so that all steps of a request
    together last at least `span_s`, the length of a short outage. No step is longer than `cap_s` or than half of the
    time left until the deadline, and none is shorter than `floor_s`.
    """

    base_s: float = 1.0
    span_s: float = 30.0
    cap_s: float = 60.0

    @property
    def floor_s(self) -> float:
        return self.base_s / 4


def decide(
    error: ProviderError,
    *,
    attempts: int,
    max_attempts: int,
    left_ms: int,
    policy: RetryPolicy,
    rng: random.Random,
    has_other: bool = False,
) -> Retried | Refused | Buried:
    """The outcome of a request whose attempt failed: a retry after a pause, or a final error.

    `attempts`: how many attempts were made, including the failed one. `left_ms`: the time until the request's deadline,
    after which it is not retried. `has_other`: whether the retry can call another account than the failed call did; if
    so, the `retry-after` of the failed call is ignored, because it concerns only the account that was called.
    """
    match error.means.retry:
        case Retry.REJECTED:
            status = error.status or None
            return ended("provider_rejected", error.detail, status=status, brief=error.brief)
        case Retry.TOO_LARGE:
            return ended("answer_too_large", error.detail)
        case Retry.SOON:
            first_s = policy.floor_s
        case Retry.BACK_OFF | Retry.RETRY_AFTER:
            first_s = policy.base_s
        case never:
            assert_never(never)
    if attempts >= max_attempts:
        return ended(
            "attempts_exhausted",
            f"all {attempts} attempts failed; the last: {error.detail}"
            + ("" if error.retry_after_s is None else f" (retry-after: {math.ceil(error.retry_after_s)})"),
            brief=f"after {attempts} attempts: {error.brief}",
        )
    pause_s = _step_s(
        first_s, failures=attempts, pauses=max_attempts - 1, left_s=left_ms / 1000, policy=policy
    ) * rng.uniform(1, 1 + JITTER)
    if not has_other:
        pause_s = _with_retry_after(error, pause_s, policy=policy, rng=rng)
    delay_ms = math.ceil(1000 * pause_s)
    if delay_ms >= left_ms:
        return ended(
            "deadline_exceeded",
            f"attempt {attempts} failed ({error.detail}), and the next could start in {delay_ms} ms: "
            f"{max(0, left_ms)} ms are left",
            brief=f"after attempt {attempts}: {error.brief}",
        )
    return Retried(delay_ms=delay_ms, error=error.detail, brief=error.brief)


def _step_s(first_s: float, *, failures: int, pauses: int, left_s: float, policy: RetryPolicy) -> float:
    factor = _factor(policy.span_s / first_s, pauses)
    exponent = min(failures - 1, 1000 / math.log2(factor))  # beyond this a float overflows
    step_s = first_s * math.pow(factor, exponent)
    return max(policy.floor_s, min(step_s, policy.cap_s, left_s * STEP_PART_OF_TIME_LEFT))


def _factor(total: float, count: int) -> float:

    def is_enough(factor: float) -> bool:
        return sum(factor**n for n in range(count)) >= total

    if count < 2 or is_enough(LEAST_FACTOR):
        return LEAST_FACTOR
    low, high = LEAST_FACTOR, math.pow(total, 1 / (count - 1))  # with this factor the last term alone reaches the total
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _with_retry_after(error: ProviderError, pause_s: float, *, policy: RetryPolicy, rng: random.Random) -> float:
    """The pause `pause_s`, adapted to the `retry-after` of the failed call, if it had one. After a rate limit the pause
    is the time in `retry-after`, but at least `floor_s`; after another error it is `pause_s`, or the time in
    `retry-after` if that is longer. The time in `retry-after` is first lengthened at random by up to a tenth of it (at
    most 1 s)."""
    wanted_s = error.retry_after_s
    if wanted_s is None:
        return pause_s
    wanted_s += rng.uniform(0, min(1.0, 0.1 * wanted_s))  # so that not all come back at the same instant
    return max(policy.floor_s if error.means.retry is Retry.RETRY_AFTER else pause_s, wanted_s)
