"""Quantiles, medians with their ranges, and ratios of runs that were made in turns."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Median:
    """Of several rounds."""

    value: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no values")
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Median | None:
    """Of the rounds that both have, by number: each round's own ratio. None where they share none."""
    shared = sorted(mine.keys() & theirs.keys())
    return Median.of([mine[each] / theirs[each] for each in shared]) if shared else None
