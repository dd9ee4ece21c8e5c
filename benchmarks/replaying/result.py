"""What a replay shows: waits, use, refusals, who got nothing for how long, and what was predicted."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

from benchmarks.replaying.load import Ask, Load
from benchmarks.replaying.scenarios import LANES, Scenario
from consumers.limits.amounts import REASONS, Amounts

SETTLED_S = 60.0
"""What is used is looked at from here on: the full buckets of the beginning are spent."""


@dataclass(frozen=True)
class Spread:
    """Quantiles of many figures, by nearest rank."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        found = sorted(values)
        if not found:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ranks = (found[min(len(found) - 1, int(q * len(found)))] for q in (0.5, 0.9, 0.95, 0.99, 1.0))
        return cls(len(found), *ranks)


@dataclass(frozen=True)
class Errors:
    """Of predictions, in seconds; of those that could not start at once, or were told so."""

    off: Spread
    """How far they were off."""
    bias_s: float
    """Predicted less actual, on the average."""


@dataclass(frozen=True)
class Result:
    """Of one scenario."""

    scenario: Scenario
    load: Load
    asks: Sequence[Ask]

    def of(self, lane: str) -> list[Ask]:
        """As they arrived."""
        return sorted((ask for ask in self.asks if ask.lane == lane), key=lambda ask: ask.arrived_s)

    def waits(self, lane: str) -> Spread:
        """From arrival until the call began that was answered. Of batch: those that began before the end."""
        return Spread.of(
            [wait_s for ask in self.of(lane) if (wait_s := ask.wait_s) is not None and (ask.counts or self._is_in(ask))]
        )

    @cached_property
    def refused(self) -> int:
        """Calls that were answered 429."""
        return sum(ask.refused for ask in self.asks)

    @cached_property
    def use(self) -> Amounts:
        """Of what came in, by limit, after the first minute; batch always has work."""
        minutes = (self.load.ends_s - SETTLED_S) / 60
        calls = [
            ask.used for ask in self.asks if ask.started_s is not None and SETTLED_S <= ask.started_s < self.load.ends_s
        ]
        sums = [sum(each) for each in zip(*calls, strict=True)] or [0.0, 0.0, 0.0]
        return Amounts(*(used / limit / minutes for used, limit in zip(sums, self.load.limits, strict=True)))

    @property
    def binding(self) -> str:
        """The limit of which most is used."""
        return REASONS[self.use.index(max(self.use))]

    @cached_property
    def lost(self) -> Amounts:
        """Of what came in, by limit, what a full bucket could not hold."""
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
        """From when until when somebody of the lane stood at the gate, without a break."""
        found: list[tuple[float, float]] = []
        for since_s, until_s, _ in sorted(stand for ask in self.of(lane) for stand in ask.waits):
            if found and since_s <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], until_s))
            elif until_s > since_s:
                found.append((since_s, until_s))
        return found

    def longest_nothing_s(self, lane: str) -> float:
        """In which the lane had work all the time, and none of it was granted."""
        grants = sorted(stand.until_s for ask in self.of(lane) for stand in ask.waits if stand.is_granted)
        longest_s = 0.0
        for since_s, until_s in self.busy(lane):
            within = grants[bisect_left(grants, since_s) : bisect_right(grants, until_s)]
            longest_s = max(longest_s, *(after - before for before, after in pairwise([since_s, *within, until_s])))
        return longest_s

    def predictions(self, lane: str) -> Errors:
        """What was said at the arrival, and how long it was until the first grant."""
        offs = [
            ask.predicted_s - wait_s
            for ask in self.of(lane)
            if (wait_s := ask.gate_s) is not None
            and (wait_s > 0.001 or ask.predicted_s > 0)
            and (ask.counts or self._is_in(ask))
        ]
        known = [off for off in offs if abs(off) < inf]
        return Errors(Spread.of([abs(off) for off in offs]), sum(known) / len(known) if known else 0.0)

    def as_json(self) -> dict[str, Any]:
        """The raw figures. Each of `asks`: lane, arrival, wait, first wait, predicted wait, input, output, attempts,
        429s."""
        return {
            "scenario": self.scenario.name,
            "ends_s": self.load.ends_s,
            "limits": self.load.limits._asdict(),
            "demand": {lane: amounts._asdict() for lane, amounts in self.load.demand.items()},
            "waits": {lane: self.waits(lane).__dict__ for lane in LANES},
            "use": self.use._asdict(),
            "lost": self.lost._asdict(),
            "refused": self.refused,
            "longest_nothing_s": {lane: self.longest_nothing_s(lane) for lane in LANES},
            "predictions": {
                lane: {"off": errors.off.__dict__, "bias_s": errors.bias_s}
                for lane in LANES
                for errors in [self.predictions(lane)]
            },
            "asks": [
                [
                    ask.lane,
                    round(ask.arrived_s, 3),
                    None if ask.wait_s is None else round(ask.wait_s, 4),
                    None if ask.gate_s is None else round(ask.gate_s, 4),
                    None if ask.predicted_s == inf else round(ask.predicted_s, 4),
                    ask.input_tokens,
                    ask.output_tokens,
                    ask.attempts,
                    ask.refused,
                ]
                for ask in self.asks
            ],
        }

    def _is_in(self, ask: Ask) -> bool:
        return ask.arrived_s < self.load.ends_s
