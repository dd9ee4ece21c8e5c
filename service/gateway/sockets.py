"""`GET /v1/ws`: submit, follow and cancel many requests on one connection. What a client says: `socket_messages.py`.

The answers, and the entries of followed requests (numbers and kinds as in `/events`):

    {"type": "submitted", "id": "…", "status_url": "…", "events_url": "…", "ref": "…"}
    {"type": "subscribed" | "unsubscribed", "id": "…", "ref": "…"}
    {"type": "cancelling", "id": "…", "outcome": "…", "ref": "…"}
    {"type": "entry", "id": "…", "number": 3, "kind": "event", "data": {…}}
    {"type": "problem", "id": "…", "problem": {…}, "ref": "…"}

A connection that ends cancels nothing: what was submitted on it runs on, and can be followed on another one.
"""

import asyncio
import json
from contextlib import aclosing, suppress
from typing import Final

from aiohttp import WSCloseCode, WSMsgType, web
from multidict import CIMultiDict

from lanekeeper.contract.problems import LanekeeperError
from service.config.gateway_section import GatewayKey
from service.gateway.asking import IDEMPOTENCY_KEY, request_id_of
from service.gateway.documents import path_of, problem_of, refusal
from service.gateway.following import Following
from service.gateway.looking import Looking
from service.gateway.problems import ApiError, refused
from service.gateway.requests import Requests
from service.gateway.socket_messages import Rubbish, Said, read
from service.side_tasks import beside
from topology.codec.decoding import PACKED_BYTES

AT_ONCE: Final = 16
"""Messages of one connection that are worked on at one time; it is not read while there are as many."""
FOLLOWED_AT_MOST: Final = 100
"""Requests that one connection follows."""
WRITE_WITHIN_S: Final = 30.0
"""A client that reads nothing for this long has gone."""
MESSAGE_BYTES: Final = PACKED_BYTES + 16 * 1024


class Sockets:
    """Answers upgrades, each with a connection of its own."""

    def __init__(self, requests: Requests, following: Following, looking: Looking, *, ping_every_s: float) -> None:
        self._requests = requests
        self._following = following
        self._looking = looking
        self._ping_every_s = ping_every_s

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Access was checked before: by key, or by Host and Origin."""
        ws = web.WebSocketResponse(heartbeat=self._ping_every_s, max_msg_size=MESSAGE_BYTES)
        if not ws.can_prepare(request).ok:
            return refusal(ApiError(426, "this path is a WebSocket's", headers={"upgrade": "websocket"}))
        try:
            async with self._looking.following():
                await ws.prepare(request)
                socket = _Socket(ws, caller, requests=self._requests, following=self._following, looking=self._looking)
                async with beside(self._close_with_the_process(ws), name="socket stopping"):
                    await socket.serve()
        except ApiError as error:
            return refusal(error)
        return ws

    async def _close_with_the_process(self, ws: web.WebSocketResponse) -> None:
        await self._looking.closing.wait()
        await ws.close(code=WSCloseCode.GOING_AWAY, message=b"this process stops; connect again")


class _Socket:
    """One connection."""

    def __init__(
        self,
        ws: web.WebSocketResponse,
        caller: GatewayKey,
        *,
        requests: Requests,
        following: Following,
        looking: Looking,
    ) -> None:
        self._ws = ws
        self._caller = caller
        self._requests = requests
        self._following = following
        self._looking = looking
        self._working = asyncio.Semaphore(AT_ONCE)
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._writing = asyncio.Lock()
        self._group = asyncio.TaskGroup()

    async def serve(self) -> None:
        """Read until the connection ends."""
        with suppress(ConnectionError):
            try:
                async with self._group:
                    await self._read_all()
                    raise _Ended
            except* _Ended:
                pass
            except* Rubbish as rubbish:
                await self._close(rubbish)
            except* ConnectionError:
                pass

    async def _read_all(self) -> None:
        async for message in self._ws:
            if message.type is WSMsgType.BINARY:
                raise Rubbish(WSCloseCode.UNSUPPORTED_DATA, "binary messages are not understood")
            if message.type is not WSMsgType.TEXT:
                return  # closed for what the library refuses: not UTF-8, too large
            said = read(message.data)
            await self._working.acquire()
            task = self._group.create_task(self._work(said), name=f"socket {said.type}")
            task.add_done_callback(lambda _: self._working.release())

    async def _close(self, group: "ExceptionGroup[Rubbish]") -> None:
        first = group.exceptions[0]
        assert isinstance(first, Rubbish)
        await self._ws.close(code=first.code, message=first.reason.encode()[:120])

    async def _work(self, said: Said) -> None:
        try:
            match said.type:
                case "submit":
                    await self._submit(said)
                case "subscribe":
                    assert said.id is not None
                    await self._requests.known(said.id, self._caller)
                    await self._answer("subscribed", said)
                    self._follow(said.id, after=said.after)
                case "unsubscribe":
                    if (task := self._followed.pop(said.id or "", None)) is not None:
                        task.cancel()
                    await self._answer("unsubscribed", said)
                case "cancel":
                    assert said.id is not None
                    outcome = await self._requests.cancel(said.id, self._caller)
                    await self._answer("cancelling", said, outcome=outcome)
        except (ApiError, LanekeeperError) as error:
            await self._refuse(error, said.id, said.ref)

    async def _submit(self, said: Said) -> None:
        headers = CIMultiDict(said.headers)
        if said.id is not None:
            headers[IDEMPOTENCY_KEY] = said.id
        id, chose_id = request_id_of(headers)
        await self._requests.submit(headers, said.body, self._caller, id=id, chose_id=chose_id)
        path = path_of(id)
        await self._answer("submitted", said, id=id, status_url=path, events_url=f"{path}/events")
        if said.subscribe:
            self._follow(id, after=0)

    def _follow(self, id: str, *, after: int) -> None:
        """Raises ApiError. A request that is followed already is followed from the new number on."""
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
                self._looking.following(),
                aclosing(self._following.entries(id, self._caller, after=after)) as entries,
            ):
                begin = b'{"type": "entry", "id": %b, "number": ' % json.dumps(id).encode()
                async for entry in entries:
                    end = b'%d, "kind": "%b", "data": %b}' % (entry.number, entry.kind.encode(), entry.body)
                    await self._send(begin + end)
        except (ApiError, LanekeeperError) as error:
            await self._refuse(error, id, None)

    async def _answer(self, type: str, said: Said, **fields: str) -> None:
        told = {"type": type, "id": said.id, **fields} | ({} if said.ref is None else {"ref": said.ref})
        await self._send(json.dumps(told).encode())

    async def _refuse(self, error: ApiError | LanekeeperError, id: str | None, ref: str | None) -> None:
        _, document, _ = problem_of(error, id)
        told = {"type": "problem", "id": id, "problem": document} | ({} if ref is None else {"ref": ref})
        await self._send(json.dumps(told).encode())

    async def _send(self, text: bytes) -> None:
        """Raises ConnectionError if the client has gone, or reads nothing."""
        try:
            async with asyncio.timeout(WRITE_WITHIN_S), self._writing:
                await self._ws.send_frame(text, WSMsgType.TEXT)
        except TimeoutError:
            raise ConnectionResetError("the client reads nothing") from None


class _Ended(Exception):
    """The client closed the connection: what is done for it ends."""
