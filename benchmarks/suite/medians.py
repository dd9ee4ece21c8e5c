"""Computes quantiles, medians with their ranges, and ratios of runs that took turns."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that the part `share` of all values does not exceed. Raises ValueError if there are no
    values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Median:
    """The median of several rounds, with its range."""

    value: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        """The median of these values. Raises ValueError if there are none."""
        if not values:
            raise ValueError("no values")
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Median | None:
    """The median of the ratios within each round in which both were measured; None if there is no such round. Keys are
    the numbers of rounds."""
    shared = sorted(mine.keys() & theirs.keys())
    return Median.of([mine[each] / theirs[each] for each in shared]) if shared else None
