"""Strangers and greedy tenants: what they send takes neither the process nor the places of others."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from service.gateway import app, server
from service.gateway.access import hash_of
from tests.support.gate import Alone
from tests.support.waiting import until
from tests.support.web_server import web_server

pytestmark = pytest.mark.slow

KEYS = {hash_of("greedy"): {"tenant": "crm"}, hash_of("other"): {"tenant": "a"}}
"""The tenant `a` is the gateway's own user, so that no worker is asked about it."""
BOMB = gzip.compress(bytes(64 * 2**20))
PATHS = [
    "/v1/messages",
    "/v1/requests",
    "/v1/messages/count_tokens",
    "/openapi.json",
    "/healthz",
    "/readyz",
    "/nowhere",
]
Connections = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def opened(**spec: Any) -> AsyncIterator[Alone]:
    made = Alone(keys=KEYS, **spec)
    made.routes._speaker._is_accepted = True  # what a worker would say
    async with made:
        yield made


@asynccontextmanager
async def sent(port: int, *calls: bytes) -> AsyncIterator[Connections]:
    """Each on its own connection; they stay open."""
    made = [await asyncio.open_connection("127.0.0.1", port) for _ in calls]
    for (_, writer), call in zip(made, calls, strict=True):
        writer.write(call)
    try:
        yield made
    finally:
        for _, writer in made:
            writer.transport.abort()


def post(path: str, body: bytes, *headers: str, method: str = "POST", length: int | None = None) -> bytes:
    size = f"Content-Length: {len(body) if length is None else length}"
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", size, *headers, "", ""]).encode() + body


def chunked(path: str, key: str) -> bytes:
    """The first byte of a body of unknown size."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"1\r\n{\r\n"


async def status(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(60):
        return int((await reader.readline()).split()[1])


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many times anything was unpacked."""
    counted, make = [0], zlib.decompressobj

    class Counting:
        def __init__(self, *args: Any, **named: Any) -> None:
            self._made = make(*args, **named)

        def decompress(self, *args: Any, **named: Any) -> bytes:
            counted[0] += 1
            return self._made.decompress(*args, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._made, name)

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    return lambda: counted[0]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut short"])
@pytest.mark.parametrize("path", PATHS)
async def test_nothing_of_a_strangers_body_is_unpacked(
    path: str, whole: bool, unpacked: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LINGER_S", 0.05)
    method = "GET" if path in PATHS[3:6] else "POST"
    length = None if whole else 10 * len(BOMB)
    call = post(path, BOMB, "Content-Encoding: gzip", "Connection: close", method=method, length=length)
    async with opened() as made, sent(made.server.port, call) as [(reader, _)]:
        assert await status(reader) in (200, 401, 404, 413)
        async with asyncio.timeout(60):
            await reader.read()  # the answer's end, and that of the connection

    assert unpacked() == 0


async def test_a_refused_strangers_body_is_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_S", 0.5)

    async def refused(path: str) -> None:
        method = "GET" if path in PATHS[3:6] else "POST"
        async with opened() as made, sent(made.server.port, post(path, b"{", method=method, length=1 << 30)) as found:
            reader, _ = found[0]
            assert await status(reader) in (200, 401, 404, 413), path
            async with asyncio.timeout(30):
                await reader.read()  # until the connection is closed

    await asyncio.gather(*map(refused, PATHS))  # at once: each waits


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health_takes_no_body(path: str) -> None:
    async with opened() as made, aiohttp.ClientSession() as session:
        async with session.get(made.url + path, data=b"x") as got:
            assert got.status == 413
        async with session.get(made.url + path) as got:
            assert got.status in (200, 503)


async def test_a_body_is_asked_for_only_when_its_caller_is_known() -> None:
    stranger = post("/v1/messages", b"", "Expect: 100-continue", length=5)
    known = post("/v1/messages", b"", "Expect: 100-continue", "x-api-key: other", length=5)
    async with opened() as made, sent(made.server.port, stranger, known) as found:
        assert [await status(reader) for reader, _ in found] == [401, 100]


async def test_calls_of_unknown_size_that_have_sent_a_byte_refuse_no_neighbour() -> None:
    greedy = [chunked("/v1/messages/count_tokens", "greedy") for _ in range(16)]
    async with opened() as made, sent(made.server.port, *greedy):
        await until(lambda: made.routes.calls == 16)
        call = post("/v1/messages/count_tokens", b"{}", "x-api-key: other")
        async with sent(made.server.port, *[call] * 20) as others:
            assert {await status(reader) for reader, _ in others} == {501}  # this gateway has no provider
    await until(lambda: made.routes.calls == 0)


async def test_calls_of_one_tenant_leave_places_for_another() -> None:
    greedy = [post("/v1/messages", b"{", "x-api-key: greedy", length=100) for _ in range(20)]
    async with opened(calls=20) as made, sent(made.server.port, *greedy) as found:
        async with asyncio.timeout(60):
            refused, _ = await asyncio.wait(
                [asyncio.create_task(status(reader)) for reader, _ in found], return_when=asyncio.FIRST_COMPLETED
            )
        assert {task.result() for task in refused} == {529}
        await until(lambda: made.routes.calls == 15)
        async with sent(made.server.port, post("/v1/messages", b"{", "x-api-key: other")) as [(reader, _)]:
            assert await status(reader) == 400  # it was read
    await until(lambda: made.routes.calls == 0)


async def test_bytes_of_one_tenants_bodies_leave_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived counts, not what was announced."""
    monkeypatch.setattr(app, "BODIES_BYTES", 1_000_000)
    call = post("/v1/messages", bytes(200_000), "x-api-key: greedy", length=900_000)
    async with opened() as made, sent(made.server.port, *[call] * 4) as found:
        answers = [asyncio.create_task(status(reader)) for reader, _ in found]
        async with asyncio.timeout(60):
            refused, held = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in refused] == [529]
        small = post("/v1/messages", b" " * 150_000, "x-api-key: other")
        async with sent(made.server.port, small) as [(reader, _)]:
            assert await status(reader) == 400
        for task in held:
            task.cancel()


async def test_sockets_of_one_tenant_leave_places_for_another() -> None:
    async with opened(followers=8) as made, aiohttp.ClientSession() as session:
        url = f"{made.url}/v1/ws"
        greedy = [await session.ws_connect(url, headers={"x-api-key": "greedy"}) for _ in range(6)]
        with pytest.raises(aiohttp.WSServerHandshakeError, match="529"):
            await session.ws_connect(url, headers={"x-api-key": "greedy"})
        async with session.ws_connect(url, headers={"x-api-key": "other"}) as other:
            assert not other.closed
        for each in greedy:
            await each.close()
        await until(lambda: made.routes._poller.followers == 0)


async def test_the_oldest_silent_connections_make_room_for_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "descriptors", lambda: 40)
    call = post("/v1/messages", b"{", "x-api-key: other")
    async with (
        opened() as made,
        sent(made.server.port, post("/v1/messages", b"{", "x-api-key: other", length=100)) as [(busy, _)],
        sent(made.server.port, *[b"GET /healthz"] * 60) as silent,
        sent(made.server.port, call) as [(reader, _)],
    ):
        assert await status(reader) == 400
        for oldest, _ in silent[:40]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(oldest.read(), 60) == b""
        assert not busy.at_eof()


async def test_a_first_call_whose_headers_do_not_come_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_WITHIN_S", 0.2)
    async with opened() as made, sent(made.server.port, b"GET /healthz HTTP/1.1\r\n") as [(reader, _)]:
        async with asyncio.timeout(60):  # KEEP_ALIVE_S is longer
            assert await reader.read() == b""


async def test_no_answer_names_the_server_or_is_guessed_at() -> None:
    calls = [post(path, b"", method="GET") for path in ("/healthz", "/nowhere", "/v1/models", "/openapi.json")]
    async with opened() as made, sent(made.server.port, *calls, b"HELLO\r\n\r\n") as found:
        for reader, _ in found:
            async with asyncio.timeout(60):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b"x-content-type-options: nosniff" in head
            assert b"aiohttp" not in head
            assert b"python" not in head


async def test_what_the_provider_calls_html_is_passed_on_as_json() -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=b'{"data": []}', content_type="text/html")

    async with (
        web_server(answer) as base,
        Alone(provider=base) as made,
        aiohttp.ClientSession() as session,
        session.get(f"{made.url}/v1/models") as got,
    ):
        assert (got.status, got.content_type) == (200, "application/json")
        assert got.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://127.0.0.1:{port}", True),
        ("https://app.example.com", True),
        ("https://evil.example", False),
        ("http://127.0.0.1:1", False),
        ("null", False),
        ("http://[", False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/requests/x", "/v1/ws"])
async def test_a_page_of_another_origin_may_not_call_with_a_key(path: str, origin: str | None, allowed: bool) -> None:
    async with opened(origins=["https://app.example.com"]) as made, aiohttp.ClientSession() as session:
        headers = {"x-api-key": "other"}
        if origin is not None:
            headers["origin"] = origin.format(port=made.server.port)
        async with session.get(made.url + path, headers=headers) as got:
            assert (got.status != 403) is allowed


SITES = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "empty"}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:1", "content-type": "text/plain", **SITES},
        {"origin": "http://localhost:{port}", "content-type": "text/plain", **SITES},
        {"origin": "http://127.0.0.1:1", "content-type": "application/json", **SITES},
        {"origin": "http://127.0.0.1:1", "content-type": "application/x-www-form-urlencoded"},
        {"origin": "null", "content-type": "multipart/form-data; boundary=x"},
        {"origin": "https://evil.example", "content-type": "text/plain", "sec-fetch-site": "cross-site"},
        {"content-type": "text/plain", **SITES},
        {"content-type": "application/json", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:{port}", "content-type": "text/plain", "sec-fetch-site": "same-origin"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/pauses", b'{"kind": "lane", "name": "normal"}'),
        ("POST", "/v1/dead/replay", b'{"code": "poison"}'),
        ("POST", "/v1/requests", b'{"prompt": "a"}'),
        ("POST", "/v1/messages", b'{"prompt": "a"}'),
        ("DELETE", "/v1/dead/x", None),
        ("DELETE", "/v1/requests/x", None),
        ("DELETE", "/v1/pauses/x", None),
    ],
)
async def test_without_keys_no_page_of_another_port_or_site_changes_anything(
    method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> None:
    is_own = headers.get("origin") == "http://127.0.0.1:{port}"
    async with Alone() as made, aiohttp.ClientSession() as session:
        given = {name: value.format(port=made.server.port) for name, value in headers.items()}
        async with session.request(method, made.url + path, data=body, headers=given) as got:
            if is_own and method == "DELETE":  # which no page can send to another origin without permission
                assert got.status not in (403, 415)
            else:
                assert got.status == (415 if is_own else 403)


async def test_without_keys_the_own_page_and_programs_may_call() -> None:
    async with Alone() as made, aiohttp.ClientSession() as session:
        own = {"origin": made.url, "sec-fetch-site": "same-origin", "content-type": "application/json"}
        for headers in (own, {"content-type": "application/x-www-form-urlencoded"}, {}):  # the second is curl's
            async with session.post(f"{made.url}/v1/pauses", data=b"[]", headers=headers) as got:
                assert got.status == 400, "it was read"


UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nx-api-key: other\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
)


@pytest.mark.parametrize("at_once", [True, False], ids=["with the upgrade", "after it"])
async def test_frames_that_are_not_masked_end_the_connection(at_once: bool) -> None:
    frame = b"\x81\x02{}"
    async with opened() as made, sent(made.server.port, UPGRADE + (frame if at_once else b"")) as [(reader, writer)]:
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            if not at_once:
                writer.write(frame)
            said = await reader.read(4)
    assert b" 101 " in head
    assert b"permessage-deflate" not in head
    assert said[:1] + said[2:] == b"\x88" + (1002).to_bytes(2, "big")


async def test_when_a_key_is_revoked_its_calls_are_refused_and_what_it_follows_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "KEYS_EVERY_S", 0.05)
    found: list[dict[str, Any]] = []
    made = Alone(keys=KEYS)
    made.routes._speaker._is_accepted = True
    kept = dict(made.routes._access._keys)
    made.routes._new_keys = lambda: found.pop() if found else None
    async with made, aiohttp.ClientSession() as session:
        url, (greedy, other) = f"{made.url}/v1/ws", ({"x-api-key": "greedy"}, {"x-api-key": "other"})
        async with session.ws_connect(url, headers=greedy) as one, session.ws_connect(url, headers=other) as two:
            found.append({hash_of("other"): kept[hash_of("other")]})
            async with asyncio.timeout(60):
                closed = await one.receive()
            assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, 1008)
            await two.send_json({"type": "unsubscribe", "id": "x"})
            assert (await two.receive_json())["type"] == "unsubscribed"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await session.ws_connect(url, headers=greedy)
        found.append({})
        await until(lambda: made.routes._access._keys == {})
        async with session.get(f"{made.url}/v1/models") as got:
            assert got.status == 401  # without keys nobody gets in by their absence
