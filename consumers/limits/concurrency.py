"""How many calls an account may have at once: no limit unless one is set, until the provider is overloaded (529). Pure.

Then the limit is half of the calls that ran. As in TCP, it rises by one each time that as many calls as the limit were
answered. It also rises by one after some time without an answer, because calls can stream for minutes. A single 529
says nothing about the account's calls, and must not make a chat wait for the end of another one."""

from math import inf

PATIENCE_S = 1.0
"""Calls that began before the limit was lowered report the same overload: within this time it counts once."""
SMOOTHING = 0.1
REGAIN_S = 5.0
"""After each such time without 529, a lowered limit rises by one call. If the provider is still overloaded, it refuses
that one call, once in five seconds. Without this, two long streams blocked every lane for as long as they ran."""
OFTEN = 0.25
"""The limit falls if this part of the latest responses (smoothed) is 529; if none came before, that is the third in a
row."""


class Concurrency:
    """`ceiling`: the limit that is set; None: no limit."""

    __slots__ = ("_backed_off_s", "_ceiling", "_overloads", "_peak", "_regained_s", "call_s", "limit", "running")

    def __init__(self, ceiling: int | None = None) -> None:
        self._ceiling: float = inf if ceiling is None else ceiling
        self._backed_off_s = -inf
        self._overloads = 0.0
        self._peak = 1
        self._regained_s = 0.0
        """The time from which on the next rise by time is counted."""
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
        # `running` includes the call that was refused
        self.limit = max(1.0, min(self.limit, self.running) / 2)
        return True

    def answered(self) -> None:
        """Raise a lowered limit by one call for as many answers as the limit allows calls."""
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
        """The seconds until the limit rises by one with time; infinite if it was not lowered."""
        return inf if self.is_set else max(0.0, self._regained_s + REGAIN_S - now_s)

    def shift(self, jump_s: float) -> None:
        self._backed_off_s += jump_s
        self._regained_s += jump_s

    def _allow(self, more: float) -> None:
        self.limit = min(self._ceiling, self.limit + more)
        if self.limit > 2 * self._peak:
            self.limit = self._ceiling

    def wait_s(self, ahead: int) -> float:
        """Roughly how many seconds until one more call may begin, behind `ahead` others; 0 if there is room."""
        if self.limit == inf:
            return 0.0
        missing = self.running + ahead + 1 - self.limit // 1
        return max(0.0, missing * self.call_s / self.limit)
