"""A circuit breaker: a provider whose calls fail is not called for a while, then tried with one call. Pure.

    closed ──failures in a row──> open ──its time is over──> probing ──answered──> closed
                                   ^                            │
                                   └───────── failed: twice as long

Failures in a row are counted, not a share of the calls. If calls fail by chance (30 % with a 529, for example), a retry
answers most of them, and an open breaker would only add waiting. Three failures to connect in a row are enough,
because no request can cause them.
"""

import random
from collections import deque
from enum import StrEnum
from math import inf
from typing import NamedTuple

FAILURES = 10
"""Failures in a row that open it. If 30 % of all calls fail by chance, that happens once in 240,000 calls."""
REQUESTS = 3
"""The failures must come from at least this many requests, because one request that the provider cannot handle must not
block others."""
UNREACHED = 3
"""Failures to connect in a row that open it, whatever requests they come from."""
DOUBTED_FROM = 3
"""After this many failures in a row, each further failure makes us check whether another process has opened its
breaker."""
WINDOW_S = 120.0
"""Older failures do not count. It is longer than a hanging call may take (60 s in critical, 120 s in normal)."""
OPEN_S = 1.0
OPEN_MOST_S = 5.0
"""The longest time that a breaker stays open, and so the longest wait for a provider that is back."""
PROBE_WITHIN_S = 30.0
"""A probe that takes longer no longer prevents another probe."""
LOOK_S = 1.0
"""How long to wait before looking again, while another call probes."""


class State(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Failure(NamedTuple):
    """A call that failed."""

    at_s: float
    request: str
    is_unreached: bool


class Breaker:
    """The breaker of one provider and model, kept from its first failure until it answers; times are the event
    loop's."""

    __slots__ = ("_failed", "_openings", "_rng", "_until_s", "down_since_s", "state")

    def __init__(self, rng: random.Random) -> None:
        self.state = State.CLOSED
        self._failed: deque[Failure] = deque(maxlen=FAILURES)
        self._openings = 0
        self._until_s = -inf
        self.down_since_s = inf
        """When the breaker was first opened."""
        self._rng = rng

    def wait_s(self, now_s: float) -> float:
        """Seconds until a call may be made, as far as is known; 0: now."""
        if self.state is State.CLOSED:
            return 0.0
        if self.state is State.PROBING and now_s < self._until_s:
            return min(LOOK_S, self._until_s - now_s)
        return max(0.0, self._until_s - now_s)

    @property
    def is_doubted(self) -> bool:
        """Whether it is closed although `DOUBTED_FROM` or more calls have failed in a row."""
        return self.state is State.CLOSED and len(self._failed) >= DOUBTED_FROM

    def probe(self, now_s: float) -> float:
        """Let the call that is made now be the probe, because the breaker has been open long enough. Returns the
        probe's time limit in seconds."""
        self.state = State.PROBING
        self._until_s = now_s + PROBE_WITHIN_S
        return PROBE_WITHIN_S

    def failed(self, failure: Failure, *, probe: bool) -> None:
        """A call failed: open if there are too many failures now, or if it was the probe."""
        if self.state is State.CLOSED:
            while self._failed and failure.at_s - self._failed[0].at_s > WINDOW_S:
                self._failed.popleft()
            self._failed.append(failure)
            if self._is_too_many():
                self.open(failure.at_s)
        elif probe and self.state is State.PROBING:
            self.open(failure.at_s)

    def unknown(self, now_s: float, *, probe: bool) -> None:
        """The call ended without showing whether the provider works. If it was the probe, the next call is the
        probe."""
        if probe and self.state is State.PROBING:
            self.state = State.OPEN
            self._until_s = now_s

    def open(self, now_s: float) -> None:
        """Open for a while, longer than the last time."""
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
