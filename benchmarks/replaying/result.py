"""The figures of a replay: waits, used budget, refusals, and times without a grant."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from benchmarks.replaying.load import Ask, Load
from benchmarks.replaying.scenarios import Scenario
from consumers.limits.base import REASONS, Amounts

SETTLED_S = 60.0
"""The used budget is measured from this time on, when the full buckets of the beginning are used up."""

LEARNED_S = 30.0
"""Where calls are answered 529, the provider's use is measured from this time on."""


@dataclass(frozen=True)
class Spread:
    """Quantiles of many figures, by nearest rank."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        found = sorted(values) or [0.0]
        return cls(*(found[min(len(found) - 1, int(q * len(found)))] for q in (0.5, 0.95, 0.99)))


@dataclass(frozen=True)
class Result:
    """The result of one scenario."""

    scenario: Scenario
    load: Load
    asks: Sequence[Ask]

    def of(self, lane: str) -> list[Ask]:
        return sorted((ask for ask in self.asks if ask.lane == lane), key=lambda ask: ask.arrived_s)

    def waits(self, lane: str) -> Spread:
        """The waits from arrival to the start of the answered call. Batch jobs count if they arrived before the end."""
        return Spread.of(
            [wait_s for ask in self.of(lane) if (wait_s := ask.wait_s) is not None and (ask.counts or self._is_in(ask))]
        )

    @cached_property
    def refused(self) -> int:
        """Calls that were answered 429."""
        return sum(ask.refused for ask in self.asks)

    @cached_property
    def answers_per_s(self) -> float:
        answered = [ask for ask in self.asks if LEARNED_S <= (ask.answered_s or 0.0) < self.load.ends_s]
        return len(answered) / (self.load.ends_s - LEARNED_S)

    @property
    def overloaded(self) -> float:
        """The part of the calls that was answered 529."""
        return sum(ask.overloaded for ask in self.asks) / sum(ask.attempts for ask in self.asks)

    @cached_property
    def busy_calls(self) -> float:
        """How many calls the provider worked on at a time, on average, after `LEARNED_S`."""
        from_s, to_s = LEARNED_S, self.load.ends_s
        ran_s = (
            min(to_s, ask.answered_s) - max(from_s, ask.started_s)
            for ask in self.asks
            if ask.started_s is not None and ask.answered_s is not None and ask.answered_s > from_s
        )
        return sum(seconds for seconds in ran_s if seconds > 0) / (to_s - from_s)

    @cached_property
    def use(self) -> Amounts:
        """For each limit: the used part of the refill after the first minute. Batch jobs always wait, so all of it
        could be used."""
        minutes = (self.load.ends_s - SETTLED_S) / 60
        calls = [
            ask.used for ask in self.asks if ask.started_s is not None and SETTLED_S <= ask.started_s < self.load.ends_s
        ]
        sums = [sum(each) for each in zip(*calls, strict=True)] or [0.0, 0.0, 0.0]
        return Amounts(*(used / limit / minutes for used, limit in zip(sums, self.load.limits, strict=True)))

    @property
    def binding(self) -> str:
        return REASONS[self.use.index(max(self.use))]

    @cached_property
    def lost(self) -> Amounts:
        """For each limit: the part of the refill that was lost because the bucket was full."""
        calls = sorted((ask.started_s, ask.used) for ask in self.asks if ask.started_s is not None)
        found = []
        for each, limit in enumerate(self.load.limits):
            per_s, most = limit / 60, limit * self.scenario.bucket_s / 60
            level, at_s, lost = most, 0.0, 0.0
            for started_s, used in [*calls, (self.load.ends_s, Amounts())]:
                if started_s > self.load.ends_s:
                    break
                level += (started_s - at_s) * per_s
                lost, level, at_s = lost + max(0.0, level - most), min(level, most), started_s
                level -= used[each]
            found.append(lost / (self.load.ends_s * per_s))
        return Amounts(*found)

    def busy(self, lane: str) -> list[tuple[float, float]]:
        """The periods in which at least one request of the lane was always at the gate."""
        found: list[tuple[float, float]] = []
        for since_s, until_s, _ in sorted(stand for ask in self.of(lane) for stand in ask.waits):
            if found and since_s <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], until_s))
            elif until_s > since_s:
                found.append((since_s, until_s))
        return found

    def longest_nothing_s(self, lane: str) -> float:
        """The longest time in which the lane always had work and nothing was granted."""
        grants = sorted(stand.until_s for ask in self.of(lane) for stand in ask.waits if stand.is_granted)
        longest_s = 0.0
        for since_s, until_s in self.busy(lane):
            within = grants[bisect_left(grants, since_s) : bisect_right(grants, until_s)]
            longest_s = max(longest_s, *(after - before for before, after in pairwise([since_s, *within, until_s])))
        return longest_s

    def _is_in(self, ask: Ask) -> bool:
        return ask.arrived_s < self.load.ends_s
