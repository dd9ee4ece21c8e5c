"""What is refused of a call before anything is published, what its headers mean, and how long it may take to come."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from consumers.flows.pipelines import PipelineSpec, StepSpec
from lanekeeper.contract.problems import RequestProblem
from service.config.settings import GatewayKey
from service.gateway import calls, server
from service.gateway.calls import MESSAGES, CallReader
from service.gateway.problems import ApiError
from tests.support.gate import Alone
from tests.support.waiting import until
from topology.lanes import DEFAULT_LANES

GOOD = {"model": "claude-x", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
SHORT_S = 0.3
PATHS = ["/v1/messages", "/v1/requests", "/v1/messages/count_tokens"]


@pytest.fixture
async def opened() -> AsyncIterator[Alone]:
    async with Alone() as made:
        yield made


def body(**extra: Any) -> bytes:
    return json.dumps({**GOOD, **extra}).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("x_lane_nmae", "normal", 400),
        ("x_lane_name", "urgent", 400),
        ("x_lane_deadline_ms", "soon", 400),
        ("x_lane_stream", "true", 400),
        ("x_lane_type", "embed", 400),
        ("x_lane_pipeline", "ingest", 400),
        ("idempotency_key", "no spaces", 400),
        ("origin", "https://evil.example", 403),
        ("host", "evil.example", 403),
    ],
)
async def test_a_wrong_header_is_refused_by_its_name(opened: Alone, header: str, value: str, status: int) -> None:
    found, error = await opened.post(body(), **{header: value})

    assert found == status
    assert header.replace("_", "-") in error["message"].lower()


def deadline_ms(lane: str, task: str = MESSAGES, **headers: str) -> tuple[int, float]:
    """The deadline of a call in ms, and the time limit of one attempt in seconds."""
    lanes = {each.name: each for each in DEFAULT_LANES}
    reader = CallReader(lanes=lanes, app="a", max_values=1000, cancel_abandoned=True)
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()} | {"x-lane-name": lane})
    request = reader.read(named, body(), GatewayKey(tenant=None), request_id="k", task=task).request
    return request.deadline_ms - request.start_ms, request.call_s


@pytest.mark.parametrize(
    ("headers", "expected_ms"),
    [
        ({}, 600_000),
        ({"x_stainless_timeout": "600"}, 600_000),  # TypeScript; whole seconds
        ({"x_stainless_timeout": "0"}, 1000),
        ({"x_stainless_timeout": "30.5", "x_stainless_read_timeout": "20"}, 30_500),  # Python, timeout of the call
        ({"x_stainless_timeout": "NOT_GIVEN", "x_stainless_read_timeout": "20"}, 20_000),  # of the client
        ({"x_stainless_timeout": "nan", "x_stainless_read_timeout": "inf"}, 600_000),
        ({"x_stainless_timeout": "-1"}, 600_000),
        ({"x_stainless_timeout": "1e308"}, 3_600_000),  # the lane's DEADLINE_MAX_S
        ({"x_stainless_timeout": "30", "x_lane_deadline_ms": "900000"}, 900_000),
    ],
)
def test_the_deadline_of_a_call_is_its_callers_timeout_and_one_attempt_may_take_all_of_it(
    headers: dict[str, str], expected_ms: int
) -> None:
    assert deadline_ms("critical", **headers) == (expected_ms, expected_ms / 1000)


@pytest.mark.parametrize(
    ("chose_id", "cancel_abandoned", "is_cancelled"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_call_is_cancelled_with_its_client_unless_its_id_was_chosen(
    chose_id: bool, cancel_abandoned: bool, is_cancelled: bool
) -> None:
    lanes = {each.name: each for each in DEFAULT_LANES}
    reader = CallReader(lanes=lanes, app="a", max_values=1000, cancel_abandoned=cancel_abandoned)
    headers = CIMultiDict({"idempotency-key": "k"} if chose_id else {})
    options = reader.read(headers, body(), GatewayKey(tenant=None), request_id="k").options
    assert options.get("cancel_abandoned", True) is is_cancelled


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ({}, None),
        ({"lanes": ("normal", "batch"), "models": ("small", "large")}, None),
        ({"lanes": ("normal",)}, "lane batch"),
        ({"lanes": ("batch", "normal"), "models": ("small",)}, "model 'large'"),
        ({"lanes": ("normal",), "models": ("small",), "pipelines": ("other", "p")}, None),
        ({"lanes": ("normal",), "pipelines": ("other",)}, "lane batch"),
    ],
)
def test_a_key_needs_the_lanes_and_models_of_all_steps_or_the_pipelines_name(
    key: dict[str, Any], wrong: str | None
) -> None:
    steps = (
        StepSpec(name="first", handler="h"),
        StepSpec(name="each", prompt="{{ item }}", each="input", model="large", lane="batch"),
    )
    lanes = {each.name: replace(each, model="small") for each in DEFAULT_LANES}
    spec = PipelineSpec("p", steps)
    reader = CallReader(lanes=lanes, app="a", max_values=1000, cancel_abandoned=True, pipelines={"p": spec})
    headers = CIMultiDict({"x-lane-pipeline": "p", "x-lane-name": "normal"})

    def read() -> None:
        reader.read(headers, b"[1]", GatewayKey(tenant="crm", **key), request_id="k", task="requests")

    if wrong is None:
        read()
        return
    with pytest.raises(ApiError, match=f"p uses {wrong}, which this key does not allow") as refused:
        read()
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "more",
    [{"fallbacks": [{"model": "dear"}]}, {"tools": [{"type": "advisor_20260301", "name": "advisor", "model": "dear"}]}],
    ids=["fallback", "advisor"],
)
def test_a_keys_models_are_also_those_that_the_provider_may_ask(more: dict[str, Any]) -> None:
    lanes = {each.name: each for each in DEFAULT_LANES}
    reader = CallReader(lanes=lanes, app="a", max_values=1000, cancel_abandoned=True)

    def read(*models: str) -> None:
        key = GatewayKey(tenant="crm", models=models)
        reader.read(CIMultiDict(), body(**more), key, request_id="k", dialect="anthropic.messages")

    read("claude-x", "dear")
    with pytest.raises(RequestProblem, match="model 'dear' is not allowed for this caller"):
        read("claude-x")


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(opened: Alone) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.server.port)
    writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 99000000\r\n\r\n")

    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_that_announces_no_size_is_read_up_to_the_limit(opened: Alone, packed: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1_000_000

    async with aiohttp.ClientSession() as session:
        compress = "gzip" if packed else None
        async with session.post(f"{opened.url}/v1/messages", data=chunks(), compress=compress) as got:
            assert got.status == 413
            assert (await got.json())["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("encoding", "packed", "status"),
    [
        ("gzip", b"hello", 400),
        ("gzip", gzip.compress(b"{}") + b"more", 400),
        ("gzip", gzip.compress(b"{}")[:-1], 400),
        ("br", b"{}", 415),
        ("gzip, br", b"{}", 415),
    ],
    ids=["no gzip", "bytes after it", "cut short", "another", "two"],
)
async def test_a_body_that_cannot_be_unpacked_is_refused(
    opened: Alone, path: str, encoding: str, packed: bytes, status: int
) -> None:
    said = {"content-encoding": encoding}
    async with aiohttp.ClientSession() as session, session.post(opened.url + path, data=packed, headers=said) as got:
        assert got.status == status
        assert "content-encoding" in await got.text()


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Alone]:
    """A gateway whose times are short."""
    monkeypatch.setattr(calls, "BODY_WITHIN_S", SHORT_S)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", SHORT_S)
    async with Alone(calls=100) as made:
        yield made


async def sent(opened: Alone, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.server.port)
    writer.write(data)
    return reader, writer


@pytest.mark.slow
async def test_a_body_that_trickles_is_refused_and_its_place_is_free_again(hasty: Alone) -> None:
    callers = [await sent(hasty, HEAD + b"Content-Length: 100000\r\n\r\n{") for _ in range(50)]
    for _ in range(5):
        for _, writer in callers:
            writer.write(b" ")
    for reader, writer in callers:
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
    await until(lambda: hasty.routes.calls == 0)
