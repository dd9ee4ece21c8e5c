"""`GET /v1/ws`: submit, follow and cancel many requests on one connection (docs/gateway.md; asyncapi.yaml has the
messages). An entry has the number and the kind that `GET /v1/requests/{id}/events` gives it too.

When a connection ends, nothing is cancelled: the requests that it submitted go on, and can be followed on another
connection.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import WebSocketReader
from multidict import CIMultiDict

from consumers.background import background_task
from lanekeeper.contract.identity import encodable
from lanekeeper.contract.problems import LanekeeperError
from service.config.settings import GatewayKey
from service.gateway.answers import Drain, StoredAnswers
from service.gateway.calls import IDEMPOTENCY_KEY, SUBMITTED, CallReader, submitted_id_of
from service.gateway.problems import ApiError, problem_of, refused
from service.gateway.requests import LARGEST_NUMBER, LargeStatus, SubmittedRequests, request_urls
from service.gateway.server import HttpConnection
from service.gateway.shares import SharedTaken, Shares
from topology.codec import bounds
from topology.codec.decoding import PACKED_BYTES
from topology.codec.fields import text_of
from topology.codec.headers import PROVIDER_HEADER_BYTES, PROVIDER_HEADERS, PROVIDER_HEADERS_BYTES

AT_ONCE: Final = 16
FOLLOWED_AT_MOST: Final = 100
MESSAGE_BYTES: Final = PACKED_BYTES + PROVIDER_HEADERS_BYTES + 16 * 1024
LONGEST_REF: Final = 128
HEADERS_AT_MOST: Final = PROVIDER_HEADERS + 20
LONGEST_HEADER: Final = PROVIDER_HEADER_BYTES
VALUES_OUTSIDE_BODY: Final = 2 * HEADERS_AT_MOST + 60
"""How many JSON keys and values a message may have beside those of its request body. Valid ones have fewer."""
FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "submit": frozenset({"type", "ref", "body", "id", "headers", "subscribe"}),
    "subscribe": frozenset({"type", "ref", "id", "after"}),
    "unsubscribe": frozenset({"type", "ref", "id"}),
    "cancel": frozenset({"type", "ref", "id"}),
}
LEAST_BYTES_PER_S: Final = 256 * 1024
CLOSE_WITHIN_S: Final = 5.0


@dataclass(slots=True)
class Sockets:
    """Accepts WebSocket connections."""

    requests: SubmittedRequests
    call_reader: CallReader
    shares: Shares
    answers: StoredAnswers
    _: KW_ONLY
    ping_every_s: float

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        ws = BoundedSocket(request, heartbeat_s=self.ping_every_s, message_bytes=MESSAGE_BYTES)
        if not ws.can_prepare(request).ok:
            raise ApiError(426, "this path is a WebSocket's", headers={"upgrade": "websocket"})
        try:
            async with self.requests.poller.following(caller):
                with self.shares.memory.taken(caller.tenant, 0) as memory:
                    ws.count_in(memory)
                    await ws.prepare(request)
                    async with background_task(self._close_with_the_process(ws), name="socket stopping"):
                        await _Socket(ws, caller, self).serve()
        except ApiError as error:  # after the beginning: the key was revoked
            if not ws.prepared:
                raise
            await ws.close(code=WSCloseCode.POLICY_VIOLATION, message=error.message.encode())
        return ws

    async def _close_with_the_process(self, ws: BoundedSocket) -> None:
        await self.requests.poller.closing.wait()
        with suppress(ConnectionError):
            await ws.close(code=WSCloseCode.GOING_AWAY, message=b"this process stops; connect again")


class _Socket:
    def __init__(self, ws: BoundedSocket, caller: GatewayKey, of: Sockets) -> None:
        self._ws = ws
        self._caller = caller
        self._of = of
        self._requests = of.requests
        self._working = asyncio.Semaphore(AT_ONCE)
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._orders: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._group = asyncio.TaskGroup()

    async def serve(self) -> None:
        with suppress(ConnectionError):
            try:
                async with self._group:
                    await self._read_all()
                    raise _Ended
            except* _Ended:
                pass
            except* InvalidMessage as group:
                error = group.exceptions[0]
                assert isinstance(error, InvalidMessage)
                await self._ws.close(code=error.code, message=error.reason.encode()[:120])
            except* ConnectionError:
                pass

    async def _read_all(self) -> None:
        async for frame in self._ws:
            if frame.type is WSMsgType.BINARY:
                raise InvalidMessage(WSCloseCode.UNSUPPORTED_DATA, "binary messages are not understood")
            if frame.type is not WSMsgType.TEXT:
                return  # aiohttp has closed the connection: the message is not UTF-8, or too large
            await self._working.acquire()
            size = self._ws.sizes.popleft()
            reading = partial(read_message, frame.data, max_values=self._of.call_reader.max_values)
            try:
                message = await self._of.shares.parsing.run(len(frame.data), reading)
            except ApiError as error:
                raise InvalidMessage(WSCloseCode.TRY_AGAIN_LATER, error.message) from None
            self._group.create_task(self._work(message, size), name=f"socket {message.type}")

    async def _work(self, message: ClientMessage, size: int) -> None:
        order = asyncio.Lock()
        if message.id is not None:
            order = self._orders.setdefault(message.id, order)
        try:
            async with order:
                await self._carry_out(message)
        finally:
            self._ws.forget(size)
            self._working.release()

    async def _carry_out(self, message: ClientMessage) -> None:
        try:
            match message.type:
                case "submit":
                    await self._submit(message)
                case "subscribe":
                    assert message.id is not None
                    await self._requests.known(message.id, self._caller)
                    await self._send("subscribed", message.id, message.ref)
                    self._follow(message.id, after=message.after)
                case "unsubscribe":
                    if (task := self._followed.pop(message.id or "", None)) is not None:
                        task.cancel()
                    await self._send("unsubscribed", message.id, message.ref)
                case "cancel":
                    assert message.id is not None
                    outcome = await self._requests.cancel(message.id, self._caller)
                    await self._send("cancelling", message.id, message.ref, outcome=outcome)
        except (ApiError, LanekeeperError) as error:
            await self._send("problem", message.id, message.ref, problem=problem_of(error, message.id))

    async def _submit(self, message: ClientMessage) -> None:
        headers = CIMultiDict(message.headers)
        if message.id is not None:
            headers[IDEMPOTENCY_KEY] = message.id
        id, read = submitted_id_of(headers), self._of.call_reader.read
        with self._of.shares.calls.taken(self._caller.tenant):
            reading = partial(read, headers, message.body, self._caller, request_id=id, task=SUBMITTED)
            asked = await self._of.shares.parsing.run(len(message.body), reading)
            await self._requests.submit(asked, self._caller)
        await self._send("submitted", id, message.ref, **request_urls(id))
        if message.subscribe:
            self._follow(id, after=0)

    def _follow(self, id: str, *, after: int) -> None:
        if (before := self._followed.pop(id, None)) is not None:
            before.cancel()
        if len(self._followed) >= FOLLOWED_AT_MOST:
            raise refused(f"this connection follows {FOLLOWED_AT_MOST} requests, and no more fit", status=529)
        task = self._group.create_task(self._entries(id, after), name=f"socket follows {id}")
        self._followed[id] = task
        task.add_done_callback(lambda _: self._followed.pop(id) if self._followed.get(id) is task else None)

    async def _entries(self, id: str, after: int) -> None:
        try:
            async with (
                self._requests.poller.following(self._caller),
                aclosing(self._requests.entries(id, self._caller, after=after)) as entries,
            ):
                begin = b'{"type": "entry", "id": %b, "number": ' % json.dumps(id).encode()
                async for entry in entries:
                    head = begin + b'%d, "kind": "%b", "data": ' % (entry.number, entry.kind.encode())
                    if not isinstance(entry.body, LargeStatus):
                        await self._ws.send_text(b"%b%b}" % (head, entry.body))
                        continue
                    status = entry.body
                    async with self._of.answers.in_memory(status.result, self._caller.tenant) as result:
                        await self._ws.send_large(b"%b%b%b%b}" % (head, status.begin, result, status.end))
        except (ApiError, LanekeeperError) as error:
            await self._send("problem", id, problem=problem_of(error, id))

    async def _send(self, type: str, id: str | None, ref: str | None = None, **fields: object) -> None:
        answer = {"type": type, "id": id, **fields} | ({} if ref is None else {"ref": ref})
        await self._ws.send_text(json.dumps(answer).encode())


class _Ended(Exception):
    """Cancels all tasks of a connection that the client has closed."""


class InvalidMessage(Exception):
    """A client's message is invalid: the connection is closed with this close code and reason."""

    def __init__(self, code: int, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
    """One message of a client, after it was checked. `id`: None only in `submit`: the gateway then creates one."""

    type: Literal["submit", "subscribe", "unsubscribe", "cancel"]
    ref: str | None = None
    id: str | None = None
    after: int = 0
    subscribe: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def read_message(text: str, *, max_values: int = bounds.VALUES) -> ClientMessage:
    """Raises InvalidMessage: 1007 no JSON object, 1008 no valid message, 1009 too many values."""
    if (excess := bounds.excess(text.encode(), max_values=max_values + VALUES_OUTSIDE_BODY)) is not None:
        raise InvalidMessage(WSCloseCode.MESSAGE_TOO_BIG, excess)
    try:
        found = json.loads(text)
        body = text_of(text, "body") if isinstance(found, dict) and "body" in found else ""
    except (ValueError, RecursionError):
        raise InvalidMessage(WSCloseCode.INVALID_TEXT, "not JSON") from None
    if not isinstance(found, dict):
        raise InvalidMessage(WSCloseCode.INVALID_TEXT, "not a JSON object")
    if any(isinstance(text, str) and encodable(text) != text for text in (found.get("id"), found.get("ref"))):
        raise InvalidMessage(WSCloseCode.INVALID_TEXT, "not JSON in UTF-8")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise _wrong(f"type: allowed are {', '.join(FIELDS)}")
    if not found.keys() <= FIELDS[kind]:
        raise _wrong(f"{kind}: allowed are the fields {', '.join(sorted(FIELDS[kind]))}")
    if kind == "submit" and "body" not in found:
        raise _wrong("submit: body: it is needed")
    if kind != "submit" and found.get("id") is None:
        raise _wrong(f"{kind}: id is needed")
    for name, (is_valid, wanted) in _VALUES.items():
        if name in found and not is_valid(found[name]):
            raise _wrong(f"{name}: {wanted}")
    if kind == "submit":
        found["body"] = body.encode()  # as it was written: numbers are not rounded, nor is a key left out
    return ClientMessage(**found)


def _is_text(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= LONGEST_REF)


def _are_headers(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= HEADERS_AT_MOST and all(map(_is_header, value.values()))


def _is_header(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_HEADER and value.isascii() and value.isprintable()


_TEXT: Final = f"a string of at most {LONGEST_REF} characters"
_HEADERS: Final = f"an object of at most {HEADERS_AT_MOST} strings, each of at most {LONGEST_HEADER} ASCII characters"
_VALUES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "ref": (_is_text, _TEXT),
    "id": (_is_text, _TEXT),
    "after": (lambda value: type(value) is int and 0 <= value <= LARGEST_NUMBER, "the number of an entry"),
    "subscribe": (lambda value: isinstance(value, bool), "true or false"),
    "headers": (_are_headers, _HEADERS),
}


def _wrong(reason: str) -> InvalidMessage:
    return InvalidMessage(WSCloseCode.POLICY_VIOLATION, reason)


class BoundedSocket(web.WebSocketResponse):
    """aiohttp's WebSocket with limits, so that a client that does not read cannot keep it open, and one that sends
    cannot fill the memory.

    aiohttp waits without a limit until the client has read what was sent: in `close`, when it answers a ping, and when
    it closes a connection because of an invalid message or a missed heartbeat. It also accepts frames that are not
    masked, and does not tell how much of a message has arrived. Messages are not packed."""

    def __init__(self, request: web.Request, *, heartbeat_s: float, message_bytes: int) -> None:
        super().__init__(heartbeat=heartbeat_s, max_msg_size=message_bytes, writer_limit=sys.maxsize, compress=False)
        self._protocol = request.protocol
        self.memory: SharedTaken
        self.sizes: deque[int] = deque()
        self._drain = Drain(request)
        self._write_lock = asyncio.Lock()
        self._out: AbstractStreamWriter

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        self._out = await super().prepare(request)
        return self._out

    def count_in(self, memory: SharedTaken) -> None:
        """Count the bytes of messages in `memory` as they arrive, until `forget` is called."""
        assert isinstance(self._protocol, HttpConnection)
        self.memory = memory
        self._protocol.before_parser = partial(_Frames, self)

    def forget(self, size: int) -> None:
        self.memory.change(self.memory.amount - size)

    def fail(self, error: WebSocketError) -> None:
        assert self._reader is not None
        self._reader.set_exception(error)

    async def send_text(self, text: bytes) -> None:
        await self._write(text, WSMsgType.TEXT)

    async def send_large(self, text: bytes) -> None:
        """Return when the client has read the text and it is no longer in memory. Raises ConnectionError."""
        await self.send_text(text)
        async with self._drain.limited(more_s=len(text) / LEAST_BYTES_PER_S):
            await self._drain.wait(self._out)

    async def pong(self, message: bytes = b"") -> None:
        await self._write(message, WSMsgType.PONG)

    async def close(self, *, code: int = 1000, message: bytes = b"", drain: bool = True) -> bool:
        asyncio.get_running_loop().call_later(CLOSE_WITHIN_S, self._drain.abort)
        return await super().close(code=code, message=message, drain=drain)

    async def _write(self, content: bytes, kind: WSMsgType) -> None:
        async with self._drain.limited(), self._write_lock:
            if self._protocol.writing_paused:
                await self._drain.wait(self._out)
            await self.send_frame(content, kind)


class _Frames:
    """Reads the heads of frames before aiohttp, so that a message counts before it is whole. A frame that is not masked
    (RFC 6455, 5.1), or for which there is no room, ends the connection."""

    def __init__(self, socket: BoundedSocket, parser: WebSocketReader) -> None:
        self._socket = socket
        self._parser = parser
        self._head = bytearray()
        self._left = 0
        self._is_control = False
        self._is_last = True
        self._size = 0

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        try:
            self._read(data)
        except (WebSocketError, ApiError) as error:
            if isinstance(error, ApiError):
                error = WebSocketError(WSCloseCode.TRY_AGAIN_LATER, error.message)
            self._socket.fail(error)
            return True, b""
        return self._parser.feed_data(data)

    def feed_eof(self) -> None:
        self._parser.feed_eof()

    def _read(self, data: bytes) -> None:
        at, memory = 0, self._socket.memory
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                if not self._is_control:
                    memory.change(memory.amount + step)
                    self._size += step
            else:
                step = min(_head_bytes(self._head) - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                if len(self._head) < _head_bytes(self._head):
                    at += step
                    continue
                self._begin(self._head)
                self._head.clear()
            at += step
            if not self._left and self._is_last and not self._is_control:
                self._socket.sizes.append(self._size)
                self._size = 0

    def _begin(self, head: bytearray) -> None:
        self._is_last, self._is_control = bool(head[0] & 0x80), bool(head[0] & 0x08)
        self._left = head[1] & 0x7F if len(head) == 6 else int.from_bytes(head[2:-4], "big")


def _head_bytes(head: bytearray) -> int:
    if len(head) < 2:
        return 2
    if not head[1] & 0x80:
        raise WebSocketError(WSCloseCode.PROTOCOL_ERROR, "a client's frames have to be masked")
    return 6 + {126: 2, 127: 8}.get(head[1] & 0x7F, 0)
