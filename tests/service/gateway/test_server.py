"""Health, errors, and calls that are not valid HTTP, or not HTTP that aiohttp's parser reads."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from service.gateway.problems import ApiError
from service.gateway.server import CannotListen, Handler, Server
from tests.support.gate import Alone


class Readiness:
    def __init__(self) -> None:
        self.troubles: dict[str, str | None] = {"consume connection": None}

    def __call__(self) -> dict[str, str | None]:
        return self.troubles


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def health(readiness: Readiness) -> AsyncIterator[Server]:
    async with Server(readiness, host="127.0.0.1", port=0) as health:
        yield health


async def ask(health: Server, path: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.request(method, health.url + path) as response:
        return response.status, await response.json(content_type=None)


async def test_readiness_is_asked_for_each_time_and_health_does_not_depend_on_it(
    health: Server, readiness: Readiness
) -> None:
    assert await ask(health, "/readyz") == (200, {"ready": True, "reasons": {}})
    readiness.troubles["queue lane.batch"] = "no such queue"

    assert await ask(health, "/readyz") == (503, {"ready": False, "reasons": {"queue lane.batch": "no such queue"}})
    assert await ask(health, "/healthz") == (200, {"alive": True})


async def test_a_process_without_a_gateway_names_who_serves_messages(health: Server) -> None:
    status, said = await ask(health, "/v1/messages", "POST")

    assert (status, said["type"]) == (404, "error")
    assert "`lanekeeper gateway`" in str(said["error"])


async def test_an_address_in_use_is_reported_with_the_setting_to_change(readiness: Readiness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{port}: something else .* LANEKEEPER_GATEWAY__PORT"):
            async with Server(readiness, host="127.0.0.1", port=port):
                pass


class Broken:
    """A route with a fault in it."""

    connections = 100

    def handlers(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/v1/messages"): self._fail,
            ("GET", "/v1/later"): self._fail,
            ("GET", "/v1/begun"): self._begun,
            ("GET", "/v1/revoked"): self._revoked,
        }

    async def run(self) -> None: ...

    async def drained(self) -> None: ...

    async def aclose(self) -> None: ...

    async def _fail(self, request: web.Request) -> web.StreamResponse:
        await request.text()
        raise KeyError("a fault")

    async def _begun(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half of ")
        raise KeyError("a fault")

    async def _revoked(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half of ")
        raise ApiError(401, "this API key was revoked, or has expired")


@pytest.fixture
async def broken(readiness: Readiness) -> AsyncIterator[Server]:
    async with Server(readiness, host="127.0.0.1", port=0, paths=Broken()) as server:
        yield server


async def test_a_fault_of_ours_is_an_error_of_anthropics_on_its_paths_and_logged_once(broken: Server) -> None:
    with capture_logs() as logs:
        async with aiohttp.ClientSession() as session, session.post(f"{broken.url}/v1/messages", data="secret") as got:
            said = await got.json()

    assert (got.status, said["type"], said["error"]["type"]) == (500, "error", "api_error")
    assert got.headers["request-id"] == said["request_id"]
    assert [(each["event"], each["where"], each["request"]) for each in logs] == [
        ("handler.failed", "gateway /v1/messages", said["request_id"])
    ]
    assert "secret" not in str(logs)


async def test_an_answer_that_has_begun_breaks_off_by_a_fault_and_does_not_look_whole(broken: Server) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"{broken.url}/v1/begun") as got:
                await got.read()


async def test_an_error_after_the_beginning_of_an_answer_is_no_second_answer_within_it(broken: Server) -> None:
    """Such as that of the live page's key, which was revoked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", broken.port)
    writer.write(b"GET /v1/revoked HTTP/1.1\r\nHost: localhost\r\n\r\n")
    came = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(2):
            while piece := await reader.read(1000):
                came += piece
    assert b"half of " in came
    assert came.count(b"HTTP/1.1 ") == 1
    writer.transport.abort()


async def test_another_method_is_answered_with_those_that_are_allowed(broken: Server) -> None:
    async with aiohttp.ClientSession() as session, session.delete(f"{broken.url}/v1/messages") as got:
        assert (got.status, got.headers["allow"]) == (405, "POST")
        assert (await got.json())["error"]["type"] == "invalid_request_error"
    async with aiohttp.ClientSession() as session, session.put(f"{broken.url}/healthz") as got:
        assert (got.status, got.headers["allow"]) == (405, "GET, HEAD")
        assert (await got.json())["status"] == 405


SECRET = "lane-secret"


@pytest.fixture
async def opened() -> AsyncIterator[Alone]:
    async with Alone() as made:
        yield made


async def send(port: int, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(20):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()
    return int(first.split()[1]), headers, body


def call(*headers: str, path: str = "/v1/messages", length: str | None = "2") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", "{}"]).encode()


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b"HELLO\r\n\r\n", 400, "Invalid method"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "HTTPS"),
        (call(f"x-api-key: {SECRET}{'a' * 9000}"), 400, "too long"),
        (call(path="/v1/messages?" + "a" * 9000), 400, "too long"),
        (call(f"x-api-key: {SECRET}\x00"), 400, "header value"),
        (call(length="x"), 400, "Content-Length"),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "not a URL"),
        (call("Transfer-Encoding: chunked", length=None) + b"zz\r\n", 400, "chunk"),
    ],
    ids=[
        "no HTTP", "TLS", "long header", "long line", "NUL in a header", "length", "no host",
        "target", "chunk",
    ],
)  # fmt: skip
async def test_it_is_an_error_of_anthropics_and_neither_logged_nor_quoted(
    opened: Alone, sent: bytes, status: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as logs:
        found, headers, body = await send(opened.server.port, sent)

    answer: dict[str, Any] = json.loads(body)
    assert (found, headers["content-type"], headers["cache-control"]) == (status, "application/json", "no-store")
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert answer["request_id"] == headers["request-id"]
    assert says in answer["error"]["message"]
    assert SECRET not in body.decode()
    assert not logs
    assert not [each for each in caplog.records if each.name.startswith("aiohttp")]
