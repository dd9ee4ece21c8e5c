"""Implements a circuit breaker: if calls to a provider fail, the provider is not called for a while, and then tried
with one call (the probe). This file has no I/O.

    closed ──failures in a row──> open ──its time is over──> probing ──answered──> closed
                                   ^                            │
                                   └───────── failed: twice as long

Only failures in a row count, not the share of calls that fail. If calls fail by chance (for example 30 % of them with
HTTP 529), most retries succeed, so an open breaker would only make requests wait. Three failures to connect in a row
are enough to open the breaker, because no request can cause them by what it contains.
"""

import random
from collections import deque
from enum import StrEnum
from math import inf
from typing import NamedTuple

FAILURES = 10
"""The number of failures in a row that opens a circuit breaker. If 30 % of all calls fail by chance, that many failures
in a row happen once in 240,000 calls."""
REQUESTS = 3
"""The failures in a row that open a circuit breaker must come from at least this many requests; otherwise one request
that the provider cannot handle, with its retries, would block all others."""
UNREACHED = 3
"""A circuit breaker opens after this many failures to connect in a row, even if they all come from one request."""
DOUBTED_FROM = 3
"""From this many failures in a row on, the process checks in the store at each failure whether another process has
opened its circuit breaker for the same provider and model."""
WINDOW_S = 120.0
"""The circuit breaker no longer counts a failure after this many seconds. The time must not be shorter than the time
that a call may take (60 s in the lane critical, 120 s in normal)."""
OPEN_S = 1.0
"""The longest time, in seconds, that a circuit breaker stays open when it opens first; it doubles each time that the
probe (the trial call) fails."""
OPEN_MOST_S = 5.0
"""The longest time, in seconds, that a circuit breaker stays open before a probe (a trial call)."""
PROBE_WITHIN_S = 30.0
"""After this many seconds another call may be the probe (the trial call after an outage), even if the first probe has
not ended."""
LOOK_S = 1.0
"""While a probe (the trial call after an outage) runs, a waiting request asks again after this many seconds whether its
call may be made."""


class State(StrEnum):
    """The state of a circuit breaker: CLOSED lets all calls pass, OPEN none, PROBING one."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Failure(NamedTuple):
    """A failed call, as the circuit breaker counts it."""

    at_s: float
    request: str
    is_unreached: bool


class Breaker:
    """The circuit breaker of one provider and model: after failures in a row no call is made for a while. It is created
    at the first failure, and removed at the next answer. Times are in seconds, by the event loop's clock."""

    def __init__(self, rng: random.Random) -> None:
        self.state = State.CLOSED
        self._failed: deque[Failure] = deque(maxlen=FAILURES)
        self._openings = 0
        self._until_s = -inf
        self.down_since_s = inf
        """When the circuit breaker was opened; openings after failed probes do not change this time. Infinite until it
        is opened."""
        self._rng = rng

    def wait_s(self, now_s: float) -> float:
        """The seconds until a call may be made, as far as the circuit breaker knows; 0 if it may be made now."""
        if self.state is State.CLOSED:
            return 0.0
        if self.state is State.PROBING and now_s < self._until_s:
            return min(LOOK_S, self._until_s - now_s)
        return max(0.0, self._until_s - now_s)

    @property
    def is_doubted(self) -> bool:
        """True if the circuit breaker lets calls pass (is closed) although `DOUBTED_FROM` or more calls have failed in
        a row."""
        return self.state is State.CLOSED and len(self._failed) >= DOUBTED_FROM

    def probe(self, now_s: float) -> float:
        """Let the next call be the probe, which finds out whether the provider works again. Returns the number of
        seconds after which another call may be the probe."""
        self.state = State.PROBING
        self._until_s = now_s + PROBE_WITHIN_S
        return PROBE_WITHIN_S

    def failed(self, failure: Failure, *, probe: bool) -> None:
        """Count a failed call. Open the circuit breaker, so that no more calls are made, if there were too many
        failures in a row, or if the failed call was the probe (`probe`)."""
        if self.state is State.CLOSED:
            while self._failed and failure.at_s - self._failed[0].at_s > WINDOW_S:
                self._failed.popleft()
            self._failed.append(failure)
            if self._is_too_many():
                self.open(failure.at_s)
        elif probe and self.state is State.PROBING:
            self.open(failure.at_s)

    def unknown(self, now_s: float, *, probe: bool) -> None:
        """Tell the circuit breaker about a call that has not shown whether the provider works. If it was the probe, the
        next call will be the probe."""
        if probe and self.state is State.PROBING:
            self.state = State.OPEN
            self._until_s = now_s

    def open(self, now_s: float) -> None:
        """Open the circuit breaker, so that no call is made for a while. This time is partly random; its upper limit
        doubles with each further opening, up to `OPEN_MOST_S`."""
        step_s = min(OPEN_MOST_S, OPEN_S * 2**self._openings)
        self._openings = min(self._openings + 1, 16)
        self._failed.clear()
        self.state = State.OPEN
        self.down_since_s = min(self.down_since_s, now_s)
        self._until_s = now_s + self._rng.uniform(step_s / 2, step_s)

    def _is_too_many(self) -> bool:
        latest = list(self._failed)[-UNREACHED:]
        if len(latest) == UNREACHED and all(failure.is_unreached for failure in latest):
            return True
        return len(self._failed) == FAILURES and len({failure.request for failure in self._failed}) >= REQUESTS
