"""The seam to a model provider: one method. What an attempt can end in is a value or one of the errors below.

    ProviderError               an attempt failed; `retry.decide` reads the class
    ├── TransientError          connection, timeout, 5xx, a stream or body cut short: try again
    ├── RateLimitedError        429: wait as told by `retry_after_s`
    ├── OverloadedError         529: back off
    ├── SpendLimitError         the account's or workspace's spend limit: never try again
    └── RejectedError           the provider refused it for good (400, 401, 403, 404, 413, 422, other 4xx)
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from topology.contract.messages import Request
from topology.contract.problems import LanekeeperError


class ProviderError(LanekeeperError):
    """An attempt failed. `detail` is one line without content of the request; `status` the provider's, 0 if none."""

    def __init__(self, detail: str, *, status: int = 0, type: str = "", request_id: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.type = type
        """Anthropic's error type (`overloaded_error`, …) or our own word for what happened."""
        self.request_id = request_id


class TransientError(ProviderError):
    """Connection lost, time over, a 5xx, or an answer that is broken or incomplete: trying again may help."""


class RateLimitedError(ProviderError):
    """429. `retry_after_s` is what the provider told, None where it told nothing."""

    def __init__(
        self,
        detail: str,
        *,
        retry_after_s: float | None = None,
        status: int = 429,
        type: str = "rate_limit_error",
        request_id: str | None = None,
    ) -> None:
        super().__init__(detail, status=status, type=type, request_id=request_id)
        self.retry_after_s = retry_after_s


class OverloadedError(ProviderError):
    """529, or an `overloaded_error` in the middle of a stream. May carry a `retry-after` too."""

    retry_after_s: float | None = None


class SpendLimitError(ProviderError):
    """The account's or the workspace's spend limit is reached: no retry helps before a person acts."""


class RejectedError(ProviderError):
    """The provider refused the request for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one attempt, as the provider counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole Message of the provider's."""

    body: bytes
    """JSON of Anthropic's Message: the provider's own bytes, or, streamed, put together from the events."""
    model: str
    provider: str
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None
    stop_reason: str | None = None


Parts = Callable[[bytes], Awaitable[None]]
"""Takes one event of the stream, as JSON. Called in order, awaited before the next event is read."""


class Provider(Protocol):
    """One adapter. Its client's own retries are switched off: one place decides to retry (`consumers/retry.py`)."""

    name: str

    async def stream(self, request: Request, *, timeout_s: float, parts: Parts | None) -> Answer:
        """Make one attempt. With `parts`, or where the answer may take longer than ten minutes, it is streamed.

        `timeout_s` bounds the whole call, or, streamed, the first event and every pause after it.
        Raises `ProviderError`; cancelling it closes the provider's socket.
        """
        ...

    async def aclose(self) -> None: ...
