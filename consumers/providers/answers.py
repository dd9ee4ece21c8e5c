"""A provider's answer to one call, as all that call providers return it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from consumers.limits.base import Amounts, RateHeaders
from consumers.prices import Usage

REFUSAL = "refusal"
NO_CATEGORY = "none"
CONTENT = b'"content_block_'
"""The events before the first token do not have it."""
OnEvent = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Answer:
    """A provider's answer to one call: a whole Message of Anthropic's API, and what else the response says."""

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
    cost_usd: float | None = None
    saved_usd: float = 0.0

    @property
    def counted(self) -> Amounts:
        return counted(self.usage)


def counted(usage: Usage) -> Amounts:
    """What counts against the account's rate limits: one request, and its tokens, except those read from the prompt
    cache (docs/facts.md, section 10)."""
    return Amounts(1, usage.input_tokens + usage.cache_creation_input_tokens, usage.output_tokens)
