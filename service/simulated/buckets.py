"""Rate limits like Anthropic's: three token buckets for each model class, refilled continuously, and reported in the
headers of every answer."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

from consumers.rate_limit import TokenBucket
from service.simulated.faults import Refusal

Seconds = Callable[[], float]


class RateLimitBucket(TokenBucket):
    """One rate limit. Its level may become negative: what a call used beyond the estimate is taken at its end."""

    def __init__(self, per_minute: int, *, burst_s: float, clock: Seconds) -> None:
        super().__init__(per_s=per_minute / 60, capacity=max(1.0, per_minute * burst_s / 60), clock=clock)
        self.per_minute = per_minute


class Limits:
    """Three buckets. Estimated input tokens are taken at a call's start and corrected at its end; output at its end."""

    def __init__(
        self, *, requests: int, input_tokens: int, output_tokens: int, burst_s: float, clock: Seconds = time.monotonic
    ) -> None:
        self.requests, self.input_tokens, self.output_tokens = (
            RateLimitBucket(per_minute, burst_s=burst_s, clock=clock)
            for per_minute in (requests, input_tokens, output_tokens)
        )

    def enter(self, input_tokens: int) -> None:
        """Raises `Refusal` (429) if a bucket has too little."""
        for bucket, amount, what in (
            (self.requests, 1, "requests"),
            (self.input_tokens, input_tokens, "input tokens"),
            (self.output_tokens, 1, "output tokens"),
        ):
            if (wait_s := bucket.wait_s(amount)) > 0:
                raise Refusal(
                    429,
                    f"This request would exceed the rate limit of {bucket.per_minute:,} {what} per minute.",
                    outcome="rate_limited",
                    headers={"retry-after": str(math.ceil(wait_s))},
                )
        self.requests.take(1)
        self.input_tokens.take(input_tokens)

    def settle(self, *, input_tokens: int, output_tokens: int) -> None:
        self.input_tokens.take(input_tokens)
        self.output_tokens.take(output_tokens)

    def headers(self) -> dict[str, str]:
        """As Anthropic sends them: tokens rounded to thousands, `tokens-*` of the emptier bucket."""
        now_s = time.time()
        tokens = min(self.input_tokens, self.output_tokens, key=lambda bucket: bucket.level() / bucket.capacity)
        found: dict[str, str] = {}
        for name, bucket, rounded_to in (
            ("requests", self.requests, 1),
            ("tokens", tokens, 1000),
            ("input-tokens", self.input_tokens, 1000),
            ("output-tokens", self.output_tokens, 1000),
        ):
            prefix = f"anthropic-ratelimit-{name}"
            remaining = max(0, int(bucket.level()))
            found[f"{prefix}-limit"] = str(bucket.per_minute)
            found[f"{prefix}-remaining"] = str(remaining if rounded_to == 1 else round(remaining, -3))
            found[f"{prefix}-reset"] = _rfc3339(math.ceil(now_s + bucket.full_in_s()))
        return found


@lru_cache(maxsize=16)
def _rfc3339(second: int) -> str:
    # The text is cached: most resets fall into the same second, and formatting a date is the most expensive step.
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
