"""Answers `POST /v1/messages`: handles one call, from its body to the last byte of its answer."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial

from aiohttp import web
from aiohttp.http import StreamWriter

from lanekeeper import Client, Final, Part
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.config.gateway_section import GatewayKey
from service.gateway.answers import Answers
from service.gateway.asking import CallReader, CheckedCall, request_id_of
from service.gateway.bodies import Bodies
from service.gateway.call_limit import CallLimit
from service.gateway.problems import ApiError, of_error, of_problem
from service.gateway.streams import PING, Forwarding, error_event, events_of
from service.side_tasks import beside

EVENT_STREAM = "text/event-stream; charset=utf-8"
WRITE_WITHIN_S = 30.0
"""If an HTTP client reads nothing for this many seconds, its connection is aborted."""
TOLD = (n.LANE_NAME, n.MODEL, n.PROVIDER, n.ATTEMPT, n.WAIT_MS, n.RUN_MS, n.WAIT_FROM, n.REPLAYED)
"""The headers of a worker's reply that the gateway's HTTP answer contains too."""


@dataclass(slots=True)
class Messages:
    """Answers `POST /v1/messages`: publishes each call as a request to its lane, waits for the answer, and sends it to
    the HTTP client, whole or as a stream."""

    client: Client
    _: KW_ONLY
    call_reader: CallReader
    limit: CallLimit
    bodies: Bodies
    answers: Answers
    ping_every_s: float

    async def answer(self, request: web.BaseRequest, caller: GatewayKey) -> web.StreamResponse:
        """Answer one call. If the HTTP client disconnects, aiohttp cancels this coroutine, and `Client` then cancels
        the request. Raises ApiError for an invalid `Idempotency-Key`; all other errors are answered."""
        try:
            request_id, chose_id = request_id_of(request.headers)
        except RequestProblem as problem:
            raise of_problem(problem, chose_id=True) from None
        try:
            read = partial(
                self.call_reader.read, request.headers, caller=caller, request_id=request_id, chose_id=chose_id
            )
            with self.limit.counted(self.bodies.memory_of(request)):
                async with self.bodies.checked_call(request, read) as asked:
                    if not asked.stream:
                        return await self._whole(request, await self._final(asked), request_id)
                    replies = self.client.stream(asked.body, key=asked.key, timeout_s=asked.timeout_s, **asked.options)
                    async with aclosing(replies):
                        return await self._streamed(request, replies, request_id, chose_id=chose_id)
        except ApiError as error:
            return error.response(request_id)
        except LanekeeperError as error:
            return of_error(error, chose_id=chose_id).response(request_id)

    async def _final(self, asked: CheckedCall) -> Final:
        return await self.client.request(asked.body, key=asked.key, timeout_s=asked.timeout_s, **asked.options)

    async def _whole(self, request: web.BaseRequest, final: Final, request_id: str) -> web.StreamResponse:
        headers = {name: _text(final.headers[name]) for name in TOLD if name in final.headers}
        headers |= {"content-type": "application/json", "cache-control": "no-store", "request-id": request_id}
        if (kept := final.kept) is None:
            return web.Response(body=final.body, headers=headers)
        async with self.answers.fetched(kept) as answer:
            return await send_pieces(request, answer.pieces(), size=answer.size, headers=headers)

    async def _streamed(
        self, request: web.BaseRequest, replies: AsyncGenerator[Part | Final, None], request_id: str, *, chose_id: bool
    ) -> web.StreamResponse:
        writing = event_stream(request, request_id)
        forwarding = Forwarding()
        async with beside(writing.pings(every_s=self.ping_every_s), name=f"pings {request_id}"):
            try:
                async for reply in replies:
                    if isinstance(reply, Part):
                        await writing.write(forwarding.part(reply))
                    elif (end := forwarding.end()) is not None:
                        await writing.write(end)
                    elif (kept := reply.kept) is None:
                        await writing.write(b"".join(events_of(reply.message)))
                    else:
                        async with self.answers.converted(kept, lambda body: events_of(json.loads(body))) as answer:
                            await writing.write_all(answer.pieces())
            except ConnectionError:
                return writing.response  # the caller then closes `replies`, which cancels the request
            except (ApiError, LanekeeperError) as error:
                api_error = error if isinstance(error, ApiError) else of_error(error, chose_id=chose_id)
                if not writing.has_begun:
                    raise api_error from error
                await writing.write(error_event(api_error, request_id))
        return await writing.end()


class Writing:
    """Writes an HTTP response in pieces. The status 200 is sent with the first bytes, so that an error before these can
    have another status.

    If several tasks wait in aiohttp until the client reads and one is cancelled, aiohttp cancels them all. So one
    separate task waits there, and the others wait for it (as in `bounded_socket.py`).
    """

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._request = request
        self.response = response
        self._write_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()
        self._draining: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def write(self, data: bytes) -> None:
        """Write bytes of the response. Raises ConnectionError if the client has disconnected, or reads nothing."""
        if not data:
            return
        async with self._time_limited(), self._write_lock:
            await self._write(data)

    async def write_all(self, pieces: AsyncIterable[bytes]) -> None:
        """Write several pieces of the response, and no ping between them. Raises ConnectionError if the client has
        disconnected, or reads nothing."""
        async with self._write_lock:
            async for piece in pieces:
                if not piece:
                    continue
                async with self._time_limited():
                    await self._write(piece)

    async def _write(self, data: bytes) -> None:
        out = await self.response.prepare(self._request)  # sends the headers only once
        assert isinstance(out, StreamWriter)
        await out.write(data, drain=False)
        if self._request.protocol.writing_paused:
            if self._draining is None or self._draining.done():
                self._draining = asyncio.create_task(out.drain(), name="stream emptied")
            await asyncio.shield(self._draining)

    @asynccontextmanager
    async def _time_limited(self) -> AsyncIterator[None]:
        self._last_write_s = self._loop.time()
        try:
            async with asyncio.timeout(WRITE_WITHIN_S):
                yield
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def pings(self, *, every_s: float, ping: bytes = PING) -> None:
        """Run until cancelled: write `ping` (by default a `ping` event) whenever nothing has been written for
        `every_s`."""
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last_write_s + every_s - self._loop.time())
                if self._write_lock.locked():  # another task is writing
                    self._last_write_s = self._loop.time()
                elif self._loop.time() >= self._last_write_s + every_s:
                    await self.write(ping)

    async def end(self) -> web.StreamResponse:
        """End the response. Returns when the client has read the rest, has disconnected, or reads nothing."""
        with suppress(ConnectionError):
            async with self._time_limited(), self._write_lock:
                await self.response.write_eof()
        return self.response


def event_stream(request: web.BaseRequest, request_id: str) -> Writing:
    """Make the HTTP response for a stream of Server-Sent Events."""
    headers = {
        "content-type": EVENT_STREAM,
        "cache-control": "no-store",
        "x-accel-buffering": "no",
        "request-id": request_id,
    }
    return Writing(request, web.StreamResponse(headers=headers))


async def send_pieces(
    request: web.BaseRequest, pieces: AsyncIterable[bytes], *, size: int, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send a response of `size` bytes in pieces. Returns when all are sent, or the client has disconnected."""
    writing = Writing(request, web.StreamResponse(headers={**headers, "content-length": str(size)}))
    with suppress(ConnectionError):
        await writing.write_all(pieces)
        await writing.end()
    return writing.response


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
