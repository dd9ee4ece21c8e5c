"""A request as a value: body, lane, deadline."""

import json
import uuid
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lanekeeper.contract.messages import Kept

Clock: TypeAlias = Literal["broker", "sender", "timestamp", "delivery"]
"""Where the time of publishing comes from: the broker (`timestamp_in_ms`), the sender (`x-lane-sent-ms`), the property
`timestamp`, or none of these. In the last case the wait counts from the first delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that the codec has read and checked."""

    id: str
    lane: str
    body: bytes
    """The JSON for the provider: as it was published, with missing fields filled in."""
    model: str
    max_tokens: int
    stream: bool
    """The requester wants the parts of the answer as they are produced."""
    beta: str | None
    sent_ms: int
    """When it was published, as far as is known; ms since 1970."""
    sent_by: Clock
    due_ms: int | None
    """The request must not start before this time; ms since 1970. None: it may start at once."""
    deadline_ms: int
    """The request must be answered by this time; ms since 1970."""
    states_stream: bool = True
    """Whether its body may have the field `stream`."""
    kept: Kept | None = None
    """Where the body lies that is yet to be fetched: until then `body` is empty, and model and `max_tokens` are the
    lane's. None: the body is here."""
    media_bytes: int = 0
    """Bytes of the body that are not text for the model (images, documents), as far as they are known."""

    @property
    def text_bytes(self) -> int:
        """By this the tokens of the input are estimated."""
        return len(self.body) - self.media_bytes

    @property
    def start_ms(self) -> int:
        """The start of the request's wait: the time of publishing, or the due time."""
        return self.sent_ms if self.due_ms is None else max(self.due_ms, self.sent_ms)


def unpublished(prompt: str, *, model: str, max_tokens: int) -> Request:
    """A request that no message brought, for a provider that is called directly. It has neither times nor a lane."""
    asked = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}]}
    return Request(
        id=uuid.uuid4().hex,
        lane="",
        body=json.dumps(asked).encode(),
        model=model,
        max_tokens=max_tokens,
        stream=False,
        beta=None,
        sent_ms=0,
        sent_by="sender",
        due_ms=None,
        deadline_ms=0,
    )
