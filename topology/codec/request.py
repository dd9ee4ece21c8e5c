"""A request as a value: what is asked, of which lane, until when."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Clock: TypeAlias = Literal["broker", "sender", "timestamp", "delivery"]
"""Who told when a request was published: the broker (`timestamp_in_ms`), the sender (`x-lane-sent-ms`), the property
`timestamp`, or nobody: then its wait counts from the first delivery, and the time before that is not known."""


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
