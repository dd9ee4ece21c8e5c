"""The one place that decides whether a failed attempt is tried again, and when. Pure: no clock, no broker."""

import math
import random
from dataclasses import dataclass
from typing import assert_never

from consumers.failures import ProviderError, Retry
from consumers.outcomes import Buried, Refused, Retried, ended_by
from lanekeeper.contract.problems import RequestProblem

JITTER = 0.5
"""A pause is a random time between its step and one and a half of it, so that requests that failed together do not come
back together. With pauses from zero on (full jitter) four attempts were over in 0.8 to 2.7 s."""
LEAST_FACTOR = 2.0
MOST_OF_WHAT_IS_LEFT = 0.5
"""A step is at most this part of the time until the deadline. The rest is left for the attempt, and for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait between attempts.

    The first step is `floor_s` (`base_s` after a rate limit or an overload). Each further step is longer by the same
    factor, at least 2. The factor is chosen so that all pauses of a request together last `span_s`: as long as a short
    outage. No pause is shorter than `floor_s`, no step longer than `cap_s` or than half of the time left.
    """

    base_s: float = 1.0
    span_s: float = 30.0
    cap_s: float = 60.0

    @property
    def floor_s(self) -> float:
        """The shortest pause: a momentary fault is over by then."""
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
    """The next step of a request whose attempt failed: a retry after a pause, or its end.

    `attempts`: made so far, this one included. `left_ms`: until its deadline; no delay begins that would end after it.
    `has_other`: another account can be called next time, so the `retry-after` of this one does not matter.
    """
    match error.means.retry:
        case Retry.REJECTED:
            status = error.status or None
            return ended_by(RequestProblem("provider_rejected", error.detail, status=status, brief=error.brief))
        case Retry.TOO_LARGE:
            return ended_by(RequestProblem("answer_too_large", error.detail))
        case Retry.SOON:
            first_s = policy.floor_s
        case Retry.BACK_OFF | Retry.AS_TOLD:
            first_s = policy.base_s
        case never:
            assert_never(never)
    if attempts >= max_attempts:
        return ended_by(
            RequestProblem(
                "attempts_exhausted",
                f"all {attempts} attempts failed; the last: {error.detail}",
                brief=f"after {attempts} attempts: {error.brief}",
            )
        )
    pause_s = _step_s(
        first_s, failures=attempts, pauses=max_attempts - 1, left_s=left_ms / 1000, policy=policy
    ) * rng.uniform(1, 1 + JITTER)
    if not has_other:
        pause_s = _as_told(error, pause_s, policy=policy, rng=rng)
    delay_ms = math.ceil(1000 * pause_s)
    if delay_ms >= left_ms:
        return ended_by(
            RequestProblem(
                "deadline_exceeded",
                f"attempt {attempts} failed ({error.detail}), and the next could start in {delay_ms} ms: "
                f"{max(0, left_ms)} ms are left",
                brief=f"after attempt {attempts}: {error.brief}",
            )
        )
    return Retried(delay_ms=delay_ms, error=error.detail, brief=error.brief)


def _step_s(first_s: float, *, failures: int, pauses: int, left_s: float, policy: RetryPolicy) -> float:
    """The pause after that many failures, without jitter. `pauses`: how many a request may have in all."""
    factor = _factor(policy.span_s / first_s, pauses)
    exponent = min(failures - 1, 1000 / math.log2(factor))  # beyond this a float overflows
    step_s = first_s * math.pow(factor, exponent)
    return max(policy.floor_s, min(step_s, policy.cap_s, left_s * MOST_OF_WHAT_IS_LEFT))


def _factor(total: float, count: int) -> float:
    """The smallest f, from `LEAST_FACTOR` on, for which 1 + f + f² + … (`count` terms) is `total` or more.

    A single pause cannot grow: with two attempts, the pause is one first step.
    """

    def is_enough(factor: float) -> bool:
        return sum(factor**n for n in range(count)) >= total

    if count < 2 or is_enough(LEAST_FACTOR):
        return LEAST_FACTOR
    low, high = LEAST_FACTOR, math.pow(total, 1 / (count - 1))  # with this factor the last term alone reaches the total
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _as_told(error: ProviderError, pause_s: float, *, policy: RetryPolicy, rng: random.Random) -> float:
    """The pause if the provider sent a `retry-after`: exactly that after a rate limit, at least that after an
    overload."""
    told_s = error.retry_after_s
    if told_s is None:
        return pause_s
    told_s += rng.uniform(0, min(1.0, 0.1 * told_s))  # so that not all come back at the same instant
    return max(policy.floor_s if error.means.retry is Retry.AS_TOLD else pause_s, told_s)
