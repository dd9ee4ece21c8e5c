"""Reads the provider's answers that came with HTTP 200. An answer must be a whole Message with a `stop_reason`;
anything else is a failed call."""

from collections.abc import AsyncIterable
from typing import Any, Final

import httpx2
import jiter

from consumers.failures import TransientError
from consumers.limits.headers import RateHeaders
from consumers.prices import Usage
from consumers.providers.base import Answer

MOST_TOKENS: Final = 10_000_000
"""A provider's token count above this is ignored as impossible, because charging it would use up the budget for
ever."""
_NAME_CHARACTERS: Final = 256
"""A name in a provider's answer, such as the model's, is copied into headers and spans only if it has at most this many
characters."""


def pieces(response: httpx2.Response) -> AsyncIterable[bytes]:
    """Yield the body of a provider's HTTP answer in pieces, decompressed. A body that is not compressed is read
    directly from the transport's stream, which takes 40 % of the CPU time of httpx2's own method."""
    if "content-encoding" not in response.headers and isinstance(response.stream, httpx2.AsyncByteStream):
        return response.stream
    return response.aiter_bytes()


def parse_message(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of an answer that was not streamed, as a dict; an empty dict if the JSON is no object. Raises
    `TransientError` if the body is not JSON."""
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
    """Turn the provider's Message into an `Answer`. `body`: the Message as JSON. Raises `TransientError` if the Message
    is not whole."""
    stop_reason = message.get("stop_reason")
    if message.get("type") != "message" or not isinstance(message.get("content"), list):
        raise TransientError("the answer is JSON, but no Message", type="broken_answer")
    if not _name(stop_reason):
        raise TransientError("the answer has no stop_reason", type="unfinished")
    return Answer(
        body=body,
        model=_name(message.get("model")),
        provider=provider,
        usage=_usage(message.get("usage")),
        request_id=request_id,
        stop_reason=_name(stop_reason),
        rate=rate,
    )


def _name(value: object) -> str:
    """The value, if it is a string that is short enough for headers and spans; otherwise an empty string."""
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
