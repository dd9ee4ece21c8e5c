"""One bucket of an account: what is there, and how much of it each lane may count on. Pure; time is passed in.

`level` is what the provider will take: refilled at the limit, up to the burst. A lane's part is a claim on it, refilled
at the lane's share and full at the share of the burst, so that it is there at once when the lane comes; what overflows
is the level's alone, and so lent to whoever waits. The pool is what no part claims.

A part holds as much more as its lane's first waiter needs (`want`): a request that is larger than the share of the
burst is saved for, and cannot be starved by smaller ones; and nothing of the share is lost while the level makes it
wait.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

LEAST: Final = 1e-6
"""More than is needed, so that the provider's bucket has it too, whatever the rounding of either."""


class Bucket:
    """Lanes are numbered in the order of their rank."""

    __slots__ = ("_at_s", "_caps", "_full", "_shares", "burst", "level", "most", "parts", "per_s")

    def __init__(
        self, per_minute: float, *, burst_s: float, shares: Sequence[float], now_s: float, late: float = 0.0
    ) -> None:
        self._shares = tuple(shares)
        self._at_s = now_s
        self.per_s = per_minute / 60
        self.burst = _burst(per_minute, burst_s)
        self.most = (1 - late) * self.burst
        self.level = self.burst
        self._full = [share * self.burst for share in self._shares]
        self._caps = list(self._full)
        self.parts = list(self._full)

    def resize(self, per_minute: float, *, burst_s: float, late: float, fills: bool) -> None:
        """Another limit from now on (refilled before); what no longer fits is gone. With `fills` there was more in it
        from the beginning than we thought. `late`: see `Size`."""
        self.per_s = per_minute / 60
        before, self.burst = self.burst, _burst(per_minute, burst_s)
        self.most = (1 - late) * self.burst
        self._full = [share * self.burst for share in self._shares]
        if fills and (more := self.burst - before) > 0:
            self.level += more
            self.parts = [part + share * more for part, share in zip(self.parts, self._shares, strict=True)]
        self.lower(self.burst)

    def correct(self, level: float, parts: Sequence[float], now_s: float) -> None:
        """What another has counted."""
        self.level, self.parts, self._at_s = level, list(parts), now_s

    def refill(self, now_s: float) -> None:
        """What has come in since the last time."""
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        gained = passed_s * self.per_s
        level = self.level + gained
        self.level = level if level < self.burst else self.burst
        parts, caps = self.parts, self._caps
        for lane, share in enumerate(self._shares):
            part = parts[lane] + gained * share
            cap = caps[lane]
            parts[lane] = part if part < cap else cap

    def want(self, lane: int, amount: float) -> None:
        """What the first waiter of a lane needs; 0: nobody waits."""
        cap = self._full[lane] + amount
        self._caps[lane] = cap if cap < self.burst else self.burst

    def free(self, lane: int) -> float:
        """What no other lane's part claims."""
        free = self.level
        for other, part in enumerate(self.parts):
            if part > 0 and other != lane:
                free -= part
        return free

    def take(self, lane: int, amount: float, *, own: bool) -> float:
        """Spend it; what of it came from the lane's part. With `own` all of it, even if that leaves a debt."""
        part, level, most = self.parts[lane], self.level, self.most
        taken = amount if own else min(max(part, 0.0), amount)
        self.level = (level if level < most else most) - amount
        self.parts[lane] = part - taken
        return taken

    def give_back(self, lane: int, amount: float, *, own: float) -> None:
        """What was not used after all, `own` of it to the lane's part."""
        self.level = min(self.burst, self.level + amount)
        self.parts[lane] = min(self._caps[lane], self.parts[lane] + min(amount, own))

    def charge(self, lane: int, amount: float) -> None:
        """What was used beyond what was taken: it may leave a debt."""
        self.take(lane, amount, own=False)

    def lower(self, level: float) -> None:
        """The provider has less than we thought; no more than that is claimed."""
        if level >= self.level:
            return
        self.level = level
        claimed = sum(part for part in self.parts if part > 0)
        if claimed > level:
            self.parts = [part * level / claimed if part > 0 else part for part in self.parts]

    def part_wait_s(self, lane: int, amount: float) -> float:
        """Seconds until the lane's own part is enough; of what is larger than the bucket, the whole bucket."""
        missing = (amount if amount < self.burst else self.burst) - self.parts[lane]
        if missing <= 0:
            return 0.0
        per_s = self._shares[lane] * self.per_s
        return missing / per_s if per_s else inf

    def level_wait_s(self, amount: float) -> float:
        """Seconds until the provider will take it; of what is larger than the bucket, until that is full."""
        need = amount + LEAST
        missing = (need if need < self.burst else self.burst) - self.level
        return missing / self.per_s if missing > 0 else 0.0

    def shared_wait_s(self, lane: int, amount: float) -> float:
        """Seconds until the lane's own part and the pool are enough together, or everything is full; if nobody takes
        anything before."""
        need, free = amount + LEAST, self.free(lane)
        if free >= need or self.level >= self.burst:
            return 0.0
        full_in_s = (self.burst - self.level) / self.per_s
        filling = []  # parts of other lanes take what comes until they are full, then leave it to the pool
        for other, part in enumerate(self.parts):
            share = self._shares[other]
            if other != lane and share and part < self._caps[other]:
                if part < 0:  # in debt: it claims nothing yet. Looked at again before
                    return min(full_in_s, (need - free) / self.per_s)
                filling.append(((self._caps[other] - part) / (share * self.per_s), share))
        filling.sort()
        slope, passed_s = 1.0 - sum(share for _, share in filling), 0.0
        for in_s, share in filling:
            reached = free + slope * self.per_s * (in_s - passed_s)
            if reached >= need:
                break
            free, passed_s, slope = reached, in_s, slope + share
        per_s = slope * self.per_s
        return min(full_in_s, passed_s + (need - free) / per_s) if per_s > 0 else full_in_s


def _burst(per_minute: float, burst_s: float) -> float:
    """At least one request or token: less could never be spent."""
    return max(1.0, per_minute * burst_s / 60)
