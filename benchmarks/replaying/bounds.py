"""Bounds for comparison, all pure: the waits of a lane that has its own provider account; at a gate without reserves
and with exact estimates; and at a gate that knows all future requests.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.replaying.load import Ask, job, load
from benchmarks.replaying.scenarios import LANES, Scenario
from consumers.limits.base import Amounts

TRAVEL_S = 0.011
"""The average time to the provider and back."""
NOW = 1e-9


@dataclass(frozen=True)
class Own:
    """An account with the part `part` of each limit. Its buckets hold the part `deep` of what the provider's buckets
    hold."""

    part: float
    deep: float

    @classmethod
    def of(cls, scenario: Scenario, lane: str) -> "Own":
        """The account that corresponds to a lane's share. The top lane's account also gets the part that is no lane's
        share."""
        shares = scenario.spec.shares
        is_first = lane == LANES[0]
        part = 1 - sum(share for name, share in shares.items() if name != lane) if is_first else shares[lane]
        return cls(part, shares[lane])

    def __str__(self) -> str:
        return f"own {100 * self.part:.0f} %, {100 * self.deep:.0f} % deep"


def own_starts_s(asks: Sequence[Ask], own: Own, *, limits: Amounts, bucket_s: float) -> list[float]:
    """When each request of a lane with its own account would start, in the order of arrival. As at the gate, the
    amounts that a request is expected to use are taken when it starts, and corrected when it is answered. A request
    that is larger than a bucket starts when the bucket is full."""
    per_s = [own.part * limit / 60 for limit in limits]
    most = [max(1.0, own.deep * limit * bucket_s / 60) for limit in limits]
    levels, at_s = list(most), 0.0
    settlements: list[tuple[float, Amounts]] = []
    found: list[float] = []

    def forward(to_s: float) -> None:
        nonlocal at_s
        for each in range(3):
            levels[each] = min(most[each], levels[each] + (to_s - at_s) * per_s[each])
        at_s = to_s

    for ask in asks:
        wanted = ask.reserved or ask.used
        now_s = max(ask.arrived_s, at_s)
        while True:
            while settlements and settlements[0][0] <= now_s:
                when_s, back = heapq.heappop(settlements)
                forward(when_s)
                levels[:] = [min(full, level + more) for full, level, more in zip(most, levels, back, strict=True)]
            forward(now_s)
            missing = (
                (min(amount, full) - level) / rate
                for amount, full, level, rate in zip(wanted, most, levels, per_s, strict=True)
            )
            if (in_s := max(missing)) <= 1e-9:
                break
            now_s = min(now_s + in_s, settlements[0][0]) if settlements else now_s + in_s
        levels[:] = [level - amount for level, amount in zip(levels, wanted, strict=True)]
        found.append(now_s)
        back = Amounts(*(amount - used for amount, used in zip(wanted, ask.used, strict=True)))
        heapq.heappush(settlements, (now_s + ask.takes_s + TRAVEL_S, back))
    return found


def starts_s(scenario: Scenario, lines: Mapping[str, Sequence[Ask]], *, by_lane: bool) -> dict[str, list[float]]:
    """When each critical and normal request would start without reserves and with exact estimates, in the order of
    arrival: as soon as the buckets hold what it will use. `by_lane`: the first by lane goes first, and a batch job only
    if no other request waits; else the first by arrival."""
    recorded, rng = load(scenario), random.Random(scenario.seed)
    per_s = [limit / 60 for limit in recorded.limits]
    most = [max(1.0, limit * scenario.bucket_s / 60) for limit in recorded.limits]
    levels, now_s = list(most), 0.0
    jobs = [job(next(recorded.jobs), 0.0, rng) for _ in range(scenario.jobs)]
    found: dict[str, list[float]] = {lane: [] for lane in lines}
    while left := {lane: line[len(found[lane])] for lane, line in lines.items() if len(found[lane]) < len(line)}:
        waiting = [(lane, ask) for lane, ask in left.items() if ask.arrived_s <= now_s] + [("", jobs[0])]
        lane, first = waiting[0] if by_lane else min(waiting, key=lambda each: each[1].arrived_s)
        need = [min(used, full) for used, full in zip(first.used, most, strict=True)]
        in_s = max((n - level) / rate for n, level, rate in zip(need, levels, per_s, strict=True))
        if in_s > NOW:
            comes_s = min((ask.arrived_s for ask in left.values() if ask.arrived_s > now_s), default=inf)
            until_s = min(now_s + in_s, comes_s)
            gained = until_s - now_s
            levels = [min(full, level + gained * rate) for full, level, rate in zip(most, levels, per_s, strict=True)]
            now_s = until_s
            continue
        levels = [level - used for level, used in zip(levels, first.used, strict=True)]
        if lane:
            found[lane].append(now_s)
        else:
            jobs = [*jobs[1:], job(next(recorded.jobs), now_s, rng)]
    return found


@dataclass(slots=True)
class _Call:
    """A call that starts at `at_s`. For each bucket: its level before the call (`before`), and the refill that was lost
    since the previous call because the bucket was full (`spilt`)."""

    at_s: float
    used: Amounts
    before: list[float]
    spilt: list[float]


class Clairvoyant:
    """The planned calls of one account, whose gate knows all future requests and what each of them will use.

    Critical requests are placed first, as if they had the whole account. Then each normal request is placed as early as
    possible without delaying a critical one. Batch gets the rest, so it gets nothing of the full buckets at the
    beginning. (A gate that does not know the future gives batch everything beyond the reserves.)
    """

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
