"""How fast each lane has spent lately. Forecasts for lower lanes assume that it goes on. Pure; time is passed in."""

from collections.abc import Sequence
from math import exp

from consumers.limits.amounts import Amounts

WITHIN_S = 60.0
"""The weight of what was spent falls to about a third (1/e) within this time."""


class Demand:
    """The spending of each lane from each bucket."""

    __slots__ = ("_at_s", "_spent")

    def __init__(self, lanes: int, *, now_s: float) -> None:
        self._spent = [[0.0, 0.0, 0.0] for _ in range(lanes)]
        self._at_s = [now_s for _ in range(lanes)]

    def add(self, lane: int, amounts: Amounts, now_s: float) -> None:
        """Add an amount that was granted, or used beyond the grant; below 0: an amount that was given back."""
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

    def per_s(self, lanes: Sequence[int], each: int, now_s: float) -> float:
        """What these lanes take per second from one bucket (`each`: its place in `Amounts`)."""
        return sum(
            max(0.0, self._spent[lane][each]) * exp(min(0.0, self._at_s[lane] - now_s) / WITHIN_S) / WITHIN_S
            for lane in lanes
        )
