"""What OpenAI's errors, headers and streams mean, and those of servers that speak its dialects in their own way."""

import json
from typing import Any, get_args

import httpx2
import pytest
from openai.types.responses import ResponseError

from consumers.dialects import DIALECTS
from consumers.dialects.answers import Answer
from consumers.dialects.openai import read_rate
from consumers.dialects.openai_chat import CHAT, ChatStream
from consumers.dialects.openai_embeddings import inputs_of, join, separate
from consumers.failures import (
    AccountError,
    AnswerTooLargeError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.limits.base import BucketHeaders, RateHeaders
from consumers.prices import Usage
from consumers.providers.errors import from_fields, from_response
from lanekeeper.contract import names as n

QUOTA = {"message": "You exceeded your current quota.", "type": "insufficient_quota", "code": "insufficient_quota"}
TPM = (
    "Rate limit reached for gpt-4o in organization org-1 on tokens per min (TPM): Limit 10000, Used 9000, "
    "Requested 2000. Please try again in 6s. Visit …"
)


@pytest.mark.parametrize(
    ("status", "body", "expected", "wait_s"),
    [
        (429, {"error": QUOTA}, AccountError, None),
        (401, {"error": {"message": "Incorrect API key", "code": "invalid_api_key"}}, AccountError, None),
        (402, {"error": {"message": "Insufficient credits", "code": 402}}, AccountError, None),
        (429, {"error": {"message": TPM, "type": "tokens", "code": "rate_limit_exceeded"}}, RateLimitedError, 6.0),
        (429, {"error": {"message": "requests per day (RPD): … try again in 8m38.4s."}}, RateLimitedError, 518.4),
        (429, {"error": {"code": "429", "message": "Please retry after 6 seconds."}}, RateLimitedError, 6.0),
        (429, {"error": {"message": f"Request too large for gpt-4o: {TPM}"}}, RejectedError, None),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, RejectedError, None),
        (500, {"error": {"message": "too long", "code": "context_length_exceeded"}}, RejectedError, None),
        (400, {"error": {"message": "filtered", "code": "content_filter", "innererror": {}}}, RejectedError, None),
        (404, {"error": {"message": "gpt-9 does not exist", "code": "model_not_found"}}, RejectedError, None),
        (404, {"error": {"code": "DeploymentNotFound", "message": "The API deployment …"}}, RejectedError, None),
        (404, {"detail": "Not Found"}, AccountError, None),
        (
            503,
            {"error": {"message": "The engine is currently overloaded", "type": "server_error"}},
            OverloadedError,
            None,
        ),
        (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, TransientError, None),
        (500, {"error": {"message": "The server had an error", "type": "server_error"}}, TransientError, None),
        (400, [{"error": {"code": 400, "message": "bad", "status": "INVALID_ARGUMENT"}}], RejectedError, None),
        (400, {"object": "error", "message": "bad", "type": "BadRequestError", "code": 400}, RejectedError, None),
        (400, {"error": "model is required"}, RejectedError, None),
    ],
)
def test_each_error_has_its_class(status: int, body: Any, expected: type[ProviderError], wait_s: float | None) -> None:
    error = from_response(httpx2.Response(status, content=json.dumps(body).encode()), CHAT, secret="sk")

    assert type(error) is expected
    assert (error.status, error.retry_after_s) == (status, wait_s)
    assert "not an error body" not in error.detail


@pytest.mark.parametrize(
    ("event", "expected", "status"),
    [
        ({"error": {"code": 502, "message": "upstream died"}}, TransientError, 502),
        ({"error": {"code": 429, "message": "rate limited upstream"}}, RateLimitedError, 429),
        ({"error": {"message": "a", "type": "server_error"}, "choices": []}, TransientError, 500),
        ({"object": "error", "message": "bad", "code": 400}, RejectedError, 400),
        ({"error": QUOTA}, AccountError, 429),
    ],
)
def test_an_error_that_comes_with_status_200_is_one_all_the_same(
    event: dict[str, Any], expected: type[ProviderError], status: int
) -> None:
    """OpenRouter answers so; others do in the middle of a stream."""
    fields = CHAT.error_within(event)
    assert fields is not None
    error = from_fields(fields, CHAT, secret="")

    assert (type(error), error.status) == (expected, status)


def test_a_failed_response_is_an_error() -> None:
    responses = DIALECTS[n.OPENAI_RESPONSES]
    failed = {"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "m"}}}
    fields = responses.error_within(failed)
    assert fields is not None
    assert isinstance(from_fields(fields, responses, secret=""), RateLimitedError)
    assert responses.error_within({"type": "error", "code": "server_error", "message": "m"}) is not None
    assert responses.error_within({"object": "response", "status": "completed", "error": None}) is None


@pytest.mark.parametrize("code", get_args(ResponseError.model_fields["code"].annotation))
def test_each_code_of_a_failed_response_that_the_installed_sdk_declares_has_a_class(code: str) -> None:
    """They come with status 200. What is wrong with one request is not tried again, and trips no breaker for others."""
    responses = DIALECTS[n.OPENAI_RESPONSES]
    failed = {"type": "response.failed", "response": {"status": "failed", "error": {"code": code, "message": "m"}}}
    fields = responses.error_within(failed)
    assert fields is not None
    error = from_fields(fields, responses, secret="")

    of_others = {
        "server_error": TransientError,
        "vector_store_timeout": TransientError,
        "rate_limit_exceeded": RateLimitedError,
    }
    assert type(error) is of_others.get(code, RejectedError)
    assert (error.status == 400) is (code not in of_others)


@pytest.mark.parametrize(("code", "status"), [("429", 429), (503, 503), ("0429", 500), ("0429" + "0" * 5000, 500)])
def test_only_three_digits_are_a_status(code: str | int, status: int) -> None:
    error = from_fields(CHAT.error({"error": {"code": code, "message": "m"}}), CHAT, secret="")

    assert error.status == status


def limits(**of: str) -> RateHeaders | None:
    return read_rate({f"x-ratelimit-{name.replace('_', '-')}": value for name, value in of.items()}, 0.0)


def test_the_limit_of_tokens_counts_for_input_and_output() -> None:
    assert limits(
        limit_requests="5000", remaining_requests="4999", reset_requests="12ms",
        limit_tokens="160000", remaining_tokens="120000", reset_tokens="15s",
    ) == RateHeaders(
        BucketHeaders(limit=5000, remaining=4999), BucketHeaders(limit=160000, remaining=120000),
        BucketHeaders(limit=160000),
    )  # fmt: skip


def test_a_limit_of_a_day_is_none_of_a_minute() -> None:
    found = limits(limit_requests="200", remaining_requests="199", reset_requests="7m12s")
    assert found is None
    assert limits(limit_requests="60", remaining_requests="59", reset_requests="1s") is not None
    assert limits(limit_requests="60", remaining_requests="59", reset_requests="soon") is not None


def chunk(delta: dict[str, Any] | None = None, *, index: int = 0, **choice: Any) -> dict[str, Any]:
    fields = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o"}
    return {**fields, "choices": [{"index": index, "delta": delta or {}, "finish_reason": None, **choice}]}


def taken(*events: dict[str, Any], asks_usage: bool = False, **limits: int) -> tuple[ChatStream, list[bytes | None]]:
    stream = ChatStream(asks_usage=asks_usage, **limits)
    return stream, [stream.take(event, json.dumps(event, separators=(",", ":")).encode()) for event in events]


def test_chunks_become_the_answer_that_would_have_come_whole() -> None:
    """With several choices, tool calls in pieces, and log probabilities."""
    token = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    stream, _ = taken(
        chunk({"role": "assistant", "content": ""}),
        chunk({"role": "assistant", "content": "x"}, index=1, logprobs={"content": [token]}),
        chunk({"content": "a"}, logprobs={"content": [token]}),
        chunk({"content": "b"}, logprobs={"content": [token]}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]}),
        chunk({"tool_calls": [{"index": 1, "function": {"name": "go", "arguments": "{}"}}]}),  # without an id
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk(index=1, finish_reason="length"),
        chunk(finish_reason="tool_calls"),
        {"id": "c-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
        {},
    )

    assert stream.is_complete
    found = stream.message()
    first, second = found["choices"]
    assert first == {
        "index": 0,
        "finish_reason": "tool_calls",
        "logprobs": {"content": [token, token]},
        "message": {
            "role": "assistant",
            "content": "ab",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}},
                {"function": {"name": "go", "arguments": "{}"}},
            ],
        },
    }
    assert (second["message"]["content"], second["finish_reason"]) == ("x", "length")
    assert (found["object"], found["usage"]["total_tokens"]) == ("chat.completion", 7)
    answer = CHAT.read_answer(found, b"", provider="p", request_id=None, rate=None)
    assert (answer.usage, answer.stop_reason) == (Usage(input_tokens=3, output_tokens=4), "tool_calls")


def test_what_each_chunk_says_anew_is_in_the_answer_once() -> None:
    """Azure's results of its content filter, OpenRouter's own reason, and its formats of reasoning."""
    safe: dict[str, Any] = {"content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}}
    thought = {"index": 0, "type": "reasoning.text", "format": "anthropic-claude-v1"}
    stream, _ = taken(
        chunk({"role": "assistant", "reasoning_details": [{**thought, "text": "a"}]}, **safe),
        chunk({"content": "x", "reasoning_details": [{**thought, "text": "b"}]}, **safe),
        chunk(finish_reason="stop", native_finish_reason="end_turn", **safe),
        chunk(finish_reason="stop", native_finish_reason="end_turn"),
    )

    assert stream.message()["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "native_finish_reason": "end_turn",
            **safe,
            "message": {
                "role": "assistant",
                "content": "x",
                "reasoning_details": [{"type": "reasoning.text", "format": "anthropic-claude-v1", "text": "ab"}],
            },
        }
    ]


def test_empty_and_missing_values_of_later_chunks_take_nothing_back() -> None:
    """Qwen's server repeats a call's id and name as empty texts; servers written in Go send an empty list as null."""
    function = {"name": "look", "arguments": "{"}
    stream, passed = taken(
        chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}),
        chunk({"tool_calls": [{"index": 0, "id": "", "type": "", "function": {"name": "", "arguments": "}"}}]}),
        chunk(finish_reason="tool_calls"),
        {"id": "c-1", "choices": None, "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    )

    called = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert stream.message()["choices"][0]["message"]["tool_calls"] == [called]
    assert passed[-1] is None


def test_a_caller_that_did_not_ask_for_usage_gets_none_in_the_chunks() -> None:
    text = {**chunk({"content": ', "usage":null,'}), "usage": None}
    last = {"id": "c-1", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    _, passed = taken(text, last)
    assert passed[0] is not None
    assert json.loads(passed[0]) == chunk({"content": ', "usage":null,'})
    assert passed[1] is None
    _, passed = taken(text, last, asks_usage=True)
    assert [json.loads(each or b"") for each in passed] == [text, last]


@pytest.mark.parametrize("dialect", sorted(n.OPENAI_DIALECTS))
@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": 5}, {"data": []}, {"output": None}, {"type": "message"}]
)
def test_json_that_is_no_answer_is_a_failed_call(dialect: str, body: dict[str, Any]) -> None:
    with pytest.raises(TransientError):
        DIALECTS[dialect].read_answer(body, b"", provider="p", request_id=None, rate=None)


@pytest.mark.parametrize("broken", [{"choices": 5}, {"choices": [5]}, {"choices": [{"index": [], "delta": {}}]}])
def test_a_chunk_that_makes_no_sense_breaks_the_stream(broken: dict[str, Any]) -> None:
    with pytest.raises(TransientError, match="the stream is broken"):
        taken(broken)


def test_what_a_stream_keeps_in_memory_is_limited() -> None:
    with pytest.raises(AnswerTooLargeError, match="bytes"):
        taken(*[chunk({"content": "x" * 100}) for _ in range(20)], max_bytes=1000)
    with pytest.raises(AnswerTooLargeError, match="keys and values"):
        taken(*[chunk({"tool_calls": [{"index": at, "id": "a"}]}) for at in range(500)], max_values=1000)


def test_requests_for_embeddings_become_one_call_whose_answer_is_separated() -> None:
    """Texts, lists of texts and arrays of tokens; the vectors are copied as they came, in any order."""
    bodies = [{"model": "m", "input": "aaaa"}, {"input": ["b", "cc"], "model": "m"}]
    several = [inputs_of(json.dumps(body).encode()) for body in bodies]
    assert several[0].others == several[1].others
    assert several[0].others != inputs_of(b'{"model":"m","input":[1,2]}').others
    assert inputs_of(b'{"model":"m","input":[1,2]}').inputs == [[1, 2]]
    assert json.loads(join(several)) == {"model": "m", "input": ["aaaa", "b", "cc"]}

    items = (
        b'{"object":"embedding","index":2,"embedding":[0.10,3e-9]},'
        b'{"index": 0, "embedding":"AAA="},{"index":1,"embedding":[]}'
    )
    whole = Answer(body=b'{"data":[%b]}' % items, model="m", provider="p", usage=Usage(input_tokens=9))
    first, second = separate(whole, several)
    assert json.loads(first.body)["data"] == [{"index": 0, "embedding": "AAA="}]
    assert b'{"object":"embedding","index":1,"embedding":[0.10,3e-9]}' in second.body
    assert [each.usage.input_tokens for each in (first, second)] == [4, 5]
    assert [each.counted.requests for each in (first, second)] == [0.5, 0.5]

    with pytest.raises(TransientError, match="2 embeddings for 3 inputs"):
        separate(Answer(body=b'{"data":[%b]}' % items[:-27], model="m", provider="p"), several)
