"""Limits how many invalid messages of a tenant are parked and stored under their ids: they must not displace other
tenants' dead letters or results."""

from consumers.share import Seldom, Share
from lanekeeper.telemetry import logs, signals

UNIT_BYTES = 64 * 1024
"""Each started 64 KiB of a body count as one message."""
INVALID_PER_HOUR = 1000
HOUR_S = 3600
log = logs.logger()


class Parking:
    """Each tenant's share of the invalid messages that are kept. Valid requests that failed are always parked."""

    def __init__(self, *, invalid_per_hour: float = INVALID_PER_HOUR) -> None:
        self._share = Share(per_s=invalid_per_hour / HOUR_S, at_once=invalid_per_hour)
        self._seldom = Seldom()
        self.unparked = 0
        """Invalid messages that were answered but not kept."""

    def takes(self, tenant: str, size: int, *, code: str) -> bool:
        """Whether one more invalid message of a tenant is kept. Those not kept are counted, and logged once a
        minute."""
        if self._share.take(tenant, 1 + size // UNIT_BYTES):
            return True
        self.unparked += 1
        if count := self._seldom.count(tenant):
            log.warning(signals.INVALID_UNPARKED, tenant=tenant, code=code, count=count, unparked=self.unparked)
        return False
