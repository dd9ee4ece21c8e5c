"""Limits what one tenant may use of something that all share, and how often its excess is logged; per process.

share = Share(per_s=100, at_once=1000)
if not share.take(tenant): …            over its share: refuse; others are not affected
if (count := seldom.count(tenant)): …   logged: the first at once, then once a minute how many there were
"""

import time
from collections.abc import Callable

NAMES_KEPT = 10_000
"""How many tenants are remembered; the one that asked longest ago is forgotten first."""
LOGGED_EVERY_S = 60.0
Clock = Callable[[], float]


class Share:
    """A token bucket for each name. It holds at most `at_once` and gains `per_s` each second."""

    def __init__(self, *, per_s: float, at_once: float, clock: Clock = time.monotonic) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, name: str, amount: float = 1) -> bool:
        """Use that much of a name's share; False if too little is left."""
        now_s = self._clock()
        left, at_s = self._left.pop(name, (self._at_once, now_s))
        left = min(self._at_once, left + (now_s - at_s) * self._per_s)
        granted = left >= amount
        self._left[name] = (left - amount if granted else left, now_s)
        if len(self._left) > NAMES_KEPT:
            del self._left[next(iter(self._left))]
        return granted


class Seldom:
    """Counts frequent incidents, which are logged once a minute for each name, not each time."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._counted: dict[str, tuple[int, float]] = {}

    def count(self, name: str) -> int:
        """Count one more. Return how many there were since the last log line if the next one is due, else 0."""
        now_s = self._clock()
        count, logged_s = self._counted.pop(name, (0, -LOGGED_EVERY_S))
        is_due = now_s - logged_s >= LOGGED_EVERY_S
        self._counted[name] = (0, now_s) if is_due else (count + 1, logged_s)
        if len(self._counted) > NAMES_KEPT:
            del self._counted[next(iter(self._counted))]
        return count + 1 if is_due else 0
