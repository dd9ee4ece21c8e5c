"""The seam to a model provider: one method. A call returns an `Answer` or raises one of `consumers/failures.py`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from consumers.limits.headers import RateHeaders
from topology.codec.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call, as the provider counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole Message from the provider."""

    body: bytes
    """JSON of Anthropic's Message: the provider's own bytes or, if streamed, put together from the events."""
    model: str
    provider: str
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None
    stop_reason: str | None = None
    rate: RateHeaders | None = None
    """The account's limits in the response's headers."""
    cost_usd: float | None = None
    """The cost by the table of prices; None if the model has no price."""


OnEvent = Callable[[bytes], Awaitable[None]]
"""Takes one event of the stream, as JSON. Called in order, awaited before the next event is read."""


class Provider(Protocol):
    """One adapter. Its client's own retries are switched off: one place decides to retry (`consumers/retry.py`)."""

    name: str

    async def stream(self, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        """Make one call. It is streamed if `parts` is given, or if the answer may take longer than ten minutes.

        `timeout_s` bounds the whole call; if streamed, the time to the first event and every pause after it.
        Raises `ProviderError`; cancelling it closes the provider's socket.
        """

    async def aclose(self) -> None: ...
