"""Reads Messages of Anthropic's API, and their usage. An answer must be a whole Message with a `stop_reason`; anything
else is a failed call."""

from collections.abc import Mapping
from typing import Any, Final

from consumers.dialects.answers import NO_CATEGORY, REFUSAL, Answer
from consumers.dialects.fields import count_in, name_in
from consumers.failures import TransientError
from consumers.limits.base import RateHeaders
from consumers.prices import Tokens, Usage
from topology.codec.file_ids import made_in

BATCH_TIER: Final = "batch"


def read_answer(
    message: dict[str, Any], body: bytes, *, provider: str, request_id: str | None, rate: RateHeaders | None = None
) -> Answer:
    """Turn the provider's Message (`body`: as JSON) into an `Answer`. Raises `TransientError` if it is not whole."""
    stop_reason = message.get("stop_reason")
    if message.get("type") != "message" or not isinstance(message.get("content"), list):
        raise TransientError("the answer is JSON, but no Message", type="broken_answer")
    if not name_in(stop_reason):
        raise TransientError("the answer has no stop_reason", type="unfinished")
    return Answer(
        body=body,
        model=name_in(message.get("model")),
        provider=provider,
        usage=read_usage(message.get("usage")),
        request_id=request_id,
        stop_reason=name_in(stop_reason),
        refusal=_category(message) if stop_reason == REFUSAL else None,
        files=made_in(message) if b'"file_id"' in body else (),
        rate=rate,
    )


def _category(message: Mapping[str, Any]) -> str:
    details = message.get("stop_details")
    return name_in(details.get("category") if isinstance(details, dict) else None) or NO_CATEGORY


def read_usage(counts: object) -> Usage:
    """A count that is missing or impossible is 0."""
    given = counts if isinstance(counts, dict) else {}
    tokens, tools = _read_tokens(given), given.get("server_tool_use")
    iterations = given.get("iterations")
    return Usage(
        input_tokens=tokens.input_tokens,
        output_tokens=tokens.output_tokens,
        cache_creation_input_tokens=tokens.cache_creation_input_tokens,
        cache_creation_1h_tokens=tokens.cache_creation_1h_tokens,
        cache_read_input_tokens=tokens.cache_read_input_tokens,
        web_searches=count_in(tools, "web_search_requests"),
        is_fast=given.get("speed") == "fast",
        geo=name_in(given.get("inference_geo")),
        is_batch=given.get("service_tier") == BATCH_TIER,
        iterations=tuple(
            (name_in(each.get("model")), _read_tokens(each))
            for each in (iterations if isinstance(iterations, list) else ())
            if isinstance(each, dict)
        ),
    )


def _read_tokens(given: Mapping[str, object]) -> Tokens:
    written = count_in(given, "cache_creation_input_tokens")
    return Tokens(
        input_tokens=count_in(given, "input_tokens"),
        output_tokens=count_in(given, "output_tokens"),
        cache_creation_input_tokens=written,
        cache_creation_1h_tokens=min(written, count_in(given.get("cache_creation"), "ephemeral_1h_input_tokens")),
        cache_read_input_tokens=count_in(given, "cache_read_input_tokens"),
    )
