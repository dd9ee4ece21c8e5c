"""The provider in virtual time: it uses the buckets and headers of the simulated API, without HTTP."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from consumers.limits import headers
from consumers.limits.base import Amounts
from consumers.limits.headers import RateHeaders
from service.simulated.buckets import Limits
from service.simulated.errors import Refusal


@dataclass(frozen=True, slots=True)
class Answer:
    """The provider's answer to a new call: 200 (admitted; it ends later), 429 or 500."""

    status: int
    rate: RateHeaders | None = None
    retry_after_s: float | None = None


class Provider:
    """A provider with limits. `down_s`: the period in which it answers 500 to every call; None: never."""

    def __init__(
        self, limits: Amounts, *, bucket_s: float, down_s: tuple[float, float] | None, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._down_s = down_s
        requests, input_tokens, output_tokens = (round(each) for each in limits)
        self._limits = Limits(
            requests=requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            burst_s=bucket_s,
            clock=clock,
        )

    def warm_up(self) -> RateHeaders | None:
        """The rate-limit headers of one answer, with full buckets."""
        rate = self.enter(1000).rate
        self.end(input_tokens=1000, output_tokens=100)
        return rate

    def enter(self, input_tokens: int) -> Answer:
        """A call arrives. Its estimated input is taken from the bucket, as the simulated API does."""
        if self._down_s is not None and self._down_s[0] <= self._clock() < self._down_s[1]:
            return Answer(500)
        try:
            self._limits.enter(_estimated(input_tokens))
        except Refusal as refusal:
            return Answer(429, _read(refusal.headers), float(refusal.headers["retry-after"]))
        return Answer(200, _read(self._limits.headers()))

    def end(self, *, input_tokens: int, output_tokens: int) -> None:
        """The answer is complete: its output counts, and the estimate is corrected."""
        self._limits.settle(input_tokens=input_tokens - _estimated(input_tokens), output_tokens=output_tokens)


def _estimated(input_tokens: int) -> int:
    return input_tokens * 4 // 3


def _read(answer_headers: Mapping[str, str]) -> RateHeaders | None:
    # reset times are wall-clock times; `read` checks only that they are near
    return headers.read(answer_headers, now_s=time.time())
