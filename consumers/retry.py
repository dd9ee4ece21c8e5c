"""The one place that decides whether a failed attempt is tried again, and when. Pure: no clock, no broker."""

import math
import random
from dataclasses import dataclass

from consumers.failures import (
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    SpendLimitError,
    TransientError,
)
from consumers.job import Buried, Refused, Retried, ended_by
from topology.contract.problems import RequestProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait between attempts.

    Full jitter: a delay is drawn from zero (from half, for an overload) to the step, because requests that failed
    together must not come back together. The steps double from `base_s` to `cap_s`.
    """

    base_s: float = 1.0
    cap_s: float = 60.0


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
    """What becomes of a request whose attempt failed.

    `attempts`: made so far, this one included. `left_ms`: until its deadline; no delay begins that would end after it.
    `has_other`: another account may be asked next time, so that nobody waits for as long as this one told.
    """
    if isinstance(error, (RejectedError, SpendLimitError)):
        return ended_by(RequestProblem("provider_rejected", error.detail, status=error.status or None))
    if attempts >= max_attempts:
        return ended_by(
            RequestProblem("attempts_exhausted", f"all {attempts} attempts failed; the last: {error.detail}")
        )
    delay_ms = math.ceil(1000 * _delay_s(error, failures=attempts, policy=policy, rng=rng, has_other=has_other))
    if delay_ms >= left_ms:
        return ended_by(
            RequestProblem(
                "deadline_exceeded",
                f"attempt {attempts} failed ({error.detail}), and the next could start in {delay_ms} ms: "
                f"{max(0, left_ms)} ms are left",
            )
        )
    return Retried(delay_ms=delay_ms, error=error.detail)


def _delay_s(error: ProviderError, *, failures: int, policy: RetryPolicy, rng: random.Random, has_other: bool) -> float:
    match error:
        case RateLimitedError(retry_after_s=told) | OverloadedError(retry_after_s=told) if (
            told is not None and not has_other
        ):
            # never before the time told, and not all in the same instant after it
            return told + rng.uniform(0, min(1.0, 0.1 * told))
        case RateLimitedError() | OverloadedError():
            step_s = min(policy.cap_s, policy.base_s * 2 ** (failures - 1))
            return rng.uniform(step_s / 2, step_s)
        case TransientError():
            if failures == 1:
                return 0.0
            return rng.uniform(0, min(policy.cap_s, policy.base_s * 2 ** (failures - 2)))
        case _:
            return rng.uniform(0, policy.base_s)
