"""An AMQP message as a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lanekeeper.contract.names import BODY, BODY_SHA256

PRIORITY_AT_MOST = 9
"""A quorum queue orders priorities up to 31, and that cannot be lowered: a higher priority would overtake everybody."""
UNREADABLE = "\x00unreadable"
"""Header key that names the properties of a message that could not be read, and why. A request with this key is
refused."""


class Encoded(bytes):
    """A header's value in its AMQP encoding, type byte first. It is published again unchanged."""


class Headers(dict[str, Any]):
    """Headers as delivered: their values, and the position of each value in `wire`, the encoded table."""

    __slots__ = ("places", "wire")

    def __init__(self, wire: bytes = b"") -> None:
        super().__init__()
        self.wire = wire
        self.places: dict[str, tuple[int, int]] = {}

    def encoded(self, name: str) -> Any:
        """The value as it was encoded; a value that was set here, not received, is returned as it is."""
        if (place := self.places.get(name)) is None:
            return self[name]
        return Encoded(self.wire[place[0] : place[1]])


@dataclass(slots=True, kw_only=True)
class Message:
    """A message with its AMQP properties, either delivered or to be published."""

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
class Kept:
    """Where a body lies, and the SHA-256 of its content in hex."""

    address: str
    sha256: str

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of a message in place of the body."""
        return {BODY: self.address, BODY_SHA256: self.sha256}


def kept_in(headers: Mapping[str, Any]) -> Kept | None:
    """The body that a message's headers name; None: the message has its body in itself."""
    address, sha256 = headers.get(BODY), headers.get(BODY_SHA256)
    return Kept(address, sha256) if isinstance(address, str) and isinstance(sha256, str) else None
