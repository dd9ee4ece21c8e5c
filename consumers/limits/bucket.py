"""A token bucket of a provider's account, and the rule that says which lane may take from it. Times are passed in."""

from collections.abc import Sequence
from math import inf
from typing import Final

ROUNDING: Final = 1e-6
"""This amount is added to what a request needs, so that rounding errors never make our copy of a bucket fuller than the
provider's bucket."""


class Bucket:
    """One token bucket of a provider's account, and the rule that says when a request of a lane may take from it. Lanes
    "above" are more urgent, lanes "below" less urgent.

    The level is the amount that the provider will accept now. It rises at the rate of the limit, up to the bucket's
    size. A lane's savings are the part of the level that belongs to this lane. They grow by the lane's share of what
    flows in, up to the lane's reserve (its share of the bucket's size), or up to what the lane's first waiting request
    needs if that is more.

    A request may take from the bucket in one of three cases:

    1. Its lane's savings cover the request.
    2. The level covers the sum of what the request needs, the whole reserves of the lanes above, what the first waiting
       requests of those lanes need, and the savings held for the lanes below. (If the request is of the most urgent
       lane and larger than the lane's reserve, only the reserve is counted in this sum: the request takes the rest from
       what is held for other lanes.)
    3. The bucket is full, no request waits in a lane above, and no lane below has saved all that its first waiting
       request needs. The level cannot rise further, so waiting would not help.

    A lane's savings are held, which means that the lanes above may not spend them. If a lane saves more than its
    reserve because its first request is large, the excess is held only as far as the bucket also has room for the other
    lanes' reserves and for the first request of the most urgent lane. When the savings cover the large request, all of
    them are held, and the request is granted next. A bucket that holds a minute's worth of the limit has room for all
    savings; a bucket that holds a second's worth is too small to hold much for a large request.
    """

    def __init__(self, per_minute: float, size: float, *, shares: Sequence[float], now_s: float) -> None:
        self.shares = tuple(shares)
        self._at_s = now_s
        self.burst = 0.0
        self.level = 0.0
        self._wants = [0.0 for _ in self.shares]
        self.savings = [0.0 for _ in self.shares]
        """What each lane has saved. A negative value is a debt, which the lane must pay before it saves again."""
        self.resize(per_minute, size, fills=True)

    def resize(self, per_minute: float, size: float, *, fills: bool) -> None:
        """Change the limit and the size; call `refill` before. `fills`: if the bucket becomes larger, raise its level
        by the difference, because the provider's bucket was that large from the beginning."""
        self.per_s = per_minute / 60
        # at least one, because no call could take anything from a smaller bucket
        before, self.burst = self.burst, max(1.0, size)
        self.reserves = [share * self.burst for share in self.shares]
        self._caps = [
            max(reserve, min(wanted, self.burst)) for reserve, wanted in zip(self.reserves, self._wants, strict=True)
        ]
        self._share_out()
        if fills and (more := self.burst - before) > 0:
            self.level += more
            self.savings = [saved + share * more for saved, share in zip(self.savings, self.shares, strict=True)]
        self.lower(self.burst)

    def set(self, level: float, savings: Sequence[float], now_s: float) -> None:
        self.level, self.savings, self._at_s = level, list(savings), now_s

    def refill(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        gained = passed_s * self.per_s
        level = self.level + gained
        self.level = level if level < self.burst else self.burst
        savings, caps = self.savings, self._caps
        for lane, share in enumerate(self.shares):
            saved, cap, step = savings[lane], caps[lane], gained * share
            if saved < cap:
                savings[lane] = saved + step if saved + step < cap else cap
            elif saved > cap:  # the lane saved for a large request that has left its line; it may come back soon
                savings[lane] = saved - step if saved - step > cap else cap

    def want(self, lane: int, amount: float) -> None:
        self._wants[lane] = amount
        reserve = self.reserves[lane]
        cap = reserve if amount <= reserve else min(amount, self.burst)
        if cap == self._caps[lane]:  # the usual case
            return
        self._caps[lane] = cap
        self._share_out()

    def _share_out(self) -> None:
        """Compute for each lane (in `_holds`) up to which amount its savings are held."""
        self._holds = list(self.reserves)
        room = self.burst - self._caps[0] - sum(self.reserves[1:])
        for other in range(1, len(self.reserves)):
            more = max(0.0, min(self._caps[other] - self.reserves[other], room))
            self._holds[other] += more
            room -= more

    def held(self, lane: int) -> float:
        saved = self.savings[lane]
        if saved <= self._holds[lane] or saved >= self._caps[lane]:
            return saved if saved > 0 else 0.0
        return self._holds[lane]

    def take(self, lane: int, amount: float) -> float:
        saved = self.savings[lane]
        from_savings = amount if amount <= saved or saved >= self.burst else max(saved, 0.0)
        self.level -= amount
        self.savings[lane] = saved - from_savings
        return from_savings

    def give_back(self, lane: int, amount: float, *, from_savings: float) -> None:
        """Give back an amount that was taken and not used."""
        self.level = min(self.burst, self.level + amount)
        saved = self.savings[lane]
        self.savings[lane] = max(saved, min(self._caps[lane], saved + min(amount, from_savings)))

    def lower(self, level: float) -> None:
        """Lower the level to `level`, the amount that the provider says is left of its limit. If the lanes' savings
        together exceed it, they are scaled down to it; debts stay as they are."""
        if level >= self.level:
            return
        self.level = level
        total = sum(saved for saved in self.savings if saved > 0)
        if total > level:
            self.savings = [saved * max(level, 0.0) / total if saved > 0 else saved for saved in self.savings]

    def wait_s(self, lane: int, amount: float) -> float:
        """Seconds until a request of this lane may take the amount, if nothing else is taken or given back."""
        need, level, saved = amount + ROUNDING, self.level, self.savings[lane]
        whole = need if need < self.burst else self.burst
        level_s = (whole - level) / self.per_s if level < whole else 0.0
        enough = amount if amount < self.burst else self.burst
        if saved >= enough:
            return level_s
        reserve = self.reserves[lane]
        kept, is_first = need if lane or amount < reserve else reserve + ROUNDING, True
        for other in range(lane):
            wanted = self._wants[other]
            kept += self.reserves[other] + wanted
            is_first = is_first and wanted == 0
        below = range(lane + 1, len(self.shares))
        for other in below:  # at a full bucket, a lane below that has saved all that its first request needs goes first
            wanted = self._wants[other]
            is_first = is_first and not 0 < min(wanted, self.burst) <= self.savings[other]
        left_s = max(level_s, self._left_in_s(kept, below, is_first=is_first))
        if left_s == 0:
            return 0.0
        share = self.shares[lane]
        own_s = max(level_s, (enough - saved) / (share * self.per_s))
        return own_s if own_s < left_s else left_s

    def _left_in_s(self, kept: float, below: Sequence[int], *, is_first: bool) -> float:
        """Seconds until a request may take what other lanes leave, that is, until the level covers `kept` (the request,
        and what is kept for more urgent lanes) and the savings that will then be held for the less urgent lanes
        (`below`). `is_first`: True if no lane must go before it when the bucket is full (the third case in the class's
        docstring)."""
        if is_first and self.level >= self.burst:
            return 0.0
        need = kept
        for other in below:
            need += self.held(other)
        missing = need - self.level
        if missing <= 0:
            return 0.0
        full_s = (self.burst - self.level) / self.per_s
        filling = []
        for other in below:  # each saves its share of what flows in, until its savings reach `_holds`
            share, saved = self.shares[other], self.savings[other]
            if saved < self._holds[other]:
                if saved < 0:  # the lane must pay its debt before it saves, so this is the earliest time
                    return min(full_s if is_first else inf, missing / self.per_s)
                filling.append(((self._holds[other] - saved) / (share * self.per_s), share * self.per_s))
        in_s = flows_in_s(missing, self.per_s - sum(per_s for _, per_s in filling), filling)
        if in_s <= full_s:
            return in_s
        return full_s if is_first else inf


def flows_in_s(missing: float, per_s: float, filling: Sequence[tuple[float, float]]) -> float:
    """Seconds until the amount `missing` has flowed into a bucket for a request. `filling`: for each lane
    that will have saved enough, after how many seconds the rate rises, and by how much per second."""
    passed_s = 0.0
    for in_s, more_per_s in sorted(filling):
        reached = missing - per_s * (in_s - passed_s)
        if reached <= 0:
            break
        missing, passed_s, per_s = reached, in_s, per_s + more_per_s
    return passed_s + missing / per_s if per_s > 0 else inf
