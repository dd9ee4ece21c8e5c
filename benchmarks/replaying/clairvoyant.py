"""A bound for comparison: the waits at a gate that knows all future requests and what each of them will use. Pure.

Critical requests are placed first, as if they had the whole account. Then each normal request is placed as early as
possible without delaying a critical one. Batch gets the rest, so it gets nothing of the full buckets at the beginning.
(A gate that does not know the future gives batch everything beyond the reserves.)
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replaying.load import Ask
from consumers.limits.base import Amounts

NOW = 1e-9


@dataclass(slots=True)
class _Call:
    """A call that starts at `at_s`. For each bucket: its level before the call (`before`), and the refill that was lost
    since the previous call because the bucket was full (`spilt`)."""

    at_s: float
    used: Amounts
    before: list[float]
    spilt: list[float]


class Clairvoyant:
    """The planned calls of one account."""

    def __init__(self, limits: Amounts, *, bucket_s: float) -> None:
        self._per_s = [limit / 60 for limit in limits]
        self._most = [max(1.0, limit * bucket_s / 60) for limit in limits]
        self._calls: list[_Call] = []

    def place(self, asks: Sequence[Ask]) -> list[float]:
        """Plan these requests; returns their starts in the order of arrival. Calls that were planned before are not
        delayed."""
        last_s = 0.0
        found = []
        for ask in asks:
            last_s = self._earliest(max(last_s, ask.arrived_s), ask.used)
            self._insert(last_s, ask.used)
            found.append(last_s)
        return found

    def _earliest(self, at_s: float, used: Amounts) -> float:
        need = [min(amount, most) for amount, most in zip(used, self._most, strict=True)]
        after = bisect_right(self._calls, at_s, key=lambda call: call.at_s)
        while True:
            levels = self._levels(at_s, after)
            in_s = max((n - level) / per_s for n, level, per_s in zip(need, levels, self._per_s, strict=True))
            if in_s > NOW:
                at_s += in_s
                if after < len(self._calls) and self._calls[after].at_s <= at_s:
                    at_s, after = self._calls[after].at_s, after + 1
                continue
            blocking = self._blocking(at_s, after, used)
            if blocking is None:
                return at_s
            # starting later, but still before the blocking call, would leave no more for that call
            at_s, after = self._calls[blocking].at_s, blocking + 1

    def _blocking(self, at_s: float, after: int, used: Amounts) -> int | None:
        """The first planned call that would find too little in a bucket; None if there is none."""
        levels, missing = self._levels(at_s, after), list(used)
        since_s = at_s
        for number in range(after, len(self._calls)):
            call = self._calls[number]
            for each in range(3):
                if number == after:
                    full = levels[each] + (call.at_s - since_s) * self._per_s[each] - self._most[each]
                    spilt = max(0.0, full)
                else:
                    spilt = call.spilt[each]
                missing[each] = max(0.0, missing[each] - spilt)
                if (
                    missing[each] > 0
                    and call.before[each] - missing[each] < min(call.used[each], self._most[each]) - NOW
                ):
                    return number
            if not any(missing):
                return None
        return None

    def _levels(self, at_s: float, after: int) -> list[float]:
        """The buckets' levels at `at_s`, after the first `after` calls."""
        if after == 0:
            return list(self._most)
        call = self._calls[after - 1]
        return [
            min(most, before - amount + (at_s - call.at_s) * per_s)
            for most, before, amount, per_s in zip(self._most, call.before, call.used, self._per_s, strict=True)
        ]

    def _insert(self, at_s: float, used: Amounts) -> None:
        place = bisect_right(self._calls, at_s, key=lambda call: call.at_s)
        self._calls.insert(place, _Call(at_s, used, [], []))
        for number in range(place, len(self._calls)):
            call = self._calls[number]
            before = self._levels(call.at_s, number)
            if number > place and before == call.before:
                break
            call.before = before
            since = self._calls[number - 1] if number else None
            for_s = call.at_s - since.at_s if since else call.at_s
            had = [b - u for b, u in zip(since.before, since.used, strict=True)] if since else self._most
            call.spilt = [
                max(0.0, level + for_s * per_s - most)
                for level, per_s, most in zip(had, self._per_s, self._most, strict=True)
            ]
