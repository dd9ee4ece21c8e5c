"""Stalls: the longest time without an answer while a lane had requests."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stall:
    lane: str
    began_s: float
    ended_s: float

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s

    def within(self, from_s: float, until_s: float) -> "Stall | None":
        """The part of it between these times."""
        began_s, ended_s = max(self.began_s, from_s), min(self.ended_s, until_s)
        return Stall(self.lane, began_s, ended_s) if began_s < ended_s else None


def stalls_of(owed: Iterable[tuple[str, float, float | None]]) -> dict[str, list[Stall]]:
    """The stalls of each lane. `owed`: lane, waiting since, answered at (None: never)."""
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for lane, since_s, answered_s in owed:
        if answered_s is None:
            changes[lane].append((since_s, +1))
        elif answered_s > since_s:
            changes[lane] += [(since_s, +1), (answered_s, -1)]
    return {lane: _pauses(lane, sorted(found)) for lane, found in changes.items()}


def _pauses(lane: str, changes: Sequence[tuple[float, int]]) -> list[Stall]:
    found, owing, since_s = [], 0, 0.0
    for at_s, change in changes:
        if change < 0:
            found.append(Stall(lane, since_s, at_s))
        if change < 0 or not owing:
            since_s = at_s
        owing += change
    return found


def longest(stalls: Sequence[Stall]) -> Stall | None:
    return max(stalls, key=lambda each: each.lasted_s, default=None)
