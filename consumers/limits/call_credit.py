"""Each lane's share of the calls when concurrency is the bottleneck. Pure.

Whenever a call begins, every lane that waits gains its share of a call, up to one call. A lane that has saved a whole
call is due: it goes before the lanes above it.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final

from consumers.limits.waiter import Waiter

WHOLE: Final = 1 - 1e-9
"""One, with room for rounding errors."""


class CallCredit:
    """The credit of the lanes of one account."""

    __slots__ = ("_saved", "_shares")

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._saved = [0.0 for _ in shares]

    def is_due(self, lane: int) -> bool:
        return self._saved[lane] >= WHOLE

    def begin(self, lane: int, heads: Sequence[Waiter | None]) -> None:
        """A call of this lane begins. `heads`: the first waiter of each lane, this one included."""
        if self.is_due(lane):
            self._saved[lane] -= 1
        for each, waiter in enumerate(heads):
            if waiter is not None:
                self._saved[each] = min(1.0, self._saved[each] + self._shares[each])

    def calls_before(self, lane: int, count: int) -> int:
        """The most calls that can begin before that of a request which has `count` others of its lane before it."""
        return ceil((count + 1 - self._saved[lane]) / self._shares[lane]) + 1
