"""Clients of the WebSocket that stop reading: none keeps its place or its connection, whatever it says before."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from typing_extensions import override

from consumers.state.following import Entry
from service.config.gateway_section import GatewayKey
from service.gateway import bounded_socket, writing
from service.gateway.call_reader import CallReader
from service.gateway.polling import Poller
from service.gateway.requests import Requests
from service.gateway.sockets import MESSAGE_BYTES, Sockets
from tests.support.waiting import until
from topology.codec.bounds import VALUES

pytestmark = pytest.mark.slow  # clients that do not read are waited for

ENTRY = json.dumps("x" * 65_536).encode()
MOST_BYTES = 32 * 2**20
"""What the kernel keeps of what nobody reads, and far more."""
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, BINARY, PING = 0x1, 0x2, 0x9


class Endless(Requests):
    """Every request is known once `may_answer` is set. Its entries begin when `begins` is set, and do not end."""

    told_bytes = 0

    def __init__(self) -> None:
        self.begins = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._asked: set[str] = set()

    async def asked_for(self, id: str) -> None:
        await until(lambda: id in self._asked)

    @override
    async def known(self, id: str, caller: GatewayKey) -> Any:
        self._asked.add(id)
        await self.may_answer.wait()

    @override
    async def entries(self, id: str, caller: GatewayKey, *, after: int) -> AsyncGenerator[Entry, None]:
        await self.begins.wait()
        while True:
            after += 1
            self.told_bytes += len(ENTRY)
            yield Entry(after, "event", ENTRY)


class Served:
    """The path of the WebSocket alone."""

    def __init__(self, port: int, poller: Poller, requests: Endless) -> None:
        self.port = port
        self.poller = poller
        self.requests = requests

    async def is_full(self) -> bool:
        """Whether nothing more is written to the client."""
        before = self.requests.told_bytes
        await asyncio.sleep(0.1)
        return 0 < before == self.requests.told_bytes


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    poller = Poller(None, followers=9)  # type: ignore[arg-type]
    requests = Endless()
    sockets = Sockets(
        requests,
        poller,
        call_reader=CallReader(lanes={}, app="", max_values=VALUES, cancel_abandoned=False),
        limit=None,  # type: ignore[arg-type]
        answers=None,  # type: ignore[arg-type]
        ping_every_s=600,
    )

    async def answer(request: web.Request) -> web.StreamResponse:
        return await sockets.get(request, GatewayKey(tenant=None))

    app = web.Application()
    app.router.add_get("/v1/ws", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Served(runner.addresses[0][1], poller, requests)
    finally:
        await runner.cleanup()


class Client:
    """Reads nothing after the answer to its upgrade."""

    def __init__(self, made: socket.socket) -> None:
        self._made = made
        self._loop = asyncio.get_running_loop()

    async def say(self, kind: int, content: bytes, *, length: int | None = None) -> None:
        """A frame, masked with zeros. `length`: what its head announces."""
        head = bytes([0x80 | kind, 0x80 | 127]) + struct.pack("!Q", len(content) if length is None else length)
        short = bytes([0x80 | kind, 0x80 | len(content)])
        await self._loop.sock_sendall(self._made, (short if kind == PING else head) + bytes(4) + content)

    async def says(self, **message: str) -> None:
        await self.say(TEXT, json.dumps(message).encode())

    async def subscribes(self, id: str = "a") -> None:
        await self.says(type="subscribe", id=id)

    async def is_cut_off(self) -> None:
        """Read to the end of the connection."""
        with suppress(ConnectionError):
            while await self._loop.sock_recv(self._made, 1 << 20):
                pass


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        await loop.sock_connect(made, ("127.0.0.1", port))
        await loop.sock_sendall(made, UPGRADE)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await loop.sock_recv(made, 1)
        assert b" 101 " in head
        yield Client(made)


async def test_a_client_that_follows_and_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "WRITE_WITHIN_S", 0.5)
    async with served() as own, client(own.port) as silent:
        await silent.subscribes()
        own.requests.begins.set()
        await until(lambda: own.poller.followers == 2)
        await until(lambda: own.poller.followers == 0)

        assert 0 < own.requests.told_bytes < MOST_BYTES
        await asyncio.wait_for(silent.is_cut_off(), 60)


@pytest.mark.parametrize(
    ("kind", "length"), [(BINARY, None), (TEXT, MESSAGE_BYTES + 1)], ids=["rubbish", "a message that is too large"]
)
async def test_a_client_that_does_not_read_why_it_is_closed_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, kind: int, length: int | None
) -> None:
    monkeypatch.setattr(bounded_socket, "CLOSE_WITHIN_S", 0.5)
    async with served() as own, client(own.port) as silent:
        await silent.subscribes()
        own.requests.begins.set()
        await until(own.is_full)
        await silent.say(kind, b"x", length=length)
        await until(lambda: own.poller.followers == 0)

        assert own.requests.told_bytes < MOST_BYTES
        await asyncio.wait_for(silent.is_cut_off(), 60)


async def test_a_request_that_is_left_while_nothing_is_read_takes_no_other_with_it() -> None:
    async with served() as own, client(own.port) as silent:
        for id in ("a", "b", "c"):
            await silent.subscribes(id)
        await until(lambda: own.poller.followers == 4)
        own.requests.begins.set()
        await until(own.is_full)
        for id in ("a", "b"):
            await silent.says(type="unsubscribe", id=id)
        await until(lambda: own.poller.followers == 2)
        full = own.requests.told_bytes
        reading = asyncio.create_task(silent.is_cut_off())
        await until(lambda: own.requests.told_bytes > full + MOST_BYTES)
        reading.cancel()


async def test_a_request_that_is_left_before_its_subscription_is_answered_is_not_followed() -> None:
    async with served() as own, client(own.port) as silent:
        own.requests.may_answer.clear()
        await silent.subscribes("a")
        await silent.says(type="unsubscribe", id="a")
        await silent.subscribes("b")
        await own.requests.asked_for("b")
        own.requests.may_answer.set()
        await until(lambda: own.poller.followers == 2)  # the connection, and b
        own.requests.begins.set()
        await until(own.is_full)
        assert own.poller.followers == 2


async def test_a_client_that_asks_for_pongs_and_does_not_read_them_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "WRITE_WITHIN_S", 0.5)
    async with served() as own, client(own.port) as silent:
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while True:
                    await silent.say(PING, bytes(125))
        await until(lambda: own.poller.followers == 0)


async def test_a_client_that_does_not_read_is_cut_off_when_the_process_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_socket, "CLOSE_WITHIN_S", 0.5)
    async with served() as own, client(own.port) as silent:
        await silent.subscribes()
        own.requests.begins.set()
        await until(own.is_full)
        own.poller.close()
        await until(lambda: own.poller.followers == 0)
        await asyncio.wait_for(silent.is_cut_off(), 60)
