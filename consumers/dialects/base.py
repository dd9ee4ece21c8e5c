"""Defines what Lanekeeper has to know of an API's dialect: `Dialect`, a table of functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from consumers.dialects.answers import Answer
from consumers.failures import ProviderError
from consumers.limits.base import Amounts, RateHeaders
from lanekeeper.telemetry import signals
from topology.codec.decoding import Request


class ErrorFields(NamedTuple):
    """What an error body says, as the provider wrote it; "" if it does not say it."""

    type: str = ""
    code: str = ""
    message: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error response, or an error in a stream. `type`, `code` and `message` are short, and free of secrets."""

    status: int
    type: str = ""
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    request_id: str | None = None
    is_html: bool = False


class StreamedAnswer(Protocol):
    """Puts an answer together from the events of its stream."""

    size: int
    """The bytes of what it keeps."""
    is_complete: bool
    """No event follows."""

    def take(self, event: dict[str, Any], data: bytes) -> bytes | None:
        """Add an event, of which `data` is the JSON. Returns the event for the requester, or None if it gets none.
        Raises ProviderError if the event is malformed, or the answer too large."""

    def end(self) -> bytes | None:
        """The provider has ended the stream before it was complete. Returns the event that is missing, if one is.
        Raises TransientError if the answer is not whole."""

    def used(self) -> Amounts | None:
        """What the call has used so far; None if that is unknown."""

    def message(self) -> dict[str, Any]:
        """The whole answer, as if it had not been streamed."""


class NewStream(Protocol):
    """Makes a `StreamedAnswer`, which keeps at most so much."""

    def __call__(self, request: Request, *, max_bytes: int, max_values: int) -> StreamedAnswer: ...


class ReadAnswer(Protocol):
    """Reads a whole answer, of which `body` is the JSON. Raises ProviderError if it is none."""

    def __call__(
        self, message: dict[str, Any], body: bytes, *, provider: str, request_id: str | None, rate: RateHeaders | None
    ) -> Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What Lanekeeper knows of one dialect."""

    name: str
    path: str
    """Of a call, below the provider's base URL."""
    content: bytes
    """An event of a stream that has these bytes is the first token or follows it."""
    body: Callable[[Request, bool], bytes]
    """What is sent to the provider for a request; the second argument: whether its answer is streamed."""
    streams_above: int | None = None
    """A request with more output tokens than this is always streamed."""
    read_answer: ReadAnswer
    new_stream: NewStream
    is_event: Callable[[bytes, bytes], bool]
    """Whether clients read an event with this name and these data."""
    error_within: Callable[[Mapping[str, Any]], ErrorFields | None]
    """The error that came with status 200: as an event of a stream, or in place of an answer. None: it is no error."""
    error: Callable[[object], ErrorFields]
    """What the parsed body of an error response says."""
    status_of: Callable[[ErrorFields], int]
    """The status of an error that came without one."""
    classify: Callable[[Failure], ProviderError]
    read_rate: Callable[[Mapping[str, str], float], RateHeaders | None]
    """What the headers (names in lower case) say about limits at this time (seconds since 1970)."""
    operation: str = signals.CHAT
    """OpenTelemetry's name for a call."""
    joins_tokens: bool = False
    """Input and output tokens count against one limit."""
