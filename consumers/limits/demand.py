"""Measures how fast each lane has used a provider's budget lately. Forecasts of waits assume that more urgent lanes go
on at this rate. Without I/O; times are passed in."""

from collections.abc import Sequence
from math import exp

from consumers.limits.base import Amounts

WITHIN_S = 60.0
"""The time constant, in seconds, with which used amounts of a budget lose weight: after this time an amount counts only
about a third (1/e)."""


class Demand:
    """How much each lane has taken from each token bucket of a provider's account lately; older amounts count less."""

    def __init__(self, lanes: int, *, now_s: float) -> None:
        self._spent = [[0.0, 0.0, 0.0] for _ in range(lanes)]
        self._at_s = [now_s for _ in range(lanes)]

    def add(self, lane: int, amounts: Amounts, now_s: float) -> None:
        """Add the requests and tokens that a lane's call has reserved, or has used beyond its reservation. If the call
        has used less than was reserved, `amounts` are the differences, which are negative."""
        requests, input_tokens, output_tokens = self._spent[lane]
        passed_s = now_s - self._at_s[lane]
        self._at_s[lane] = now_s
        kept = exp(-passed_s / WITHIN_S) if passed_s > 0 else 1.0
        self._spent[lane] = [
            requests * kept + amounts[0],
            input_tokens * kept + amounts[1],
            output_tokens * kept + amounts[2],
        ]

    def shift(self, jump_s: float) -> None:
        self._at_s = [at_s + jump_s for at_s in self._at_s]

    def per_s(self, lanes: Sequence[int], index: int, now_s: float) -> float:
        """The amount that these lanes together have lately spent per second from one token bucket. `index`: the
        bucket's index in `Amounts`."""
        return sum(
            max(0.0, self._spent[lane][index]) * exp(min(0.0, self._at_s[lane] - now_s) / WITHIN_S) / WITHIN_S
            for lane in lanes
        )
