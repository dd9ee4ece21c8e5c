"""A provider's answer to one call, as all that call providers return it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from consumers.limits.base import Amounts, RateHeaders
from consumers.prices import Usage

REFUSAL = "refusal"
NO_CATEGORY = "none"
DONE = b"[DONE]"
"""With it, OpenAI's streams end; also streams in Anthropic's dialect, of servers that speak both: before, after or in
place of `message_stop`."""
OnEvent = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Answer:
    """A provider's answer to one call: the JSON in the request's dialect, and what else the response says."""

    body: bytes
    model: str
    provider: str
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None
    stop_reason: str | None = None
    refusal: str | None = None
    """Why the provider's safety systems ended the answer: the category that it names, or `NO_CATEGORY`. None: they did
    not."""
    files: tuple[str, ...] = ()
    """The ids of the files that the provider's tools have made for it."""
    rate: RateHeaders | None = None
    requests: float = 1.0
    """How much of a call it was: less than one, if requests were gathered."""
    is_counted: bool = True
    """Whether the provider has said what the call used."""
    counts_cached: bool = False
    """Whether tokens that are read from the prompt cache count against the account's rate limits."""
    cost_usd: float | None = None
    saved_usd: float = 0.0

    @property
    def counted(self) -> Amounts:
        found = counted(self.usage)
        cached = self.usage.cache_read_input_tokens if self.counts_cached else 0
        return found._replace(requests=self.requests, input_tokens=found.input_tokens + cached)


def counted(usage: Usage) -> Amounts:
    """What counts against the account's rate limits: one request, and its tokens, except those read from the prompt
    cache (docs/facts.md, section 10)."""
    return Amounts(1, usage.input_tokens + usage.cache_creation_input_tokens, usage.output_tokens)
