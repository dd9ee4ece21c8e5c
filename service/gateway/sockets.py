"""`GET /v1/ws`: submit, follow and cancel many requests on one connection. `socket_messages.py` reads the client's
messages.

The gateway sends answers to the client's messages, and the entries of followed requests: their stored steps and events,
with the numbers and kinds that `GET /v1/requests/{id}/events` sends too:

    {"type": "submitted", "id": "…", "status_url": "…", "events_url": "…", "ref": "…"}
    {"type": "subscribed" | "unsubscribed", "id": "…", "ref": "…"}
    {"type": "cancelling", "id": "…", "outcome": "…", "ref": "…"}
    {"type": "entry", "id": "…", "number": 3, "kind": "event", "data": {…}}
    {"type": "problem", "id": "…", "problem": {…}, "ref": "…"}

When a connection ends, nothing is cancelled: the requests that it submitted go on, and can be followed on another
connection.
"""

import asyncio
import json
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final
from weakref import WeakValueDictionary

from aiohttp import WSCloseCode, WSMsgType, web
from multidict import CIMultiDict

from lanekeeper.contract.problems import LanekeeperError
from service.config.gateway_section import GatewayKey
from service.gateway.answers import Answers
from service.gateway.bounded_socket import BoundedSocket
from service.gateway.call_limit import CallLimit
from service.gateway.call_reader import IDEMPOTENCY_KEY, CallReader, submitted_id_of
from service.gateway.documents import LargeStatus, path_of, problem_of
from service.gateway.polling import Poller
from service.gateway.problems import ApiError, refused
from service.gateway.requests import Requests
from service.gateway.socket_messages import ClientMessage, InvalidMessage, read
from service.side_tasks import beside
from topology.codec.decoding import PACKED_BYTES

AT_ONCE: Final = 16
"""The most messages of one WebSocket connection that are processed at the same time. A further message is read as soon
as one of these has been processed."""
FOLLOWED_AT_MOST: Final = 100
"""The most requests that one WebSocket connection follows at the same time."""
MESSAGE_BYTES: Final = PACKED_BYTES + 16 * 1024
"""The maximum size, in bytes, of a message that a client sends over a WebSocket."""


@dataclass(slots=True)
class Sockets:
    """Answers `GET /v1/ws`: accepts WebSocket connections, over which clients submit, follow and cancel requests."""

    requests: Requests
    poller: Poller
    _: KW_ONLY
    call_reader: CallReader
    limit: CallLimit
    answers: Answers
    ping_every_s: float

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Serve one WebSocket connection until it ends. Raises ApiError if the connection is not accepted."""
        ws = BoundedSocket(request, heartbeat_s=self.ping_every_s, message_bytes=MESSAGE_BYTES)
        if not ws.can_prepare(request).ok:
            raise ApiError(426, "this path is a WebSocket's", headers={"upgrade": "websocket"})
        async with self.poller.following():
            await ws.prepare(request)
            async with beside(self._close_with_the_process(ws), name="socket stopping"):
                await _Socket(ws, caller, self).serve()
        return ws

    async def _close_with_the_process(self, ws: BoundedSocket) -> None:
        await self.poller.closing.wait()
        await ws.close(code=WSCloseCode.GOING_AWAY, message=b"this process stops; connect again")


class _Socket:
    """One WebSocket connection: carries out the client's messages, and sends the entries (stored steps and events) of
    the requests that it follows."""

    def __init__(self, ws: BoundedSocket, caller: GatewayKey, of: Sockets) -> None:
        self._ws = ws
        self._caller = caller
        self._of = of
        self._requests = of.requests
        self._working = asyncio.Semaphore(AT_ONCE)
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._orders: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """For each request id: the lock by which messages about the request are carried out one after the other."""
        self._group = asyncio.TaskGroup()

    async def serve(self) -> None:
        """Receive and carry out the client's messages until the connection ends."""
        with suppress(ConnectionError):
            try:
                async with self._group:
                    await self._read_all()
                    raise _Ended
            except* _Ended:
                pass
            except* InvalidMessage as error:
                await self._close(error)
            except* ConnectionError:
                pass

    async def _read_all(self) -> None:
        async for frame in self._ws:
            if frame.type is WSMsgType.BINARY:
                raise InvalidMessage(WSCloseCode.UNSUPPORTED_DATA, "binary messages are not understood")
            if frame.type is not WSMsgType.TEXT:
                return  # aiohttp has closed the connection: the message is not UTF-8, or too large
            message = read(frame.data, max_values=self._of.call_reader.max_values)
            await self._working.acquire()
            self._group.create_task(self._work(message), name=f"socket {message.type}")

    async def _close(self, group: "ExceptionGroup[InvalidMessage]") -> None:
        first = group.exceptions[0]
        assert isinstance(first, InvalidMessage)
        await self._ws.close(code=first.code, message=first.reason.encode()[:120])

    async def _work(self, message: ClientMessage) -> None:
        order = asyncio.Lock()
        if message.id is not None:
            order = self._orders.setdefault(message.id, order)
        try:
            async with order:
                await self._carry_out(message)
        finally:
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
        id, chose_id = submitted_id_of(headers)
        with self._of.limit.counted(len(message.body)):
            asked = self._of.call_reader.read(
                headers, message.body, self._caller, request_id=id, chose_id=chose_id, task="requests"
            )
            await self._requests.submit(asked, self._caller)
        path = path_of(id)
        await self._send("submitted", id, message.ref, status_url=path, events_url=f"{path}/events")
        if message.subscribe:
            self._follow(id, after=0)

    def _follow(self, id: str, *, after: int) -> None:
        """Start to send the entries (stored steps and events) of a request whose numbers are above `after`. If this
        connection follows the request already, it starts again after that number. Raises ApiError if the connection
        follows too many requests."""
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
                self._of.poller.following(),
                aclosing(self._requests.entries(id, self._caller, after=after)) as entries,
            ):
                begin = b'{"type": "entry", "id": %b, "number": ' % json.dumps(id).encode()
                async for entry in entries:
                    head = begin + b'%d, "kind": "%b", "data": ' % (entry.number, entry.kind.encode())
                    if not isinstance(entry.body, LargeStatus):
                        await self._ws.send_text(b"%b%b}" % (head, entry.body))
                        continue
                    status = entry.body
                    async with self._of.answers.in_memory(status.result) as result:
                        await self._ws.send_large(b"%b%b%b%b}" % (head, status.begin, result, status.end))
        except (ApiError, LanekeeperError) as error:
            await self._send("problem", id, problem=problem_of(error, id))

    async def _send(self, type: str, id: str | None, ref: str | None = None, **fields: object) -> None:
        answer = {"type": type, "id": id, **fields} | ({} if ref is None else {"ref": ref})
        await self._ws.send_text(json.dumps(answer).encode())


class _Ended(Exception):
    """Raised in a WebSocket connection's task group when the client has closed the connection, to cancel all its
    tasks."""
