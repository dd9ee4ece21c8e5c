"""An AMQP message, its headers and the address of its body, as Python values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lanekeeper.contract.names import BODY, BODY_SHA256

PRIORITY_AT_MOST = 9
"""RabbitMQ 4.3 orders quorum queues by priorities up to 31, without a setting, so Lanekeeper itself refuses what would
overtake all others."""
UNREADABLE = "\x00unreadable"
"""The key of a header that names unreadable properties, and why. A request with it is refused."""


class Encoded(bytes):
    """A header's value in its AMQP encoding, with its type byte."""


class Headers(dict[str, Any]):
    """The headers of a delivered message: `wire` has the bytes, `places` where each value begins and ends in them."""

    __slots__ = ("places", "wire")

    def __init__(self, wire: bytes = b"") -> None:
        super().__init__()
        self.wire = wire
        self.places: dict[str, tuple[int, int]] = {}

    def encoded(self, name: str) -> Any:
        if (place := self.places.get(name)) is None:
            return self[name]
        return Encoded(self.wire[place[0] : place[1]])


@dataclass(slots=True, kw_only=True)
class Message:
    """A message with its AMQP properties."""

    body: bytes
    exchange: str = ""
    routing_key: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)
    content_type: str | None = None
    content_encoding: str | None = None
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    priority: int | None = None
    type: str | None = None
    expiration: str | None = None
    timestamp_s: float | None = None
    user_id: str | None = None
    app_id: str | None = None
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Depth:
    """The length of a queue (without unacknowledged messages), and the number of its consumers."""

    ready: int
    consumers: int


@dataclass(frozen=True, slots=True)
class BodyAddress:
    """Where a body is that is not in its message, and its SHA-256 in hex."""

    address: str
    sha256: str

    @property
    def headers(self) -> Mapping[str, str]:
        return {BODY: self.address, BODY_SHA256: self.sha256}


def body_address_in(headers: Mapping[str, Any]) -> BodyAddress | None:
    """None if the message contains its body."""
    address, sha256 = headers.get(BODY), headers.get(BODY_SHA256)
    return BodyAddress(address, sha256) if isinstance(address, str) and isinstance(sha256, str) else None
