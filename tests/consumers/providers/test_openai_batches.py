"""OpenAI's Batch API against the simulated one, and with lines and errors as others write them."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI, NotFoundError

from consumers.failures import (
    AccountError,
    AnswerTooLargeError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.prices import Usage
from consumers.providers import openai_batches as module
from consumers.providers.batches import Batches, BatchInfo, ResultLine
from consumers.providers.openai import OpenAIProvider
from lanekeeper.contract.names import OPENAI_CHAT, OPENAI_EMBEDDINGS, OPENAI_RESPONSES
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.faulty_api import FaultyAPI

from .test_openai import Server, server, whole

__all__ = ["server"]
KEY = "sk-openai-secret"
ANSWER = (
    b'{ "object":"chat.completion", "model":"gpt-4o","choices":[{"index":0,"message":{"content":"h\\u00e9"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":4},"x":1e2}'
)
LINE = (
    b'{"id": "batch_req_1", "custom_id": "a-1", "response": {"status_code": 200, "request_id": "req_1", "body": %b}, '
    b'"error": null}'
)


@pytest.fixture
async def provider(api: FaultyAPI) -> AsyncIterator[OpenAIProvider]:
    made = OpenAIProvider.at(name="openai", base_url=f"{api.base_url}/v1", api_key=KEY)
    yield made
    await made.aclose()


@pytest.fixture
def batches(provider: OpenAIProvider) -> Batches:
    assert provider.batches is not None
    return provider.batches


@pytest.fixture
async def sdk(api: FaultyAPI) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key=KEY, base_url=f"{api.base_url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
async def odd(server: Server) -> AsyncIterator[Batches]:
    """The batches of a server that answers as the test says."""
    made = OpenAIProvider.at(name="odd", base_url=f"{server.url}/v1", api_key=KEY, max_answer_bytes=100_000)
    assert made.batches is not None
    yield made.batches
    await made.aclose()


def chat(prompt: str = "hello", **more: Any) -> bytes:
    return json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": prompt}], **more}, indent=1).encode()


async def create(batches: Batches, *bodies: bytes, dialect: str = OPENAI_CHAT, ticket: str = "a") -> BatchInfo:
    requests = [(f"{ticket}-{number}", body) for number, body in enumerate(bodies)]
    return await batches.create(requests, dialect=dialect, ticket=ticket, headers={})


async def all_of(batches: Batches, id: str) -> dict[str, ResultLine]:
    async with aclosing(batches.results(id)) as lines:
        return {line.custom_id: line async for line in lines}


async def test_a_batch_is_what_the_vendors_client_reads_and_each_answer_is_found(
    batches: Batches, sdk: AsyncOpenAI
) -> None:
    created = await create(batches, chat("one"), chat("two [[fault: invalid]]"), chat("three\nlines"))

    theirs = await sdk.batches.retrieve(created.id)
    assert (theirs.endpoint, theirs.completion_window, theirs.metadata) == (
        "/v1/chat/completions",
        "24h",
        {module.TICKET: "a"},
    )
    sent = (await sdk.files.content(theirs.input_file_id)).text.splitlines()
    assert [json.loads(line)["custom_id"] for line in sent] == ["a-0", "a-1", "a-2"]
    info = await batches.retrieve(created.id)
    assert (info.is_ended, info.requests, info.ticket, info.refusal) == (True, 3, "a", None)
    assert info.created_ms == 1000 * theirs.created_at
    lines = await all_of(batches, created.id)
    assert {id: line.kind for id, line in lines.items()} == {"a-0": "succeeded", "a-1": "errored", "a-2": "succeeded"}
    assert theirs.output_file_id is not None
    for line in (await sdk.files.content(theirs.output_file_id)).text.splitlines():
        found = json.loads(line)
        answer = await batches.answer(lines[found["custom_id"]].line, dialect=OPENAI_CHAT)
        assert json.loads(answer.body) == found["response"]["body"]
        assert answer.usage.is_batch
        assert answer.usage.output_tokens > 0
    with pytest.raises(RejectedError) as caught:
        await batches.answer(lines["a-1"].line, dialect=OPENAI_CHAT)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("dialect", "body", "endpoint"),
    [
        (OPENAI_RESPONSES, {"model": "gpt-5.5", "input": "hello"}, "/v1/responses"),
        (OPENAI_EMBEDDINGS, {"model": "text-embedding-3-small", "input": ["a", "b"]}, "/v1/embeddings"),
    ],
)
async def test_each_of_its_dialects_has_batches(
    batches: Batches, sdk: AsyncOpenAI, dialect: str, body: Any, endpoint: str
) -> None:
    created = await create(batches, json.dumps(body).encode(), dialect=dialect)

    assert (await sdk.batches.retrieve(created.id)).endpoint == endpoint
    (line,) = (await all_of(batches, created.id)).values()
    answer = await batches.answer(line.line, dialect=dialect)
    assert answer.usage.input_tokens > 0
    assert answer.model == body["model"]


async def test_what_was_not_run_in_time_or_cancelled_is_told_apart(batches: Batches, api: FaultyAPI) -> None:
    api.configure(SimulatedOptions(batches=BatchOptions(processing_s=1e9)))
    cancelled = await create(batches, chat(), chat())
    assert (await batches.cancel(cancelled.id)).status == "ended"
    api.configure(SimulatedOptions(batches=BatchOptions(processing_s=1e9, expires_s=0)))
    expired = await create(batches, chat(), ticket="b")

    assert {line.kind for line in (await all_of(batches, cancelled.id)).values()} == {"canceled"}
    assert {line.kind for line in (await all_of(batches, expired.id)).values()} == {"expired"}


async def test_batches_are_listed_from_the_newest_with_the_ticket_of_each(
    batches: Batches, sdk: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    ids = [(await create(batches, chat(), ticket=ticket)).id for ticket in ("a", "b", "c")]
    file = await sdk.files.create(file=b"{}", purpose="batch")
    foreign = await sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    found = [(info.id, info.ticket) async for info in batches.list_since(0)]
    assert found == [(foreign.id, ""), (ids[2], "c"), (ids[1], "b"), (ids[0], "a")]
    assert [info async for info in batches.list_since(2**53)] == []


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (BatchOptions(requests=1), "too_many_tasks", RejectedError),
        (BatchOptions(enqueued=1), "token_limit_exceeded", RateLimitedError),
    ],
)
async def test_a_batch_that_failed_its_validation_says_why(
    batches: Batches, api: FaultyAPI, options: BatchOptions, code: str, expected: type[ProviderError]
) -> None:
    api.configure(SimulatedOptions(batches=options))
    created = await create(batches, chat(), chat())

    refusal = (await batches.retrieve(created.id)).refusal
    assert isinstance(refusal, expected)
    assert refusal.type == code
    assert refusal.status == (400 if expected is RejectedError else 429)


async def test_the_uploaded_file_is_deleted_when_the_batch_has_ended_and_the_results_stay(
    batches: Batches, sdk: AsyncOpenAI, api: FaultyAPI
) -> None:
    created = await create(batches, chat())
    api.configure(SimulatedOptions(batches=BatchOptions(requests=1)))
    failed = await batches.retrieve((await create(batches, chat(), chat())).id)
    for batch in (await batches.retrieve(created.id), failed, failed):  # a second time it is gone
        await batches.delete_input(batch)

        with pytest.raises(NotFoundError):
            await sdk.files.content(str(batch.input_file))
    assert len(await all_of(batches, created.id)) == 1


async def test_the_uploaded_file_is_deleted_if_no_batch_is_created_of_it(odd: Batches, server: Server) -> None:
    files, status = {"file-1"}, 404

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "DELETE":
            files.remove(request.path.rpartition("/")[2])
        is_batch = request.path.endswith("/batches")
        return web.json_response({"id": "file-1"}, status=status if is_batch else 200)

    server.answer = answer
    with pytest.raises(RejectedError):
        await create(odd, chat())
    assert not files
    files, status = {"file-1"}, 500
    with pytest.raises(TransientError):
        await create(odd, chat())
    assert files, "there may be a batch"


async def test_an_unpaid_account_is_told_as_in_a_live_call(odd: Batches, server: Server) -> None:
    errors = {"object": "list", "data": [{"code": "billing_hard_limit_reached", "message": f"no {KEY}", "line": None}]}
    server.answer = whole({"id": "batch_1", "object": "batch", "status": "failed", "created_at": 5, "errors": errors})

    refusal = (await odd.retrieve("batch_1")).refusal
    assert isinstance(refusal, AccountError)
    assert KEY not in refusal.detail


async def test_an_answer_has_the_bytes_that_came(odd: Batches) -> None:
    answer = await odd.answer(LINE % ANSWER, dialect=OPENAI_CHAT)

    assert answer.body == ANSWER
    assert answer.usage == Usage(input_tokens=3, output_tokens=4, is_batch=True)
    assert (answer.request_id, answer.stop_reason) == ("req_1", "stop")


@pytest.mark.parametrize(
    "line",
    [
        b'{"error":null,"response":{"body":%b,"status_code":200},"custom_id":"a-1"}',
        b' { "custom_id" : "a-1", "response" : { "status_code" : 200 , "request_id" : null , "body": %b , "y": 1 } } ',
    ],
)
async def test_the_fields_of_a_result_may_have_any_order(odd: Batches, server: Server, line: bytes) -> None:
    (found,) = (await lines_of(odd, server, line % ANSWER)).values()

    assert (found.custom_id, found.kind) == ("a-1", "succeeded")
    assert json.loads((await odd.answer(found.line, dialect=OPENAI_CHAT)).body) == json.loads(ANSWER)


async def lines_of(batches: Batches, server: Server, *lines: bytes) -> dict[str, ResultLine]:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/content"):
            return web.Response(body=b"\n".join(lines))
        batch = {"id": "b", "status": "completed", "created_at": 1, "output_file_id": "file-1", "error_file_id": None}
        return web.json_response(batch)

    server.answer = answer
    return await all_of(batches, "b")


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (400, {"code": "context_length_exceeded", "message": "too long"}, RejectedError),
        (404, {"code": "model_not_found", "message": "The model `x` does not exist"}, RejectedError),
        (404, {"code": None, "message": "no such thing"}, RejectedError),
        (429, {"code": "rate_limit_exceeded", "message": "slow"}, RateLimitedError),
        (429, {"code": "insufficient_quota", "message": "pay"}, AccountError),
        (500, {"code": None, "message": "oh"}, TransientError),
        (503, {"code": "engine_overloaded", "message": "oh"}, OverloadedError),
        (400, {"code": "invalid_value", "message": "half a character: \ud83d"}, RejectedError),
    ],
)
async def test_an_error_in_a_line_is_the_error_that_a_live_call_would_raise(
    odd: Batches, server: Server, status: int, error: Any, expected: type[ProviderError]
) -> None:
    response = {"status_code": status, "request_id": "req_1", "body": {"error": error}}
    line = json.dumps({"id": "1", "custom_id": "a-1", "response": response, "error": None}).encode()

    assert (await lines_of(odd, server, line))["a-1"].kind == "errored"
    with pytest.raises(ProviderError) as caught:
        await odd.answer(line, dialect=OPENAI_CHAT)
    assert isinstance(caught.value, expected)


@pytest.mark.parametrize(
    ("message", "expected"),
    [(b'"hello \\ud83d"', RejectedError), (b'"hello", "param": 1e999', TransientError)],
)
async def test_an_error_that_python_alone_can_write_is_told_all_the_same(
    odd: Batches, server: Server, message: bytes, expected: type[ProviderError]
) -> None:
    error = b'{"code":"invalid","message":%b}' % message
    line = b'{"custom_id":"a-1","response":{"status_code":400,"body":{"error":%b}},"error":null}' % error
    batch = b'{"id":"b","status":"failed","created_at":1,"errors":{"data":[%b]}}' % error

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=batch, content_type="application/json")

    server.answer = answer

    refusal = (await odd.retrieve("b")).refusal
    assert isinstance(refusal, RejectedError)
    assert "hello" in refusal.detail
    with pytest.raises(expected):
        await odd.answer(line, dialect=OPENAI_CHAT)


async def test_a_request_that_timed_out_in_the_batch_may_be_tried_again(odd: Batches, server: Server) -> None:
    error = {"code": "request_timeout", "message": "The underlying call to the model timed out."}
    line = json.dumps({"id": "1", "custom_id": "a-1", "response": None, "error": error}).encode()

    assert (await lines_of(odd, server, line))["a-1"].kind == "errored"
    with pytest.raises(TransientError, match="timed out") as caught:
        await odd.answer(line, dialect=OPENAI_CHAT)
    assert json.loads(caught.value.body) == {"error": error}


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"{",
        b'{"custom_id":"a-1"}',
        b'{"custom_id":"a-1","response":3,"error":null}',
        b'{"custom_id":"a-1","response":{"status_code":200,"body":{}},"error":null}',
        b'{"custom_id":"a-1","response":{"status_code":200,"body":"text"},"error":null}',
        b'{"custom_id":"a-1","response":{"status_code":200,"body":{"choices":[',
        b'{"custom_id":"a-1","response":{"status_code":"200"},"error":[]}',
        b'{"custom_id":"a-1","response":null,"error":{"code":[]}}',
    ],
)
async def test_a_line_that_is_no_result_costs_an_attempt(odd: Batches, server: Server, line: bytes) -> None:
    assert len(await lines_of(odd, server, line + b"\n")) == 1
    with pytest.raises(TransientError):
        await odd.answer(line, dialect=OPENAI_CHAT)


async def test_a_line_that_is_too_large_says_whose_it_is(odd: Batches, server: Server) -> None:
    lines = await lines_of(odd, server, LINE % (b'{"x":"%b"}' % (b"x" * 200_000)))

    with pytest.raises(AnswerTooLargeError):
        await odd.answer(lines["a-1"].line, dialect=OPENAI_CHAT)


async def test_results_that_are_said_to_be_there_but_are_not_are_asked_for_again(odd: Batches, server: Server) -> None:
    counts = {"total": 2, "completed": 2, "failed": 0}
    server.answer = whole({"id": "b", "status": "completed", "created_at": 1, "request_counts": counts})

    with pytest.raises(TransientError):
        await all_of(odd, "b")


@pytest.mark.parametrize("page", ["json", "html"])
async def test_a_server_without_batches_is_not_asked_again_for_an_hour(odd: Batches, server: Server, page: str) -> None:
    async def html(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=404, text="<h1>Not Found</h1>", content_type="text/html")

    server.answer = html if page == "html" else whole({"detail": "Not Found"}, status=404)
    with pytest.raises(RejectedError) as caught:
        await create(odd, chat())

    assert caught.value.status == 404
    assert odd.is_missing


async def test_a_page_of_html_does_not_mean_that_a_batch_is_gone(odd: Batches, server: Server) -> None:
    async def html(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=404, text="<h1>Not Found</h1>", content_type="text/html")

    server.answer = html
    with pytest.raises(AccountError):
        await odd.retrieve("b")
    server.answer = whole({"error": {"message": "No batch found"}}, status=404)
    with pytest.raises(RejectedError):
        await odd.retrieve("b")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (whole({"error": {"message": "slow", "code": "rate_limit_exceeded"}}, status=429), RateLimitedError),
        (whole({"error": {"message": "no", "code": "invalid_api_key"}}, status=401), AccountError),
        (whole({"error": {"message": "oh"}}, status=500), TransientError),
        (whole({"error": {"message": "large"}}, status=413), RejectedError),
        (whole([1]), TransientError),
        (whole({"id": "x", "status": "new", "created_at": 1}), TransientError),
        (whole({"id": "x", "status": "completed", "created_at": "soon"}), TransientError),
    ],
)
async def test_errors_are_those_of_live_calls(
    odd: Batches, server: Server, answer: Any, expected: type[ProviderError]
) -> None:
    server.answer = answer

    with pytest.raises(expected):
        await create(odd, chat())
    assert not odd.is_missing
