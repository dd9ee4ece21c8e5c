"""What travels: an AMQP message as a value, and the request that is read from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Clock: TypeAlias = Literal["broker", "sender", "timestamp", "delivery"]
"""Who told when a request was published: the broker (`timestamp_in_ms`), the sender (`x-lane-sent-ms`), the property
`timestamp`, or nobody: then its wait counts from the first delivery, and the time before that is not known."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that passed the codec: what is asked, of which lane, until when."""

    id: str
    lane: str
    app: str
    body: bytes
    """The JSON that goes to the provider: as published where nothing had to be filled in."""
    model: str
    max_tokens: int
    stream: bool
    """The requester asked for the parts as they come."""
    beta: str | None
    sent_ms: int
    """When it was published, as far as is known; ms since 1970."""
    sent_by: Clock
    due_ms: int | None
    """Not to be started before; ms since 1970. None: at once."""
    deadline_ms: int
    """When its time is over; ms since 1970."""
    attempts: int
    """Attempts that were made before this delivery."""
    states_stream: bool = True
    """Whether its body may have the field `stream`."""
    errors: tuple[str, ...] = ()
    """What these attempts failed with, newest first, five at most."""

    @property
    def start_ms(self) -> int:
        """From when its wait counts: publishing, or the due time."""
        return self.sent_ms if self.due_ms is None else max(self.due_ms, self.sent_ms)
