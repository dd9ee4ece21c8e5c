"""How many calls an account may have at once: as many as come, until the provider says that it is overloaded (529).

Then half of those that ran, and one more for each time as many were answered, as TCP does it; and one more by time
alone, because calls that stream for minutes answer nothing meanwhile. A stray 529 says nothing of the account's calls:
it must not make a chat wait for the end of another. Pure.
"""

from math import inf

PATIENCE_S = 1.0
"""Calls that began before the limit was lowered report the same overload: within this time it counts once."""
SMOOTHING = 0.1
REGAIN_S = 5.0
"""After so long without a 529 one call more may begin than was guessed. A provider that is still overloaded says so to
that one, once in five seconds; without it, two long streams held every lane for as long as they ran."""
OFTEN = 0.25
"""Of the latest responses (smoothed), so many must be 529: the third in a row, where none was before."""


class Concurrency:
    """`ceiling` None: as many as come."""

    __slots__ = ("_backed_off_s", "_ceiling", "_overloads", "_peak", "_regained_s", "call_s", "limit", "running")

    def __init__(self, ceiling: int | None = None) -> None:
        self._ceiling: float = inf if ceiling is None else ceiling
        self._backed_off_s = -inf
        self._overloads = 0.0
        self._peak = 1
        self._regained_s = 0.0
        """Since when time counts for the next call that it gives back."""
        self.limit = self._ceiling
        self.running = 0
        self.call_s = 0.0
        """How long a call takes, smoothed."""

    @property
    def is_full(self) -> bool:
        return self.running > 0 and self.running + 1 > self.limit

    @property
    def is_limited(self) -> bool:
        """True if there is a limit at all."""
        return self.limit < inf

    @property
    def is_set(self) -> bool:
        """True if the limit is the setting's; False if an overload has lowered it by a guess."""
        return self.limit == self._ceiling

    def begin(self) -> None:
        self.running += 1
        if self.running > self._peak:
            self._peak = self.running

    def end(self, took_s: float) -> None:
        self.running = max(0, self.running - 1)
        self.call_s += (max(0.0, took_s) - self.call_s) * (SMOOTHING if self.call_s else 1.0)

    def overloaded(self, now_s: float) -> bool:
        """Lower the limit if overloads are frequent; True if it was lowered now."""
        self._overloads += (1 - self._overloads) * SMOOTHING
        self._regained_s = now_s
        if self._overloads < OFTEN or 0 <= now_s - self._backed_off_s < PATIENCE_S:
            return False
        self._backed_off_s = now_s
        # the call that was refused has been counted as running
        self.limit = max(1.0, min(self.limit, self.running) / 2)
        return True

    def answered(self) -> None:
        """Recover: twice as many as ever ran are as good as no limit."""
        self._overloads -= self._overloads * SMOOTHING
        if not self.is_set:
            self._allow(1 / self.limit)

    def regain(self, now_s: float) -> None:
        """Raise a limit that an overload has lowered, by the time that has passed."""
        if self.is_set or now_s < self._regained_s + REGAIN_S:
            return
        calls = (now_s - self._regained_s) // REGAIN_S
        self._regained_s += calls * REGAIN_S
        self._allow(calls)

    def regains_in_s(self, now_s: float) -> float:
        """In how many seconds time raises the limit by one; infinite if it was not lowered."""
        return inf if self.is_set else max(0.0, self._regained_s + REGAIN_S - now_s)

    def _allow(self, more: float) -> None:
        self.limit = min(self._ceiling, self.limit + more)
        if self.limit > 2 * self._peak:
            self.limit = self._ceiling

    def wait_s(self, ahead: int) -> float:
        """Roughly how long until one more may begin, behind `ahead` others; 0 where there is room."""
        if self.limit == inf:
            return 0.0
        missing = self.running + ahead + 1 - self.limit // 1
        return max(0.0, missing * self.call_s / self.limit)
