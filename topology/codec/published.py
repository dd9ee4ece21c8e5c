"""Finds out when a request was published. The request's wait and its deadline count from this time."""

from typing import Literal, NamedTuple, TypeAlias

from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import BROKER_TIMESTAMP_MS, DEAD_AT, SENT_MS
from topology.codec.headers import HopHeaders, ms_or_none

Clock: TypeAlias = Literal["broker", "sender", "timestamp", "delivery"]
"""The source of a request's time of publishing: the broker (header `timestamp_in_ms`), the sender (header
`x-lane-sent-ms`), the property `timestamp`, or, without any of these, the first delivery to a worker."""


class Published(NamedTuple):
    """The time at which a request was published, in ms since 1970, and the source of this time."""

    ms: int
    by: Clock


def published(message: Message, history: HopHeaders, *, now_ms: int) -> Published:
    """When a message was published, and the source of this time. It is the time that the sender or the broker has
    written into the message, or if there is none, the time of the first delivery to a worker. The result is never later
    than the first delivery."""
    seen_ms = history.first_seen_ms or now_ms
    stated = None if DEAD_AT in message.headers else _stated(message)
    # a dead letter that is published again has the timestamps of its first publish, so they are not used
    return Published(seen_ms, "delivery") if stated is None else Published(min(stated.ms, seen_ms), stated.by)


def _stated(message: Message) -> Published | None:
    stamped = message.headers.get(BROKER_TIMESTAMP_MS)
    if isinstance(stamped, int) and not isinstance(stamped, bool) and stamped > 0:
        return Published(stamped, "broker")
    if (sent_ms := ms_or_none(message.headers, SENT_MS)) is not None:
        return Published(sent_ms, "sender")
    if message.timestamp_s is not None and message.timestamp_s > 0:
        # take the end of that second, so that a delay counted from it is never too short
        return Published(int(message.timestamp_s) * 1000 + 999, "timestamp")
    return None
