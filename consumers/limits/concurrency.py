"""Decides how many calls to an account at a provider may run at the same time, and which lanes may make them. Without
I/O.

At first there is no limit, or only that of the settings. If the provider often answers with 529 (overloaded), the limit
is set to half the number of calls that run. As in TCP's congestion avoidance, each answer then raises a limit of N
calls by 1/N, so that it grows by one call after about N answers. The limit also rises by one after some time without a
529, because calls can stream for minutes, so that answers may be rare. A single 529 does not lower the limit, because
it may have nothing to do with this account's calls.

While the number of calls is limited, each lane gets its share of them: whenever a call begins, the credit of every lane
with a waiting request grows by the lane's share, up to one call. A lane with a credit of one call is called "due": its
first waiting request is granted before those of more urgent lanes.
"""

from collections.abc import Sequence
from math import ceil, inf
from typing import Final

from consumers.limits.lines import Waiter

PATIENCE_S = 1.0
"""Overloads (529) within this many seconds lower the limit of calls only once, because calls that began earlier report
the same overload."""
SMOOTHING = 0.1
"""The weight of the latest call in two smoothed values: the share of overloads (529) among the answers, and the
duration of a call."""
REGAIN_S = 5.0
"""A limit of calls that overloads (529) have lowered rises by one after this many seconds without a 529. If the
provider is still overloaded, it refuses only that one additional call. Without this rule, a limit that was lowered to
one or two calls would stay that low for as long as these calls stream, and all lanes would have to wait."""
OFTEN = 0.25
"""The limit of calls is lowered if at least this part of the latest responses (a smoothed value) are 529s. The third
529 in a row reaches it."""
WHOLE: Final = 1 - 1e-9
"""A lane is due for a call if its credit is at least this. (While a lane has a waiting request, its credit grows by the
lane's share of the calls whenever a call begins.) The value is a little below 1 because of rounding errors."""


class Concurrency:
    """How many calls of one account may run at a time, how many run, and which lanes are due for a call. A lane is due
    if its credit, which grows by the lane's share whenever a call begins, has reached one call. `ceiling`: the limit of
    the settings; None: no limit. `shares`: each lane's share of the calls."""

    def __init__(self, ceiling: int | None, shares: Sequence[float]) -> None:
        self._ceiling: float = inf if ceiling is None else ceiling
        self._backed_off_s = -inf
        self._overloads = 0.0
        self._peak = 1
        self._regained_s = 0.0
        """When the provider last answered 529 (overloaded), or `regain` last raised the limit of calls, whichever is
        later."""
        self._shares = shares
        self._credit = [0.0 for _ in shares]
        self.limit = self._ceiling
        self.running = 0
        self.call_s = 0.0
        """The smoothed duration of a call in seconds."""

    @property
    def is_full(self) -> bool:
        return self.running > 0 and self.running + 1 > self.limit

    @property
    def is_limited(self) -> bool:
        """True if the number of calls that may run at a time is limited, by the operator's setting or because of
        overloads (529)."""
        return self.limit < inf

    @property
    def is_set(self) -> bool:
        """True if the limit of calls is the operator's setting, or there is none; False if overloads (529) have lowered
        it, so that it is a guess."""
        return self.limit == self._ceiling

    def begin(self, lane: int, heads: Sequence[Waiter | None]) -> None:
        """Count a call of this lane that begins. `heads`: the first waiting request of each lane, if it has one; the
        request whose call begins is still among them."""
        self.running += 1
        if self.running > self._peak:
            self._peak = self.running
        if not self.is_limited:
            return
        if self.is_due(lane):
            self._credit[lane] -= 1
        for other, waiter in enumerate(heads):
            if waiter is not None:
                self._credit[other] = min(1.0, self._credit[other] + self._shares[other])

    def is_due(self, lane: int) -> bool:
        """True if the number of calls is limited, and the lane's credit (which grows by the lane's share of the calls
        whenever a call begins) has reached one call."""
        return self.is_limited and self._credit[lane] >= WHOLE

    def calls_before(self, lane: int, count: int) -> int:
        """The largest number of calls of the account that can begin before the call of a waiting request. There is such
        a number because each lane gets its share of the calls, even if more urgent requests keep arriving. `count`: how
        many requests of the same lane wait before this one."""
        return ceil((count + 1 - self._credit[lane]) / self._shares[lane]) + 1

    def end(self, took_s: float) -> None:
        self.running = max(0, self.running - 1)
        self.call_s += (max(0.0, took_s) - self.call_s) * (SMOOTHING if self.call_s else 1.0)

    def overloaded(self, now_s: float) -> None:
        """Count an answer 529 (overloaded), and lower the limit of calls if such answers are frequent."""
        self._overloads += (1 - self._overloads) * SMOOTHING
        self._regained_s = now_s
        if self._overloads >= OFTEN and not 0 <= now_s - self._backed_off_s < PATIENCE_S:
            self._backed_off_s = now_s
            # `running` includes the call that was refused
            self.limit = max(1.0, min(self.limit, self.running) / 2)

    def answered(self) -> None:
        """Count an answer. If overloads (529) have lowered the limit N of calls at a time, raise it by 1/N, so that it
        grows by one call after about N answers."""
        self._overloads -= self._overloads * SMOOTHING
        if not self.is_set:
            self._allow(1 / self.limit)

    def regain(self, now_s: float) -> None:
        """Raise a limit that an overload (529) has lowered: by one call for every `REGAIN_S` without an overload."""
        if self.is_set or now_s < self._regained_s + REGAIN_S:
            return
        calls = (now_s - self._regained_s) // REGAIN_S
        self._regained_s += calls * REGAIN_S
        self._allow(calls)

    def regains_in_s(self, now_s: float) -> float:
        """The seconds until the limit of calls rises by one because no overload (529) came for `REGAIN_S`; infinite if
        it was not lowered."""
        return inf if self.is_set else max(0.0, self._regained_s + REGAIN_S - now_s)

    def shift(self, jump_s: float) -> None:
        self._backed_off_s += jump_s
        self._regained_s += jump_s

    def _allow(self, more: float) -> None:
        self.limit = min(self._ceiling, self.limit + more)
        if self.limit > 2 * self._peak:
            self.limit = self._ceiling

    def wait_s(self, ahead: int) -> float:
        """About how many seconds pass until one more call may begin after `ahead` other calls have begun; 0 if it may
        begin now."""
        if self.limit == inf:
            return 0.0
        missing = self.running + ahead + 1 - self.limit // 1
        return max(0.0, missing * self.call_s / self.limit)
