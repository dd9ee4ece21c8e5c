"""What travels: an AMQP message as a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRIORITY_AT_MOST = 9
"""A quorum queue orders up to 31, and cannot be told less: what is above would pass everybody else's requests."""
UNREADABLE = "\x00unreadable"
"""Key in the headers of a message whose properties could not be read, with the reason; whoever sends it is refused."""


class Encoded(bytes):
    """A header's value as it is on the wire, its AMQP type first; published again as it is."""


class Headers(dict[str, Any]):
    """Headers as they were delivered: their values, and where in `wire` each of them stands."""

    __slots__ = ("places", "wire")

    def __init__(self, wire: bytes = b"") -> None:
        super().__init__()
        self.wire = wire
        self.places: dict[str, tuple[int, int]] = {}

    def encoded(self, name: str) -> Any:
        """The value as it came; what did not come over the wire as it is."""
        if (place := self.places.get(name)) is None:
            return self[name]
        return Encoded(self.wire[place[0] : place[1]])


@dataclass(slots=True, kw_only=True)
class Message:
    """A message with its AMQP properties, as it was delivered or as it is to be published."""

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
