"""Limits how many invalid messages of a tenant are kept in `lane.dead` and in the store, so that they do not displace
dead letters or results of other tenants."""

from consumers.rate_limit import LogThrottle, RateLimit
from lanekeeper.telemetry import logs, signals

UNIT_BYTES = 64 * 1024
"""A message counts once against the limit of kept invalid messages, and once more for each full 64 KiB (this many
bytes) of its body."""
INVALID_PER_HOUR = 1000
"""How many invalid messages of one tenant are kept in an hour by default; the others are answered with an error, but
not kept."""
HOUR_S = 3600
log = logs.logger()


class Parking:
    """Decides whether an invalid message is kept in `lane.dead` and in the store, by a limit for each tenant. The limit
    does not apply to valid requests that failed."""

    def __init__(self, *, invalid_per_hour: float = INVALID_PER_HOUR) -> None:
        self._limit = RateLimit(per_s=invalid_per_hour / HOUR_S, at_once=invalid_per_hour)
        self._log_throttle = LogThrottle()
        self.unparked = 0
        """How many invalid messages were answered with an error, but not kept in `lane.dead` or in the store."""

    def takes(self, tenant: str, size: int, *, code: str) -> bool:
        """Whether an invalid message of `size` bytes is kept. If not, it is counted in `unparked` and logged, with at
        most one log line a minute for each tenant. `code`: the code of the error with which the message is answered."""
        if self._limit.take(tenant, 1 + size // UNIT_BYTES):
            return True
        self.unparked += 1
        if count := self._log_throttle.count(tenant):
            log.warning(signals.INVALID_UNPARKED, tenant=tenant, code=code, count=count, unparked=self.unparked)
        return False
