"""Defines the interface to a model provider. A call returns an `Answer`, or raises an exception of
`consumers/failures.py`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from consumers.limits.base import Amounts
from consumers.limits.headers import RateHeaders
from consumers.prices import Usage
from topology.codec.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A provider's answer to one call: a whole Message of Anthropic's API, and what else the response says (ids, token
    counts, rate limits)."""

    body: bytes
    """The Message as JSON: the provider's own bytes or, for a stream, put together from its events."""
    model: str
    provider: str
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None
    stop_reason: str | None = None
    rate: RateHeaders | None = None
    """What the response's headers say about the rate limits of the account at the provider; None if they say
    nothing."""
    cost_usd: float | None = None
    """The cost of the call in US dollars, by the table of prices; None if the model has no price."""

    @property
    def counted(self) -> Amounts:
        """What the provider counts for the call against the account's rate limits: one request, and its tokens, except
        those read from the prompt cache, which count against no limit (docs/facts.md, section 10)."""
        return Amounts(1, self.usage.input_tokens + self.usage.cache_creation_input_tokens, self.usage.output_tokens)


OnEvent = Callable[[bytes], Awaitable[None]]
"""A function that is called with the JSON of each event of a stream, in order; the next event is read only after the
function has returned."""


class Provider(Protocol):
    """The adapter that calls one provider. It does not retry failed calls, because `consumers/retry.py` decides on
    retries."""

    name: str

    async def stream(self, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        """Make one call. The answer is streamed if `parts` is given, or if it may take longer than ten minutes.

        `timeout_s` is the time limit of the whole call or, if the answer is streamed, of the time until the first event
        and of each pause between events. Raises `ProviderError`; cancelling the call closes its socket.
        """

    async def aclose(self) -> None: ...
