"""Gives each lane its share of an account's calls while the number of calls at a time is the bottleneck. Without I/O.

Whenever a call begins, the credit of every lane with a waiter grows by the lane's share, up to one call. A lane with a
credit of one call is due: its request is granted before those of more urgent lanes.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final

from consumers.limits.lines import Waiter

WHOLE: Final = 1 - 1e-9
"""A lane's credit of at least this value counts as one whole call. It is a little below 1 because of rounding
errors."""


class CallCredit:
    """Counts how many calls of one account each lane may claim as its share, while the number of calls at a time is
    limited. A lane's credit grows with every call that begins, and a lane with a credit of one call goes first."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._credit = [0.0 for _ in shares]

    def is_due(self, lane: int) -> bool:
        return self._credit[lane] >= WHOLE

    def begin(self, lane: int, heads: Sequence[Waiter | None]) -> None:
        """Count a call of this lane that begins, and add each waiting lane's share to its credit. `heads`: the first
        waiting request of each lane, including the one whose call begins."""
        if self.is_due(lane):
            self._credit[lane] -= 1
        for other, waiter in enumerate(heads):
            if waiter is not None:
                self._credit[other] = min(1.0, self._credit[other] + self._shares[other])

    def calls_before(self, lane: int, count: int) -> int:
        """The most calls of the account that can begin before the call of a waiting request. `count`: how many requests
        of its lane wait before it."""
        return ceil((count + 1 - self._credit[lane]) / self._shares[lane]) + 1
