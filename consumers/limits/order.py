"""Who is first: by rank of the lane, a long wait counting for one rank, then by arrival. Pure."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from consumers.limits.amounts import Amounts
from consumers.limits.base import Reservation

NEVER: Final = float("inf")


class Waiter:
    """One request that waits. `lane` is its rank: 0 goes first."""

    __slots__ = ("amounts", "arrived_s", "lane", "number", "reservation", "until_s")

    def __init__(self, lane: int, amounts: Amounts, *, arrived_s: float, until_s: float | None = None) -> None:
        self.lane = lane
        self.amounts = amounts
        self.arrived_s = arrived_s
        self.until_s = until_s
        self.number = 0
        """In the order of arrival, over all lanes."""
        self.reservation: Reservation | None = None
        """Set when it is granted."""


class Lines:
    """One line a lane, each first come, first served. Joining and leaving, also from the middle, take no search."""

    __slots__ = ("_boosts_s", "_lines", "_next", "_sums", "heads")

    def __init__(self, boosts_s: Sequence[float | None]) -> None:
        self._boosts_s = [NEVER if boost_s is None else boost_s for boost_s in boosts_s]
        self._lines: list[OrderedDict[int, Waiter]] = [OrderedDict() for _ in boosts_s]
        self._sums = [[0.0, 0.0, 0.0] for _ in boosts_s]
        self._next = 0
        self.heads: list[Waiter | None] = [None for _ in boosts_s]
        """The first of each lane."""

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines)

    def __contains__(self, number: int) -> bool:
        return any(number in line for line in self._lines)

    def __iter__(self) -> Iterator[Waiter]:
        """Lane by lane, in order."""
        for line in self._lines:
            yield from line.values()

    def count(self, lane: int) -> int:
        return len(self._lines[lane])

    def firsts(self, lane: int, most: int) -> Sequence[Waiter]:
        """Of one lane, in order."""
        return list(islice(self._lines[lane].values(), most))

    def sums(self, lane: int) -> Sequence[float]:
        """What all of a lane wait for together, in the order of `Amounts`."""
        return self._sums[lane]

    def join(self, waiter: Waiter) -> bool:
        """At the end of its lane's line; whether it is the first of it."""
        self._next += 1
        waiter.number = self._next
        line = self._lines[waiter.lane]
        line[waiter.number] = waiter
        sums = self._sums[waiter.lane]
        for each, amount in enumerate(waiter.amounts):
            sums[each] += amount
        if len(line) > 1:
            return False
        self.heads[waiter.lane] = waiter
        return True

    def leave(self, waiter: Waiter) -> bool:
        """Nothing where it is not there; whether another is the first of its lane now."""
        lane = waiter.lane
        line = self._lines[lane]
        if line.pop(waiter.number, None) is None:
            return False
        sums = self._sums[lane]
        if not line:  # and no rounding is left
            sums[:] = (0.0, 0.0, 0.0)
        else:
            for each, amount in enumerate(waiter.amounts):
                sums[each] -= amount
        if self.heads[lane] is not waiter:
            return False
        self.heads[lane] = next(iter(line.values()), None)
        return True

    def first(self, now_s: float) -> Waiter | None:
        """Of all lanes."""
        found: Waiter | None = None
        rank = 0
        for waiter in self.heads:
            if waiter is not None:
                own = self._rank(waiter, now_s)
                if found is None or own < rank or (own == rank and waiter.number < found.number):
                    found, rank = waiter, own
        return found

    def boost_in_s(self, now_s: float) -> float:
        """When the next of the firsts is boosted; never, where none is to be."""
        soonest = NEVER
        for waiter in self.heads:
            if waiter is not None and waiter.lane > 0:
                in_s = waiter.arrived_s + self._boosts_s[waiter.lane] - now_s
                if 0 < in_s < soonest:
                    soonest = in_s
        return soonest

    def _rank(self, waiter: Waiter, now_s: float) -> int:
        lane = waiter.lane
        if lane > 0 and now_s - waiter.arrived_s >= self._boosts_s[lane]:
            return lane - 1
        return lane
