"""A request as a value: what a worker has read and checked of a delivered message."""

import json
import uuid
from dataclasses import dataclass

from lanekeeper.contract.messages import BodyAddress
from topology.codec.published import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, converted from its message and checked."""

    id: str
    lane: str
    body: bytes
    """The JSON for the provider: as it was published, with missing fields added."""
    model: str
    max_tokens: int
    stream: bool
    """Whether the requester wants the answer streamed: its parts as the model produces them."""
    beta: str | None
    """The value of the header `anthropic-beta` for the provider's call."""
    published: Published
    due_ms: int | None
    """The request must not start before this time; ms since 1970. None: it may start at once."""
    deadline_ms: int
    """The request must be answered by this time; ms since 1970."""
    states_stream: bool = True
    """False only if `body` is known not to contain the JSON field `stream`."""
    kept: BodyAddress | None = None
    """The address and digest of a body that was not fetched yet. In that case `body` is empty, and `model` and
    `max_tokens` have the lane's defaults. None: the body is in `body`."""
    media_bytes: int = 0
    """How many bytes of the body are not text for the model (images, documents). They are counted only for a body that
    was fetched from a store; else 0."""

    @property
    def text_bytes(self) -> int:
        """How many bytes of the body are text for the model. The number of input tokens is estimated from this."""
        return len(self.body) - self.media_bytes

    @property
    def start_ms(self) -> int:
        """When the request's wait begins: the time of publishing or the due time, whichever is later; ms since 1970."""
        return self.published.ms if self.due_ms is None else max(self.due_ms, self.published.ms)


def unpublished(prompt: str, *, model: str, max_tokens: int) -> Request:
    """Make a request for a direct call to a provider, without a message. Its lane is empty, and its times are 0."""
    asked = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}]}
    return Request(
        id=uuid.uuid4().hex,
        lane="",
        body=json.dumps(asked).encode(),
        model=model,
        max_tokens=max_tokens,
        stream=False,
        beta=None,
        published=Published(0, "sender"),
        due_ms=None,
        deadline_ms=0,
    )
