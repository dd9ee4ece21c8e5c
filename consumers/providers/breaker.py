"""A circuit breaker: a provider whose calls fail is left alone a while, then asked by one call. Pure: takes the time.

    closed ──failures in a row──> open ──its time is over──> probing ──answered──> closed
                                   ^                            │
                                   └───────── failed: twice as long

Failures in a row are counted, not a share of the calls. Where calls fail by chance (30 % with a 529, say), a retry
answers most of them, and a breaker that opened would only add waiting. Three failures to connect in a row are enough,
because no request can cause them.
"""

import random
from collections import deque
from enum import StrEnum
from math import inf
from typing import NamedTuple

FAILURES = 10
"""In a row. Of calls of which 30 % fail by chance, every 240,000th meets so many."""
REQUESTS = 3
"""So many different ones must be among the failures: one that the provider cannot digest closes it to nobody else."""
UNREACHED = 3
"""In a row, of whichever requests."""
DOUBTED_FROM = 3
"""Failures in a row, from which on each asks whether another process has opened its breaker."""
WINDOW_S = 120.0
"""Longer than a call may take that hangs (60 s in critical, 120 s in normal)."""
OPEN_S = 1.0
OPEN_MOST_S = 5.0
"""What waits for a provider that is back waits no longer than this."""
PROBE_WITHIN_S = 30.0
"""A probe that takes longer holds nobody back any more."""
LOOK_S = 1.0
"""While another call probes."""


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Failure(NamedTuple):
    """A call's."""

    at_s: float
    request: str
    is_unreached: bool


class Breaker:
    """One provider and model, from its first failure until it answers; times are the event loop's."""

    __slots__ = ("_failed", "_openings", "_rng", "_until_s", "down_since_s", "state")

    def __init__(self, rng: random.Random) -> None:
        self.state = State.CLOSED
        self._failed: deque[Failure] = deque(maxlen=FAILURES)
        self._openings = 0
        self._until_s = -inf
        self.down_since_s = inf
        """When it was opened first."""
        self._rng = rng

    def wait_s(self, now_s: float) -> float:
        """Until a call may be made, as far as is known; 0: now."""
        if self.state is State.CLOSED:
            return 0.0
        if self.state is State.PROBING and now_s < self._until_s:
            return min(LOOK_S, self._until_s - now_s)
        return max(0.0, self._until_s - now_s)

    @property
    def is_doubted(self) -> bool:
        """Closed, and not for the first time in a row its call failed."""
        return self.state is State.CLOSED and len(self._failed) >= DOUBTED_FROM

    def probe(self, now_s: float) -> float:
        """Its time is over, and the call that is made now is the one that finds out; within so many seconds."""
        self.state = State.PROBING
        self._until_s = now_s + PROBE_WITHIN_S
        return PROBE_WITHIN_S

    def failed(self, failure: Failure, *, probe: bool) -> None:
        """Open, where that was the last of too many, or the probe."""
        if self.state is State.CLOSED:
            while self._failed and failure.at_s - self._failed[0].at_s > WINDOW_S:
                self._failed.popleft()
            self._failed.append(failure)
            if self._is_too_many():
                self.open(failure.at_s)
        elif probe and self.state is State.PROBING:
            self.open(failure.at_s)

    def unknown(self, now_s: float, *, probe: bool) -> None:
        """The call ended without telling anything: the next one finds out."""
        if probe and self.state is State.PROBING:
            self.state = State.OPEN
            self._until_s = now_s

    def open(self, now_s: float) -> None:
        """For a while, and longer than the last time."""
        step_s = min(OPEN_MOST_S, OPEN_S * 2**self._openings)
        self._openings = min(self._openings + 1, 16)
        self._failed.clear()
        self.state = State.OPEN
        self.down_since_s = min(self.down_since_s, now_s)
        self._until_s = now_s + self._rng.uniform(step_s / 2, step_s)

    def _is_too_many(self) -> bool:
        latest = list(self._failed)[-UNREACHED:]
        if len(latest) == UNREACHED and all(each.is_unreached for each in latest):
            return True
        return len(self._failed) == FAILURES and len({each.request for each in self._failed}) >= REQUESTS
