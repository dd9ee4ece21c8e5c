"""Sends HTTP answers in pieces, with time limits, so that a client that does not read cannot keep its connection.

Large answers, which workers put into the store of large bodies, are first copied into a temporary file, so that many
can be sent at the same time with only a piece of each in memory.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import BinaryIO, Final, TypeVar

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter

from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyStore
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.telemetry import signals
from service.gateway.problems import ApiError, refused
from service.gateway.shares import BodyParsing, SharedLimit

EVENT_STREAM = "text/event-stream; charset=utf-8"
WRITE_WITHIN_S = 30.0
AT_ONCE: Final = 64
IN_MEMORY_AT_ONCE: Final = 4
FETCHED_WITHIN_S: Final = 60.0
PIECE_BYTES: Final = 128 * 1024
T = TypeVar("T")
log = structlog.get_logger()


class Drain:
    """Waits until a client has read what was written to its connection, and aborts the connection if it reads nothing.

    If several tasks wait in aiohttp's `drain` until the client reads and one of them is cancelled, aiohttp cancels them
    all. So only a separate task waits in aiohttp's `drain`, and all others wait for that task.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        self._transport = request.transport
        self._draining: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def limited(self, *, more_s: float = 0.0) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WRITE_WITHIN_S + more_s):
                yield
        except TimeoutError:
            self.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def wait(self, out: AbstractStreamWriter) -> None:
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(out.drain(), name="client reads")
        await asyncio.shield(self._draining)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Writing:
    """Writes a response in pieces. Its status is sent with the first: before, an error can still be answered. After the
    head of an answer to HEAD it raises ConnectionError, as if the client had disconnected."""

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._request = request
        self.response = response
        self._drain = Drain(request)
        self._out: StreamWriter | None = None
        self._write_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def write(self, data: bytes) -> None:
        if not data:
            return
        if self.has_begun and not self._write_lock.locked() and not self._request.protocol.writing_paused:
            await self._write(data)  # without a time limit, which costs as much: it waits for nobody
            return
        async with self._drain.limited(), self._write_lock:
            await self._wait_for_reader()
            await self._write(data)

    async def write_all(self, pieces: AsyncIterable[bytes]) -> None:
        async with self._write_lock:
            async for piece in pieces:
                if not piece:
                    continue
                async with self._drain.limited():
                    await self._write(piece)
                    await self._wait_for_reader()

    async def _write(self, data: bytes) -> None:
        self._last_write_s = self._loop.time()
        if self._out is None:
            out = await self.response.prepare(self._request)  # sends the headers
            assert isinstance(out, StreamWriter)
            if self._request.method == "HEAD":  # its client would take a body for the answer to its next call
                raise ConnectionResetError("the client wants no more than the head")
            self._out = out
        await self._out.write(data, drain=False)

    async def _wait_for_reader(self) -> None:
        if self._request.protocol.writing_paused and self._out is not None:
            await self._drain.wait(self._out)

    async def pings(self, ping: bytes, *, every_s: float) -> None:
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last_write_s + every_s - self._loop.time())
                if self._write_lock.locked():  # another task is writing
                    self._last_write_s = self._loop.time()
                elif self._loop.time() >= self._last_write_s + every_s:
                    await self.write(ping)

    async def end(self) -> web.StreamResponse:
        with suppress(ConnectionError):
            async with self._drain.limited(), self._write_lock:
                await self.response.write_eof()
        return self.response


def in_one_line(json: bytes) -> bytes:
    """JSON may have line ends between its words, which would end an event's `data` or a line of results."""
    return json.replace(b"\r", b" ").replace(b"\n", b" ")


def event_stream(request: web.BaseRequest, request_id: str, *, id_header: str = "request-id") -> Writing:
    """The response for a stream of Server-Sent Events."""
    headers = {
        "content-type": EVENT_STREAM,
        "cache-control": "no-store",
        "x-accel-buffering": "no",
        id_header: request_id,
    }
    return Writing(request, web.StreamResponse(headers=headers))


async def send_pieces(
    request: web.BaseRequest, pieces: AsyncIterable[bytes], *, size: int, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send a response whose body has `size` bytes. Returns also when the client has disconnected or reads nothing."""
    writing = Writing(request, web.StreamResponse(headers={**headers, "content-length": str(size)}))
    with suppress(ConnectionError):
        await writing.write_all(pieces)
        await writing.end()
    return writing.response


class StoredAnswer:
    """A large answer, copied from its store to a local file and checked against its SHA-256."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size

    async def pieces(self, *, begin: bytes = b"", end: bytes = b"") -> AsyncGenerator[bytes, None]:
        yield begin
        await asyncio.to_thread(self._file.seek, 0)
        while piece := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield piece
        yield end


class StoredAnswers:
    """Fetches large answers from `stores`: those of now, and of before a change of the settings."""

    def __init__(self, stores: Sequence[BodyStore], parsing: BodyParsing, *, most_bytes: int) -> None:
        self._stores = stores
        self._parsing = parsing
        self._most_bytes = most_bytes
        self._places = SharedLimit(AT_ONCE, "large answers")
        self._in_memory = SharedLimit(IN_MEMORY_AT_ONCE, "large answers", spared=2)

    @asynccontextmanager
    async def fetched(self, kept: BodyAddress, tenant: str | None) -> AsyncIterator[StoredAnswer]:
        """In a temporary file. Raises ApiError: 410 if the answer is lost, 503 if it cannot be fetched at present."""
        async with self._filed(tenant) as file:
            size = await self._read(kept, lambda store: store.fetch_into(file, kept, most_bytes=self._most_bytes))
            yield StoredAnswer(file, size)

    @asynccontextmanager
    async def in_memory(self, kept: BodyAddress, tenant: str | None) -> AsyncIterator[bytes]:
        """Whole; leave the block soon, because few can be inside. Raises the errors of `fetched`."""
        async with self._in_memory.taken_soon(tenant, within_s=FETCHED_WITHIN_S):
            yield await self._read(kept, lambda store: store.fetch(kept, most_bytes=self._most_bytes))

    @asynccontextmanager
    async def converted(
        self, kept: BodyAddress, tenant: str | None, make: Callable[[bytes], Iterable[bytes]]
    ) -> AsyncIterator[StoredAnswer]:
        async with self._filed(tenant) as file:
            async with self.in_memory(kept, tenant) as body:
                await self._parsing.run(math.inf, lambda: file.writelines(make(body)))
            yield StoredAnswer(file, file.tell())

    @asynccontextmanager
    async def _filed(self, tenant: str | None) -> AsyncIterator[BinaryIO]:
        async with self._places.taken_soon(tenant, within_s=FETCHED_WITHIN_S):
            file = await asyncio.to_thread(tempfile.TemporaryFile)
            try:
                yield file
            finally:
                file.close()

    async def _read(self, kept: BodyAddress, reading: Callable[[BodyStore], Awaitable[T]]) -> T:
        store = next((store for store in self._stores if store.holds(kept.address)), None)
        if store is None:
            settings = "LANEKEEPER_BODIES__URL, LANEKEEPER_BODIES__ALLOW"
            raise refused(f"the answer lies in a store that this gateway does not know ({settings})")
        try:
            async with asyncio.timeout(FETCHED_WITHIN_S):
                return await reading(store)
        except BodyError as error:
            log.error(signals.BODY_UNAVAILABLE, error=str(error))
            raise ApiError(410, f"the answer was stored, and is lost: {error}", "api_error") from error
        except BodiesUnavailable as error:
            log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
            raise refused(str(error)) from error
        except TimeoutError:
            raise refused(f"the answer could not be fetched within {FETCHED_WITHIN_S:g} s") from None
