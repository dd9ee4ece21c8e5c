"""What a client says on a WebSocket is read strictly, and one that stops reading keeps neither place nor connection."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from typing_extensions import override

from consumers.state.base import Entry
from service.config.settings import GatewayKey
from service.gateway import answers, sockets
from service.gateway.access import Access
from service.gateway.app import document
from service.gateway.calls import CallReader
from service.gateway.requests import LARGEST_NUMBER, Poller, SubmittedRequests
from service.gateway.server import Handler, Server
from service.gateway.shares import BodyParsing, SharedLimit, Shares
from service.gateway.sockets import FIELDS, MESSAGE_BYTES, InvalidMessage, Sockets, read_message
from tests.support.gate import SETTINGS
from tests.support.waiting import until
from topology.codec.bounds import VALUES
from topology.codec.headers import PROVIDER_HEADER_BYTES, PROVIDER_HEADERS

pytestmark = pytest.mark.slow

ENTRY = json.dumps("x" * 65_536).encode()
MOST_BYTES = 32 * 2**20
"""What the kernel keeps of what nobody reads, and far more."""
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, BINARY, PING = 0x1, 0x2, 0x9
CALLER = GatewayKey(tenant="crm")


class Endless(SubmittedRequests):
    """Every request is known once `may_answer` is set. Its entries begin when `begins` is set, and do not end."""

    told_bytes = 0

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
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

    def __init__(self, port: int, poller: Poller, requests: Endless, memory: SharedLimit, parsing: BodyParsing) -> None:
        self.port = port
        self.poller = poller
        self.requests = requests
        self.memory = memory
        self.parsing = parsing

    async def is_full(self) -> bool:
        """Whether nothing more is written to the client."""
        before = self.requests.told_bytes
        await asyncio.sleep(0.1)
        return 0 < before == self.requests.told_bytes


class SocketPath:
    """The path of the WebSocket, for callers who are known."""

    connections = 100

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets

    def handlers(self) -> dict[tuple[str, str], Handler]:
        return {("GET", "/v1/ws"): self._get}

    async def run(self) -> None: ...

    async def drained(self) -> None: ...

    async def aclose(self) -> None: ...

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return await self._sockets.get(request, CALLER)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    poller = Poller(None, Access({}, local=CALLER), followers=12)  # type: ignore[arg-type]
    requests = Endless(poller)
    shares = Shares(SharedLimit(9, "calls"), SharedLimit(4 * MESSAGE_BYTES, "bytes"))
    reader = CallReader(lanes={}, app="", max_values=VALUES, cancel_abandoned=False)
    sockets = Sockets(requests, reader, shares, answers=None, ping_every_s=600)  # type: ignore[arg-type]
    async with Server(dict, host="127.0.0.1", port=0, paths=SocketPath(sockets)) as server:
        yield Served(server.port, poller, requests, shares.memory, shares.parsing)


class Client:
    """Reads nothing after the answer to its upgrade."""

    def __init__(self, made: socket.socket) -> None:
        self._made = made
        self._loop = asyncio.get_running_loop()

    async def say(self, kind: int, content: bytes, *, length: int | None = None) -> None:
        """A frame, masked with zeros. `length`: what its head announces."""
        head = bytes([0x80 | kind, 0x80 | 127]) + struct.pack("!Q", len(content) if length is None else length)
        short = bytes([0x80 | kind, 0x80 | len(content) & 0x7F])
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


def test_a_body_comes_as_its_client_has_written_it() -> None:
    """Its numbers are not rounded, and a key that is there twice is refused, as over HTTP."""
    body = '{"a": 0.12345678901234567891, "a" :1e400,\n"b":[1.50, "\\u00e9🦊"]}'
    for text in (f'{{"type":"submit","body":{body}}}', f' {{ "body" : {body} , "ref":"r", "type":"submit"}}\n'):
        assert read_message(text).body == body.encode()


def test_a_message_may_have_all_headers_for_the_provider_that_a_request_may_have() -> None:
    headers = {f"anthropic-{number}": "v" for number in range(PROVIDER_HEADERS - 1)}
    headers |= {"anthropic-beta": "b" * PROVIDER_HEADER_BYTES, "x-lane-name": "batch"}

    read = read_message(json.dumps({"type": "submit", "body": {}, "headers": headers}), max_values=0)

    assert read.headers == headers


async def test_a_client_that_follows_and_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WRITE_WITHIN_S", 0.5)
    async with served() as own, client(own.port) as silent:
        await silent.subscribes()
        own.requests.begins.set()
        await until(lambda: own.poller.followers == 2)
        await until(lambda: own.poller.followers == 0)

        assert 0 < own.requests.told_bytes < MOST_BYTES
        await asyncio.wait_for(silent.is_cut_off(), 60)


@pytest.mark.parametrize(
    ("kind", "length"),
    [(BINARY, None), (TEXT, MESSAGE_BYTES + 1), (None, None)],
    ids=["rubbish", "a message that is too large", "the process stops"],
)
async def test_a_client_that_does_not_read_why_it_is_closed_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, kind: int | None, length: int | None
) -> None:
    monkeypatch.setattr(sockets, "CLOSE_WITHIN_S", 0.5)
    async with served() as own, client(own.port) as silent:
        await silent.subscribes()
        own.requests.begins.set()
        await until(own.is_full)
        if kind is None:
            own.poller.close()
        else:
            await silent.say(kind, b"x", length=length)
        await until(lambda: own.poller.followers == 0)

        assert own.requests.told_bytes < MOST_BYTES
        await asyncio.wait_for(silent.is_cut_off(), 60)


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


async def test_messages_that_have_not_come_completely_count_and_leave_room_for_another_tenant() -> None:
    """Of four messages, one tenant may hold three."""
    async with served() as own, AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(client(own.port)) for _ in range(4)]
        for each in senders[:3]:
            await each.say(TEXT, bytes(MESSAGE_BYTES - 20), length=MESSAGE_BYTES - 10)
        await until(lambda: own.memory.used == 3 * (MESSAGE_BYTES - 20))
        await senders[3].say(TEXT, bytes(1000), length=MESSAGE_BYTES - 10)
        await senders[3].is_cut_off()

        assert own.memory.fits("shop", 100_000)
    await until(lambda: own.memory.used == 0)


BODY = {"prompt": "x"}
MESSAGES = document("asyncapi", SETTINGS)["components"]["messages"]
SAID = [MESSAGES[f"socket{type.capitalize()}"]["payload"] for type in FIELDS]
AnyField = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([LARGEST_NUMBER, LARGEST_NUMBER + 1])
    | st.sampled_from(["", "a", "a" * 128, "a" * 129, BODY])
    | st.dictionaries(st.text("ab", max_size=3), st.sampled_from(["x", "\n", "é", "~", "x" * 1001, 1]), max_size=2)
)


@given(
    st.sampled_from(sorted(FIELDS)),
    st.dictionaries(st.sampled_from(["ref", "id", "after", "subscribe", "headers", "more"]), AnyField, max_size=4),
    st.sampled_from([{}, {"body": BODY}, {"body": "x"}]),
)
def test_the_document_allows_what_is_read(type: str, fields: dict[str, Any], body: dict[str, Any]) -> None:
    fields = {"type": type, **fields, **body}
    try:
        read_message(json.dumps(fields))
    except InvalidMessage:
        assert not any(Draft202012Validator(each).is_valid(fields) for each in SAID)
    else:
        assert [Draft202012Validator(each).is_valid(fields) for each in SAID].count(True) == 1


@pytest.mark.parametrize("name", ["id", "ref"])
def test_half_of_a_surrogate_pair_closes_with_1007(name: str) -> None:
    with pytest.raises(InvalidMessage) as error:
        read_message(json.dumps({"type": "submit", "body": BODY, name: "\ud800"}))
    assert error.value.code == 1007


@pytest.mark.parametrize("held", ["[]," * 200_000, "7" * 500_000])
def test_what_takes_long_to_parse_closes_with_1009_before_it_is_parsed(held: str) -> None:
    with pytest.raises(InvalidMessage, match="more than") as error:
        read_message(f'{{"type": "submit", "body": {{"x": [{held}')
    assert error.value.code == 1009
