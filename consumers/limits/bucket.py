"""One bucket of an account: what is there, what each lane has saved of it, and when a request may take from it. Pure.

`level` is what the provider will accept. It refills at the limit, up to the bucket's size. Every lane saves its share
of what comes in, up to its reserve (its share of the size), or up to what its first request needs if that is more.

A request may go 1. if its lane has saved enough for it; 2. otherwise, if the level covers the request, the whole
reserves of the lanes above, what their first requests need, and what is held for the lanes below. For a request of the
top lane that is larger than the lane's reserve, that reserve counts instead: it takes the rest from what is held for
others; 3. otherwise, when the bucket is full, if no request waits in a lane above, and no lane below has saved all that
its first request needs: more will never be left over.

So the whole reserve of a lane above is kept for its next request. What a lane has saved is held for it. For a large
request a lane saves more than its reserve; of that, only as much is held as leaves room for the top lane, until the
lane has saved all that the request needs. Then all of it is held, and the request goes next. A bucket of a minute's
worth has room for all that lanes save; a bucket of a second's worth is too small to hold much for a large request.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

LEAST: Final = 1e-6
"""Added to what a request needs, so that rounding never makes the provider's bucket have less than ours."""


class Bucket:
    """Lanes are numbered in the order of their rank."""

    __slots__ = ("_at_s", "_caps", "_holds", "_wants", "burst", "level", "most", "parts", "per_s", "reserves", "shares")

    def __init__(
        self, per_minute: float, *, burst_s: float, shares: Sequence[float], now_s: float, late: float = 0.0
    ) -> None:
        self.shares = tuple(shares)
        self._at_s = now_s
        self.per_s = per_minute / 60
        self.burst = _burst(per_minute, burst_s)
        """The bucket's size."""
        self.most = (1 - late) * self.burst
        self.level = self.burst
        self._wants = [0.0 for _ in self.shares]
        self.reserves = [share * self.burst for share in self.shares]
        self._caps = list(self.reserves)
        self._holds = list(self.reserves)
        self.parts = list(self.reserves)
        """What each lane has saved; below 0: what it used beyond that and has to save first."""

    def resize(self, per_minute: float, *, burst_s: float, late: float, fills: bool) -> None:
        """Change the limit, after a refill; what no longer fits is lost. `fills`: the bucket held more from the
        beginning than we assumed. `late`: see `Size`."""
        self.per_s = per_minute / 60
        before, self.burst = self.burst, _burst(per_minute, burst_s)
        self.most = (1 - late) * self.burst
        self.reserves = [share * self.burst for share in self.shares]
        self._caps = [
            max(reserve, min(wanted, self.burst)) for reserve, wanted in zip(self.reserves, self._wants, strict=True)
        ]
        self._holds[0] = self.reserves[0]
        self._share_out()
        if fills and (more := self.burst - before) > 0:
            self.level += more
            self.parts = [part + share * more for part, share in zip(self.parts, self.shares, strict=True)]
        self.lower(self.burst)

    def correct(self, level: float, parts: Sequence[float], now_s: float) -> None:
        """Take over the level that Redis has computed."""
        self.level, self.parts, self._at_s = level, list(parts), now_s

    def refill(self, now_s: float) -> None:
        """Refill the bucket by what has come in since the last call."""
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        gained = passed_s * self.per_s
        level = self.level + gained
        self.level = level if level < self.burst else self.burst
        parts, caps = self.parts, self._caps
        for lane, share in enumerate(self.shares):
            part, cap, saved = parts[lane], caps[lane], gained * share
            if part < cap:
                parts[lane] = part + saved if part + saved < cap else cap
            elif part > cap:  # saved for a large request that has left its line, perhaps for a moment
                parts[lane] = part - saved if part - saved > cap else cap

    def want(self, lane: int, amount: float) -> None:
        """Set what the first waiter of a lane needs; 0: nobody waits."""
        self._wants[lane] = amount
        reserve = self.reserves[lane]
        cap = reserve if amount <= reserve else min(amount, self.burst)
        if cap == self._caps[lane]:  # the usual case
            return
        self._caps[lane] = cap
        self._share_out()

    def _share_out(self) -> None:
        """Find out how much of what each lane may save is held for it."""
        room = self.burst - self._caps[0] - sum(self.reserves[1:])
        for other in range(1, len(self.reserves)):
            more = max(0.0, min(self._caps[other] - self.reserves[other], room))
            self._holds[other] = self.reserves[other] + more
            room -= more

    def held(self, lane: int) -> float:
        """What other lanes must leave for this lane, unless they spend their own savings."""
        part = self.parts[lane]
        if part <= self._holds[lane] or part >= self._caps[lane]:
            return part if part > 0 else 0.0
        return self._holds[lane]

    def take(self, lane: int, amount: float) -> float:
        """Spend an amount; return how much of it the lane had saved. More than the bucket holds leaves a debt."""
        part, level, most = self.parts[lane], self.level, self.most
        taken = amount if amount <= part or part >= self.burst else max(part, 0.0)
        self.level = (level if level < most else most) - amount
        self.parts[lane] = part - taken
        return taken

    def give_back(self, lane: int, amount: float, *, own: float) -> None:
        """Give back what was not used; up to `own` of it returns to what the lane has saved."""
        self.level = min(self.burst, self.level + amount)
        part = self.parts[lane]
        self.parts[lane] = max(part, min(self._caps[lane], part + min(amount, own)))

    def lower(self, level: float) -> None:
        """The provider has less than we assumed: lanes cannot have saved more than that."""
        if level >= self.level:
            return
        self.level = level
        saved = sum(part for part in self.parts if part > 0)
        if saved > level:
            self.parts = [part * max(level, 0.0) / saved if part > 0 else part for part in self.parts]

    def wait_s(self, lane: int, amount: float) -> float:
        """Seconds until the amount may go, by what comes in alone; 0: now."""
        need, level, part = amount + LEAST, self.level, self.parts[lane]
        whole = need if need < self.burst else self.burst
        level_s = (whole - level) / self.per_s if level < whole else 0.0
        saved = amount if amount < self.burst else self.burst
        if part >= saved:
            return level_s
        reserve = self.reserves[lane]
        kept, is_first = need if lane or amount < reserve else reserve + LEAST, True
        for other in range(lane):
            wanted = self._wants[other]
            kept += self.reserves[other] + wanted
            is_first = is_first and wanted == 0
        below = range(lane + 1, len(self.shares))
        for other in below:  # one that has saved all that its first request needs goes first at a full bucket
            wanted = self._wants[other]
            is_first = is_first and not 0 < min(wanted, self.burst) <= self.parts[other]
        left_s = max(level_s, self._left_in_s(kept, below, is_first=is_first))
        if left_s == 0:
            return 0.0
        share = self.shares[lane]
        own_s = max(level_s, (saved - part) / (share * self.per_s)) if share else inf
        return own_s if own_s < left_s else left_s

    def _left_in_s(self, kept: float, below: Sequence[int], *, is_first: bool) -> float:
        """Seconds until the level covers `kept` and what the lanes below have saved by then."""
        level, burst = self.level, self.burst
        if is_first and level >= burst:
            return 0.0
        need, parts = kept, self.parts
        for other in below:
            need += self.held(other)
        missing = need - level
        if missing <= 0:
            return 0.0
        full_s = (burst - level) / self.per_s
        slope, passed_s = 1.0, 0.0
        filling = []
        for other in below:  # they get their share of what comes in until they have saved all that they may
            share, part = self.shares[other], parts[other]
            if share and part < self._holds[other]:
                if part < 0:  # it must pay its debt before it saves: this is the earliest time
                    return min(full_s if is_first else inf, missing / self.per_s)
                filling.append(((self._holds[other] - part) / (share * self.per_s), share))
                slope -= share
        filling.sort()
        for in_s, share in filling:
            reached = missing - slope * self.per_s * (in_s - passed_s)
            if reached <= 0:
                break
            missing, passed_s, slope = reached, in_s, slope + share
        in_s = passed_s + missing / (slope * self.per_s) if slope > 0 else inf
        if in_s <= full_s:
            return in_s
        return full_s if is_first else inf


def _burst(per_minute: float, burst_s: float) -> float:
    """The bucket's size, at least one request or token, because less could never be spent."""
    return max(1.0, per_minute * burst_s / 60)
