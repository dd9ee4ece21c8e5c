"""What counts as an answer: a whole Message that says why it stopped. Anything else after HTTP 200 is a failure."""

from collections.abc import AsyncIterable
from typing import Any, Final

import httpx2
import jiter

from consumers.failures import TransientError
from consumers.limits.headers import RateHeaders
from consumers.providers.base import Answer, Usage

MOST_TOKENS: Final = 10_000_000
"""No call uses more. A larger count is ignored, because the budget would be in debt for it for ever."""
_NAME_CHARACTERS: Final = 256


def pieces(response: httpx2.Response) -> AsyncIterable[bytes]:
    """The body of an answer, unpacked. A body that is not packed is read as it comes: 40 % of httpx2's own time."""
    if "content-encoding" not in response.headers and isinstance(response.stream, httpx2.AsyncByteStream):
        return response.stream
    return response.aiter_bytes()


def parse_message(body: bytes, content_type: str) -> dict[str, Any]:
    """The Message of an answer that was not streamed; empty if it is no object. Raises `TransientError` if not JSON."""
    try:
        message = jiter.from_json(body, allow_inf_nan=False, cache_mode="keys")
    except ValueError as error:
        kind = content_type[:50] or "no content type"
        raise TransientError(
            f"the answer ({kind}, {len(body)} bytes) is not JSON: {error}", type="broken_answer"
        ) from error
    return message if isinstance(message, dict) else {}


def read_answer(
    message: dict[str, Any], body: bytes, *, provider: str, request_id: str | None, rate: RateHeaders | None = None
) -> Answer:
    """The answer, if `message` is whole; `body` is its JSON. Raises `TransientError` otherwise."""
    stop_reason = message.get("stop_reason")
    if message.get("type") != "message" or not isinstance(message.get("content"), list):
        raise TransientError("the answer is JSON, but no Message", type="broken_answer", request_id=request_id)
    if not _word(stop_reason):
        raise TransientError("the answer has no stop_reason", type="unfinished", request_id=request_id)
    return Answer(
        body=body,
        model=_word(message.get("model")),
        provider=provider,
        usage=_usage(message.get("usage")),
        request_id=request_id,
        stop_reason=_word(stop_reason),
        rate=rate,
    )


def _word(value: object) -> str:
    """A name for headers and spans; empty if the value cannot be a name."""
    return value if isinstance(value, str) and len(value) <= _NAME_CHARACTERS else ""


def _usage(counts: object) -> Usage:
    given = counts if isinstance(counts, dict) else {}

    def count(name: str) -> int:
        value = given.get(name)
        return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0

    return Usage(
        input_tokens=count("input_tokens"),
        output_tokens=count("output_tokens"),
        cache_creation_input_tokens=count("cache_creation_input_tokens"),
        cache_read_input_tokens=count("cache_read_input_tokens"),
    )
