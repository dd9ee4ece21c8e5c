"""Limits how often each tenant may do something in this process, and how often a refusal is logged.

limit, throttle = RateLimit(per_s=100, at_once=1000), LogThrottle()
if not limit.take(tenant): …              refuse; other tenants are not affected
if (count := throttle.count(tenant)): …   log that it happened `count` times since the last log line
"""

import time
from collections.abc import Callable

import structlog
from cachetools import LRUCache

from lanekeeper.telemetry import signals

NAMES_KEPT = 10_000
LOGGED_EVERY_S = 60.0
Clock = Callable[[], float]


class TokenBucket:
    """Holds at most `capacity`, and gains `per_s` each second. What is taken beyond its level is a debt."""

    def __init__(self, *, per_s: float, capacity: float, clock: Clock = time.monotonic) -> None:
        self.capacity = capacity
        self._per_s = per_s
        self._clock = clock
        self._level = capacity
        self._at_s = clock()

    def level(self) -> float:
        now_s = self._clock()
        self._level = min(self.capacity, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level() - amount

    def wait_s(self, amount: float) -> float:
        """How long until `amount` is available; for an amount above the capacity: until the bucket is full."""
        return max(0.0, min(amount, self.capacity) - self.level()) / self._per_s

    def full_in_s(self) -> float:
        return self.wait_s(self.capacity)


class RateLimit:
    """Limits how often something may happen for each name (a tenant, for example). Each name has a token bucket, which
    holds at most `at_once` tokens and gains `per_s` tokens each second."""

    def __init__(self, *, per_s: float, at_once: float, clock: Clock = time.monotonic) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._clock = clock
        self._buckets: LRUCache[str, TokenBucket] = LRUCache(NAMES_KEPT)

    def take(self, name: str, amount: float = 1) -> bool:
        if (bucket := self._buckets.get(name)) is None:
            bucket = TokenBucket(per_s=self._per_s, capacity=self._at_once, clock=self._clock)
            self._buckets[name] = bucket
        if bucket.level() < amount:
            return False
        bucket.take(amount)
        return True


class LogThrottle:
    """Tells the caller when to log a frequent event: for each name the first event at once, and then at most one line a
    minute, with the number of events since the last line."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._counted: LRUCache[str, tuple[int, float]] = LRUCache(NAMES_KEPT)

    def count(self, name: str) -> int:
        now_s = self._clock()
        count, logged_s = self._counted.get(name, (0, -LOGGED_EVERY_S))
        is_due = now_s - logged_s >= LOGGED_EVERY_S
        self._counted[name] = (0, now_s) if is_due else (count + 1, logged_s)
        return count + 1 if is_due else 0


UNIT_BYTES = 64 * 1024
INVALID_PER_HOUR = 1000
HOUR_S = 3600
log = structlog.get_logger()


class Parking:
    """Decides whether an invalid message is kept in `lane.dead` and in the store, by a limit for each tenant. The limit
    does not apply to valid requests that failed."""

    def __init__(self, *, invalid_per_hour: float = INVALID_PER_HOUR) -> None:
        self._limit = RateLimit(per_s=invalid_per_hour / HOUR_S, at_once=invalid_per_hour)
        self._log_throttle = LogThrottle()
        self.unparked = 0

    def takes(self, tenant: str, size: int, *, code: str) -> bool:
        if self._limit.take(tenant, 1 + size // UNIT_BYTES):
            return True
        self.unparked += 1
        if count := self._log_throttle.count(tenant):
            log.warning(signals.INVALID_UNPARKED, tenant=tenant, code=code, count=count, unparked=self.unparked)
        return False
