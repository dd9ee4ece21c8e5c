"""When a request was published, as far as is known. Its wait and its deadline count from then."""

from typing import NamedTuple

from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import BROKER_TIMESTAMP_MS, DEAD_AT, SENT_MS
from topology.codec.headers import HopHeaders, ms_or_none
from topology.codec.request import Clock


class Published(NamedTuple):
    """The time in ms since 1970, and whose clock told it."""

    ms: int
    by: Clock


def published(message: Message, past: HopHeaders, *, now_ms: int) -> Published:
    """When a message was published: never in the future, and never later than its first delivery to a worker."""
    seen_ms = past.first_seen_ms or now_ms
    told = None if DEAD_AT in message.headers else _told(message)
    # a dead letter that is published again still has the times of its first life
    return Published(seen_ms, "delivery") if told is None else Published(min(told.ms, seen_ms), told.by)


def _told(message: Message) -> Published | None:
    stamped = message.headers.get(BROKER_TIMESTAMP_MS)
    if isinstance(stamped, int) and not isinstance(stamped, bool) and stamped > 0:
        return Published(stamped, "broker")
    if (sent_ms := ms_or_none(message.headers, SENT_MS)) is not None:
        return Published(sent_ms, "sender")
    if message.timestamp_s is not None and message.timestamp_s > 0:
        # take the end of that second, so that a delay counted from it is never too short
        return Published(int(message.timestamp_s) * 1000 + 999, "timestamp")
    return None
