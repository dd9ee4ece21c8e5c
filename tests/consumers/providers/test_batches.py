"""Batches through Anthropic's client, against the simulated API."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from anthropic import AsyncAnthropic

from consumers.failures import (
    AccountError,
    AnswerTooLargeError,
    OverloadedError,
    Paid,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.job import Route
from consumers.prices import Prices, Usage
from consumers.providers import anthropic_batches as module
from consumers.providers import batches as reading
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.anthropic_batches import MessageBatches
from consumers.providers.batches import Batches, BatchInfo, ResultLine
from consumers.providers.cloud import foundry
from consumers.providers.registry import Registry
from lanekeeper.contract.names import ANTHROPIC_MESSAGES
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.faulty_api import FaultyAPI
from tests.support.waiting import until

from .conftest import KEY, Answering

MODEL = "claude-haiku-5-5"
ROUTE = Route(provider="anthropic", model=MODEL, name=MODEL, account="anthropic/haiku")
MESSAGE = (
    b'{ "type":"message", "model":"claude-x","content":[{"type":"text","text":"h\\u00e9","new":1.50}],\n'
    b'"stop_reason": "end_turn","usage":{"input_tokens":3,"output_tokens":4},"x":1e2}'
).replace(b"\n", b"")


@pytest.fixture
def batches(provider: AnthropicProvider) -> Batches:
    assert provider.batches is not None
    return provider.batches


@pytest.fixture
def registry(provider: AnthropicProvider) -> Registry:
    return Registry(provider, tracing=Tracing(), prices=Prices())


@pytest.fixture
async def sdk(api: FaultyAPI) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(api_key=KEY, base_url=api.base_url, max_retries=0) as client:
        yield client


def body(prompt: str = "hello", **more: Any) -> bytes:
    return json.dumps(fields(prompt, **more)).encode()


def fields(prompt: str = "hello", **more: Any) -> Any:
    return {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": prompt}], **more}


async def create(
    batches: Batches, requests: Sequence[tuple[str, bytes]], *, headers: Mapping[str, str] | None = None
) -> BatchInfo:
    return await batches.create(requests, dialect=ANTHROPIC_MESSAGES, ticket="a", headers=headers or {})


async def all_of(batches: Batches, id: str) -> dict[str, ResultLine]:
    async with aclosing(batches.results(id)) as lines:
        return {line.custom_id: line async for line in lines}


@pytest.mark.slow
async def test_each_endpoint_is_called_as_the_vendors_client_calls_it(
    batches: Batches, sdk: AsyncAnthropic, api: FaultyAPI
) -> None:
    theirs = sdk.messages.batches
    batch = await theirs.create(requests=[{"custom_id": "a-1", "params": fields()}])
    await theirs.retrieve(batch.id)
    async for _ in await theirs.results(batch.id):
        pass
    api.configure(SimulatedOptions(batches=BatchOptions(processing_s=1e9)))
    running = await theirs.create(requests=[{"custom_id": "a-1", "params": fields()}])
    await theirs.cancel(running.id)
    async for _ in theirs.list(limit=reading.PAGE):
        pass
    called = list(api.batches.calls)
    api.configure(SimulatedOptions())
    api.batches.calls.clear()

    ours = await create(batches, [("a-1", body())])
    assert await batches.retrieve(ours.id) == BatchInfo(
        id=ours.id, status="ended", requests=1, created_ms=ours.created_ms
    )
    assert list(await all_of(batches, ours.id)) == ["a-1"]
    api.configure(SimulatedOptions(batches=BatchOptions(processing_s=1e9)))
    other = await create(batches, [("a-1", body())])
    await batches.cancel(other.id)
    assert [info.id async for info in batches.list_since(0)][:2] == [other.id, ours.id]

    theirs_by_endpoint = {call.endpoint: call for call in called}
    ours_by_endpoint = {call.endpoint: call for call in api.batches.calls}
    assert theirs_by_endpoint.keys() == ours_by_endpoint.keys() == {"create", "retrieve", "results", "cancel", "list"}
    ids = {batch.id: "ID", ours.id: "ID", running.id: "ID", other.id: "ID"}
    for endpoint, expected in theirs_by_endpoint.items():
        found = ours_by_endpoint[endpoint]
        assert (found.method, found.status) == (expected.method, expected.status)
        assert _without(found.path, ids) == _without(expected.path, ids)
        assert json.loads(found.body or b"null") == json.loads(expected.body or b"null")
        for name in ("accept", "content-type", "x-api-key", "user-agent"):
            assert found.headers.get(name) == expected.headers.get(name), (endpoint, name)


def _without(text: str, ids: dict[str, str]) -> str:
    for id, name in ids.items():
        text = text.replace(id, name)
    return text


async def test_what_is_created_is_what_the_vendors_types_describe(
    batches: Batches, sdk: AsyncAnthropic, api: FaultyAPI
) -> None:
    info = await create(
        batches, [("a-1", body()), ("a-2", body("[[fault: invalid]]"))], headers={"anthropic-beta": "some-beta-2026"}
    )

    (call,) = api.batches.calls
    assert call.headers["anthropic-beta"] == "some-beta-2026"
    told = await sdk.messages.batches.retrieve(info.id)
    assert info.created_ms == round(told.created_at.timestamp() * 1000)
    counts = told.request_counts
    assert info.requests == counts.succeeded + counts.errored == 2
    lines = await all_of(batches, info.id)
    async for theirs in await sdk.messages.batches.results(info.id):
        ours = lines[theirs.custom_id]
        assert ours.kind == theirs.result.type
        if theirs.result.type == "succeeded":
            answer = await batches.answer(ours.line, dialect=ANTHROPIC_MESSAGES)
            assert json.loads(answer.body) == theirs.result.message.to_dict()
            assert answer.usage.output_tokens == theirs.result.message.usage.output_tokens


async def test_an_answer_has_the_bytes_that_came_and_half_the_price(batches: Batches, registry: Registry) -> None:
    line = b'{"custom_id":"a-1","result":{"type":"succeeded","message":' + MESSAGE + b"}}"

    answer = await registry.from_batch(ROUTE, line, dialect=ANTHROPIC_MESSAGES)

    assert answer.body == MESSAGE
    assert answer.usage == Usage(input_tokens=3, output_tokens=4, is_batch=True)
    live_usd = (3 * 0.10 + 4 * 0.50) / 1e6
    assert answer.cost_usd == answer.saved_usd == pytest.approx(live_usd / 2)
    assert registry.calls["anthropic", "anthropic/haiku", MODEL].usd == pytest.approx(live_usd / 2)


@pytest.mark.parametrize(
    "line",
    [
        b'{"result":{"message":%b,"type":"succeeded"},"custom_id":"a-1"}',
        b' { "custom_id" : "a-1", "result" : { "type" : "succeeded" , "message" : %b , "x": 1 } , "y": {} } ',
    ],
)
async def test_the_fields_of_a_result_may_have_any_order(batches: Batches, line: bytes) -> None:
    line = line % MESSAGE

    assert isinstance(batches, MessageBatches)
    read = await batches._read(line, is_whole=True)

    assert (read.custom_id, read.kind) == ("a-1", "succeeded")
    assert json.loads((await batches.answer(line, dialect=ANTHROPIC_MESSAGES)).body) == json.loads(MESSAGE)


@pytest.mark.parametrize(
    ("type", "expected", "paid"),
    [
        ("invalid_request_error", RejectedError, Paid.REQUEST),
        ("request_too_large", RejectedError, Paid.REQUEST),
        ("not_found_error", RejectedError, Paid.REQUEST),
        ("permission_error", RejectedError, Paid.REQUEST),
        ("api_error", TransientError, Paid.REQUEST),
        ("overloaded_error", OverloadedError, Paid.REQUEST),
        ("rate_limit_error", RateLimitedError, Paid.REQUEST),
        ("authentication_error", AccountError, Paid.REQUEST),
        ("new_error", TransientError, Paid.REQUEST),
    ],
)
async def test_an_errored_result_is_the_error_that_a_live_call_would_raise(
    batches: Batches, type: str, expected: type[ProviderError], paid: Paid
) -> None:
    error = {"type": "error", "error": {"type": type, "message": f"no {KEY}"}, "request_id": "req_1"}
    line = json.dumps({"custom_id": "a-1", "result": {"type": "errored", "error": error}}).encode()

    with pytest.raises(ProviderError) as caught:
        await batches.answer(line, dialect=ANTHROPIC_MESSAGES)

    assert isinstance(caught.value, expected)
    assert caught.value.paid is paid
    assert KEY not in caught.value.detail
    assert caught.value.request_id == "req_1"
    told = {**error, "error": {"type": type, "message": "no ***"}}
    assert json.loads(caught.value.body) == told, "the requester gets it whole, as after a live call"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"{",
        b'{"custom_id":"a-1","result":{"type":"succeeded","message":{"type":"mess',
        b'{"custom_id":"a-1","result":{"type":"succeeded","message":3}}',
        b'{"custom_id":"a-1","result":{"type":"succeeded","message":{}}}',
        b'{"custom_id":"a-1","result":{"type":"succeeded","message":{"type":"message","content":[]}}}',
        b'{"custom_id":"a-1","result":{"type":"errored"}}',
        b'{"custom_id":"a-1","result":{"type":"new"}}',
        b'{"custom_id":"a-1","result":[]}',
        b'{"custom_id":"a-1"}',
        b"[" * 10_000,
    ],
)
async def test_a_line_that_is_no_result_costs_an_attempt(batches: Batches, line: bytes) -> None:
    with pytest.raises(TransientError):
        await batches.answer(line, dialect=ANTHROPIC_MESSAGES)


async def test_a_broken_line_tells_whose_it_is_and_does_not_stop_the_others(batches: Batches, api: FaultyAPI) -> None:
    requests = [("a-1", body()), ("a-2", body("[[fault: broken_json]]" + "x" * 300)), ("a-3", body())]
    batch = await create(batches, [*requests, ("a-4", body("[[fault: no_line]]"))])

    await batches.retrieve(batch.id)
    lines = await all_of(batches, batch.id)

    assert sorted(lines) == ["a-1", "a-2", "a-3"]
    with pytest.raises(TransientError):
        await batches.answer(lines["a-2"].line, dialect=ANTHROPIC_MESSAGES)


async def test_results_in_any_pieces_are_split_into_lines(answering: Answering) -> None:
    results = b"\n".join(
        [
            b'{"custom_id":"a-1","result":{"type":"expired"}}',
            b"",
            b'{"custom_id":"long","result":{"type":"succeeded","message":"' + b"x" * 1_000_000 + b'"}}\r',
            b'"custom_id":"a-9"',
            b'{"custom_id":"a-3","result":{"type":"canceled"}}',
        ]
    )

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for at in (0, 1, 40, 48, 49, 50, 60, 500_000, len(results) - 60, len(results) - 1):
            await response.write(results[at : next((to for to in CUTS if to > at), len(results))])
        return response

    CUTS = (1, 40, 48, 49, 50, 60, 500_000, len(results) - 60, len(results) - 1, len(results))
    async with answering(answer) as provider:
        assert provider.batches is not None
        lines = await all_of(provider.batches, "b")

        assert {id: line.kind for id, line in lines.items()} == {
            "a-1": "expired", "long": "errored", "": "broken", "a-3": "canceled"
        }  # fmt: skip
        with pytest.raises(AnswerTooLargeError):
            await provider.batches.answer(lines["long"].line, dialect=ANTHROPIC_MESSAGES)
        assert len(lines["long"].line) < 1000


@pytest.mark.parametrize("fault", ["truncated", "cut", "reset at=middle", "stall delay=1h", "broken_json"])
async def test_results_that_break_off_are_a_failure_after_the_lines_that_came(
    batches: Batches, api: FaultyAPI, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(reading, "PIECE_WITHIN_S", 0.3)
    api.configure(SimulatedOptions(batches=BatchOptions(is_shuffled=False)))
    batch = await create(batches, [(f"a-{nth}", body("x" * 99)) for nth in range(3)])
    await batches.retrieve(batch.id)
    api.batches.fail("results", fault)

    async with aclosing(batches.results(batch.id)) as lines:
        assert (await anext(lines)).custom_id == "a-0"
        with pytest.raises(TransientError):
            await anext(lines)


async def test_a_batch_may_exist_although_its_answer_was_lost(batches: Batches, api: FaultyAPI) -> None:
    since_ms = round(time.time() * 1000) - 1000
    await create(batches, [("b-1", body())])
    api.batches.fail("create", "reset")

    with pytest.raises(TransientError) as caught:
        await create(batches, [("a-1", body()), ("a-2", body())])

    assert caught.value.paid is Paid.UNKNOWN
    found = [info async for info in batches.list_since(since_ms)]
    assert [info.requests for info in found] == [2, 1]
    assert sorted(await all_of(batches, found[0].id)) == ["a-1", "a-2"]
    assert [info async for info in batches.list_since(since_ms + 3_600_000)] == []


async def test_a_list_of_several_pages_is_read_to_the_given_time(
    batches: Batches, api: FaultyAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    ids = [(await create(batches, [("a-1", body())])).id for _ in range(5)]

    assert [info.id async for info in batches.list_since(0)] == ids[::-1]


async def test_a_batch_that_is_gone_is_told_apart_from_a_provider_without_batches(
    batches: Batches, registry: Registry, api: FaultyAPI
) -> None:
    with pytest.raises(RejectedError) as caught:
        await batches.retrieve("msgbatch_of/another?")
    assert caught.value.status == 404
    assert registry.batches("anthropic") is batches

    api.batches.fail("create", "not_found")
    with pytest.raises(RejectedError) as caught:
        await create(batches, [("a-1", body())])

    assert caught.value.status == 404
    assert batches.is_missing
    assert registry.batches("anthropic") is batches, "others were created before"


async def test_only_providers_with_batches_have_some(registry: Registry) -> None:
    other = foundry(name="azure", api_key=KEY, base_url="http://127.0.0.1:1")
    both = Registry(other, tracing=Tracing())

    assert both.batches("azure") is both.batches("unknown") is None
    with pytest.raises(TransientError, match="gone"):
        await both.from_batch(ROUTE, b"", dialect=ANTHROPIC_MESSAGES)
    await other.aclose()


@pytest.mark.parametrize(
    "page",
    [
        b"[]",
        b"{}",
        b'{"id":"a","processing_status":"new","created_at":"2026-11-26T10:00:00Z","request_counts":{}}',
        b'{"id":"a","processing_status":"ended","created_at":"soon","request_counts":{}}',
        b'{"id":"' + b"x" * 2_000_000 + b'"}',
    ],
)
async def test_an_answer_that_describes_no_batch_is_a_failure(answering: Answering, page: bytes) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=page, content_type="application/json")

    async with answering(answer) as provider:
        assert provider.batches is not None
        with pytest.raises((TransientError, AnswerTooLargeError)):
            await provider.batches.retrieve("a")


async def test_a_cancelled_call_closes_its_connection(batches: Batches, api: FaultyAPI) -> None:
    api.batches.fail("create", "hang")

    creating = asyncio.create_task(create(batches, [("a-1", body())]))
    await until(lambda: not api.batches._wanted["create"])  # it has come, and hangs
    creating.cancel()

    await api.until(lambda: len(api.batches.calls) == 1)
