"""Calls that are refused before anything is published."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway import call_limit
from service.gateway.app import Gateway, client_for
from service.gateway.call_reader import CallReader
from service.gateway.problems import ApiError
from service.gateway.server import Server
from tests.support.gate import opened as opened_store
from tests.support.waiting import until

GOOD = {"model": "claude-x", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


class Opened:
    """A server whose client is not connected."""

    def __init__(self, **spec: Any) -> None:
        settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"), gateway=GatewaySettings(port=0, **spec))
        self.routes = Gateway(settings, client_for(settings), opened_store(settings))
        self.server = Server(self.routes.reasons, host=settings.gateway.host, port=0, routes=self.routes)

    async def post(self, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        port = self.server.port
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/v1/messages", data=body, headers=named) as got,
        ):
            found = await got.json()
            assert found["type"] == "error"
            assert got.headers["request-id"] == found["request_id"]
            return got.status, found["error"]


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    made = Opened()
    async with made.server:
        yield made


def body(**extra: Any) -> bytes:
    return json.dumps({**GOOD, **extra}).encode()


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (b"", "body: empty"),
        (b"{", "body: not JSON"),
        (b"[]", "body"),
        (b"\xff", "body: not JSON"),
        (body(messages=[]), "messages"),
        (body(messages=[{"role": "user"}]), "messages"),
        (body(max_tokens="many"), "max_tokens"),
        (body(stream="yes"), "stream"),
        (body(stream=1), "stream"),
        (b'{"stream": true, "stream": false, "messages": [{"role": "user", "content": "x"}]}', "stream"),
    ],
)
async def test_a_wrong_body_is_refused_by_the_name_of_the_field(opened: Opened, said: bytes, names: str) -> None:
    status, error = await opened.post(said)

    assert (status, error["type"]) == (400, "invalid_request_error")
    assert names in error["message"]


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("x_lane_nmae", "normal", 400),
        ("x_lane_name", "urgent", 400),
        ("x_lane_deadline_ms", "soon", 400),
        ("x_lane_deadline_ms", "999999999", 400),
        ("x_lane_stream", "true", 400),
        ("x_lane_tenant", "crm", 400),
        ("x_lane_webhook", "https://example.com", 400),
        ("idempotency_key", "no spaces", 400),
        ("origin", "https://evil.example", 403),
        ("host", "evil.example", 403),
        ("host", "[", 403),
    ],
)
async def test_a_wrong_header_is_refused_by_its_name(opened: Opened, header: str, value: str, status: int) -> None:
    found, error = await opened.post(body(), **{header: value})

    assert found == status
    assert header.replace("_", "-") in error["message"].lower()


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(opened: Opened) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.server.port)
    writer.write(
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 99000000\r\n\r\n"
    )

    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_that_announces_no_size_is_read_up_to_the_limit(opened: Opened, packed: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1_000_000

    url = f"http://127.0.0.1:{opened.server.port}/v1/messages"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=chunks(), compress="gzip" if packed else None) as got,
    ):
        assert got.status == 413
        assert (await got.json())["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/requests", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("packed", [b"hello", gzip.compress(b"{}") + b"more"], ids=["no gzip", "bytes after it"])
async def test_a_body_that_cannot_be_unpacked_is_refused(opened: Opened, path: str, packed: bytes) -> None:
    url, said = opened.server.url + path, {"content-encoding": "gzip"}
    async with aiohttp.ClientSession() as session, session.post(url, data=packed, headers=said) as got:
        assert got.status == 400
        assert "content-encoding" in await got.text()


async def test_others_are_answered_while_a_large_body_is_parsed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def read(*_: object, **__: object) -> None:
        begun.set()
        assert may_end.wait(30)
        raise ApiError(400, "parsed")

    monkeypatch.setattr(CallReader, "read", read)
    posting = asyncio.create_task(opened.post(bytes(2 * 1024 * 1024)))
    await until(begun.is_set)
    async with aiohttp.ClientSession() as session, session.get(opened.server.url + "/healthz") as got:
        assert got.status == 200
    may_end.set()
    assert (await posting)[1]["message"] == "parsed"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/requests", "/v1/messages/count_tokens"])
async def test_a_packed_body_counts_as_large_as_it_can_become(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limit, "BODIES_BYTES", 2_500_000)
    made = Opened()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 1000\r\n\r\n"
    async with made.server:
        connections = [await asyncio.open_connection("127.0.0.1", made.server.port) for _ in range(3)]
        for number, (_, writer) in enumerate(connections[:2]):
            writer.write(head.encode())
            await until(lambda number=number: made.routes.calls == number + 1)
        reader, writer = connections[2]
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 529")
        for _, writer in connections:
            writer.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", "/v1/messages"),
        ("get", "/v1/models"),
        ("get", "/v1/models/m"),
        ("put", "/v1/models"),
        ("get", "/v1/no"),
    ],
)
async def test_no_proxy_may_keep_what_one_caller_was_answered(opened: Opened, method: str, path: str) -> None:
    url = f"http://127.0.0.1:{opened.server.port}{path}"
    async with aiohttp.ClientSession() as session, session.request(method, url) as got:
        assert got.status >= 400
        assert got.headers["cache-control"] == "no-store"


@pytest.mark.slow
async def test_a_good_body_is_asked_for_and_then_meets_the_broker_that_is_away(opened: Opened) -> None:
    status, error = await opened.post(body(), x_lane_deadline_ms="1")

    assert status == 503
    assert "no connection" in error["message"]


async def test_without_keys_another_address_than_loopback_answers_health_alone() -> None:
    made = Opened(host="0.0.0.0")
    async with made.server:
        status, error = await made.post(body())
        assert (status, error["type"]) == (403, "permission_error")
        assert "LANEKEEPER_GATEWAY__KEYS" in error["message"]
        async with aiohttp.ClientSession() as session, session.get(made.server.url + "/healthz") as got:
            assert got.status == 200


async def test_what_is_more_than_its_calls_is_refused_to_be_tried_again() -> None:
    made = Opened(calls=1)
    async with made.server:
        _, writer = await asyncio.open_connection("127.0.0.1", made.server.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        await until(lambda: made.routes.calls == 1)

        assert (await made.post(body()))[0] == 529
        writer.close()
        await until(lambda: made.routes.calls == 0)
        assert (await made.post(b"{"))[0] == 400


async def test_when_it_stops_it_refuses_new_calls_and_is_not_ready(opened: Opened) -> None:
    await opened.server.drained(within_s=5)

    assert (await opened.post(body()))[0] == 503
    async with aiohttp.ClientSession() as session, session.get(opened.server.url + "/readyz") as got:
        assert (await got.json())["reasons"]["gateway"] == "it stops"
