"""The waiting requests in line, and the order of the lanes. Pure.

Inside a lane requests go by arrival; one that was deferred and comes back has its old place. Between lanes the rank
decides, however long a request has waited. Only if `boost_s` is set: when the first request of a lane has waited that
long, it goes before younger ones of the next lane above, but never before the top lane.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from consumers.limits.waiter import Waiter

NEVER: Final = float("inf")
FIRST_TO_AGE: Final = 2
"""Lanes from this rank on may age. The second lane may not, because only the top lane is before it."""


class Order(NamedTuple):
    """The order of the lanes: `lanes` from first to last; for each lane those `above` and those `below` it."""

    lanes: tuple[int, ...]
    above: tuple[tuple[int, ...], ...]
    below: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lanes: Sequence[int]) -> "Order":
        place = {lane: at for at, lane in enumerate(lanes)}
        return cls(
            tuple(lanes),
            tuple(tuple(lanes[: place[lane]]) for lane in range(len(lanes))),
            tuple(tuple(lanes[place[lane] + 1 :]) for lane in range(len(lanes))),
        )


def _place(waiter: Waiter) -> tuple[float, int]:
    return waiter.arrived_s, waiter.number


class Lines:
    """One line for each lane, by arrival."""

    __slots__ = ("_ages", "_boosts_s", "_by_rank", "_lines", "_next", "_sums", "heads")

    def __init__(self, boosts_s: Sequence[float | None]) -> None:
        self._boosts_s = [NEVER if boost_s is None else boost_s for boost_s in boosts_s]
        self._ages = min(self._boosts_s[FIRST_TO_AGE:], default=NEVER) < NEVER
        self._by_rank = Order.of(range(len(boosts_s)))
        self._lines: list[list[Waiter]] = [[] for _ in boosts_s]
        self._sums = [[0.0, 0.0, 0.0] for _ in boosts_s]
        self._next = 0
        self.heads: list[Waiter | None] = [None for _ in boosts_s]
        """The first waiter of each lane."""

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines)

    def __contains__(self, waiter: Waiter) -> bool:
        return self._at(waiter) is not None

    def __iter__(self) -> Iterator[Waiter]:
        """All waiters, lane by lane, in order."""
        for line in self._lines:
            yield from line

    @property
    def is_empty(self) -> bool:
        """True if nobody waits."""
        return not any(self.heads)

    def count(self, lane: int) -> int:
        return len(self._lines[lane])

    def firsts(self, lane: int, most: int) -> Sequence[Waiter]:
        """The first `most` of one lane, in order."""
        return self._lines[lane][:most]

    def sums(self, lane: int) -> Sequence[float]:
        """What all waiters of a lane need together, in the order of `Amounts`."""
        return self._sums[lane]

    def before(self, waiter: Waiter) -> tuple[Sequence[float], int]:
        """What the waiters before it in its line need together, and how many they are."""
        line = self._lines[waiter.lane]
        if line[-1] is waiter:
            sums = self._sums[waiter.lane]
            return [total - amount for total, amount in zip(sums, waiter.amounts, strict=True)], len(line) - 1
        before = line[: bisect_left(line, _place(waiter), key=_place)]
        sums = [0.0, 0.0, 0.0]
        for other in before:
            for each, amount in enumerate(other.amounts):
                sums[each] += amount
        return sums, len(before)

    def join(self, waiter: Waiter) -> bool:
        """Put a waiter in line by its arrival; True if it is now the first of its lane."""
        self._next += 1
        waiter.number = self._next
        lane = waiter.lane
        line = self._lines[lane]
        if not line or line[-1].arrived_s <= waiter.arrived_s:
            line.append(waiter)
        else:
            insort(line, waiter, key=_place)
        sums = self._sums[lane]
        for each, amount in enumerate(waiter.amounts):
            sums[each] += amount
        if line[0] is not waiter:
            return False
        self.heads[lane] = waiter
        return True

    def leave(self, waiter: Waiter) -> bool:
        """Take a waiter out if it is in line; True if another is now the first of its lane."""
        at = self._at(waiter)
        if at is None:
            return False
        lane = waiter.lane
        line, sums = self._lines[lane], self._sums[lane]
        del line[at]
        if not line:  # clear rounding errors as well
            sums[:] = (0.0, 0.0, 0.0)
        else:
            for each, amount in enumerate(waiter.amounts):
                sums[each] -= amount
        if at > 0:
            return False
        self.heads[lane] = line[0] if line else None
        return True

    def shift(self, jump_s: float) -> None:
        """The clock has jumped by `jump_s`: move all times of the waiters."""
        for line in self._lines:
            for waiter in line:
                waiter.arrived_s += jump_s
                if waiter.until_s is not None:
                    waiter.until_s += jump_s
            line.sort(key=_place)

    def order(self, now_s: float) -> Order:
        """Which lane goes before which: by rank, except for lanes whose first waiter has aged."""
        if not self._ages:
            return self._by_rank
        lanes: list[int] | None = None
        for lane in range(FIRST_TO_AGE, len(self.heads)):
            if self._has_aged(lane, now_s):
                if lanes is None:
                    lanes = list(self._by_rank.lanes)
                at = lanes.index(lane)
                lanes[at - 1], lanes[at] = lanes[at], lanes[at - 1]
        return self._by_rank if lanes is None else Order.of(lanes)

    def aged_in_s(self, now_s: float) -> float:
        """The seconds until the next first waiter of a lane has waited `boost_s`; infinite if none will."""
        soonest = NEVER
        if not self._ages:
            return soonest
        for lane in range(FIRST_TO_AGE, len(self.heads)):
            waiter = self.heads[lane]
            if waiter is not None and 0 < (in_s := waiter.arrived_s + self._boosts_s[lane] - now_s) < soonest:
                soonest = in_s
        return soonest

    def _has_aged(self, lane: int, now_s: float) -> bool:
        """True if the lane's first waiter has waited long enough, and is older than the first of the lane above."""
        waiter, above = self.heads[lane], self.heads[lane - 1]
        if waiter is None or now_s - waiter.arrived_s < self._boosts_s[lane]:
            return False
        return above is None or waiter.arrived_s < above.arrived_s

    def _at(self, waiter: Waiter) -> int | None:
        line = self._lines[waiter.lane]
        at = bisect_left(line, _place(waiter), key=_place)
        return at if at < len(line) and line[at] is waiter else None
