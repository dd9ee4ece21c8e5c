"""Calls that are not valid HTTP, or not HTTP that aiohttp's parser reads: each gets an error that a client can read."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from tests.service.gateway.test_calls_refused import Opened

SECRET = "lane-secret"


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    made = Opened()
    async with made.server:
        yield made


async def send(port: int, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, and read the answer: status, headers, body."""
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
        (call("Content-Encoding: br"), 415, "content-encoding: allowed are identity, gzip, deflate"),
        (call("Content-Encoding: zstd", path="/v1/requests"), 415, "content-encoding"),
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
        "brotli", "zstd", "no HTTP", "TLS", "long header", "long line", "NUL in a header", "length", "no host",
        "target", "chunk",
    ],
)  # fmt: skip
async def test_it_is_an_error_of_anthropics_and_neither_logged_nor_quoted(
    opened: Opened, sent: bytes, status: int, says: str, caplog: pytest.LogCaptureFixture
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


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("/v1/messages", "application/json"),
        ("/v1/messages/count_tokens", "application/json"),
        ("/v1/requests", "application/problem+json"),
    ],
)
async def test_an_encoding_that_no_one_here_unpacks_is_refused_by_its_header(
    opened: Opened, path: str, format: str
) -> None:
    async with aiohttp.ClientSession() as session:
        for encoding in ("compress", "gzip, br", "br, gzip", "rot13"):
            said = {"content-encoding": encoding}
            async with session.post(opened.server.url + path, data=b"{}", headers=said) as got:
                assert (got.status, got.content_type) == (415, format)
                assert "header content-encoding: allowed are identity, gzip, deflate" in await got.text()


async def test_a_method_of_proxies_is_answered_with_a_problem_document(opened: Opened) -> None:
    _, headers, body = await send(opened.server.port, b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (headers["content-type"], json.loads(body)["status"]) == ("application/problem+json", 404)
