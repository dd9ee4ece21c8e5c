"""Writes HTTP responses in pieces, with time limits, so that a client that does not read cannot keep its connection."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter

EVENT_STREAM = "text/event-stream; charset=utf-8"
WRITE_WITHIN_S = 30.0
"""If a client reads nothing for this many seconds, its connection is aborted."""


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
        """Abort the connection, and raise ConnectionError, if the block takes longer than `WRITE_WITHIN_S` plus
        `more_s`."""
        try:
            async with asyncio.timeout(WRITE_WITHIN_S + more_s):
                yield
        except TimeoutError:
            self.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def wait(self, out: AbstractStreamWriter) -> None:
        """Wait until the client has read enough, so that more can be written to `out`."""
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(out.drain(), name="client reads")
        await asyncio.shield(self._draining)

    def abort(self) -> None:
        """Close the client's connection at once."""
        if self._transport is not None:
            self._transport.abort()


class Writing:
    """Writes an HTTP response in pieces. The status 200 is sent only with the first bytes, so that an error that occurs
    earlier can still be answered with another status."""

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._request = request
        self.response = response
        self._drain = Drain(request)
        self._write_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()

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
        """Write several pieces of the response without a ping between them. Raises ConnectionError if the client has
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
            await self._drain.wait(out)

    @asynccontextmanager
    async def _time_limited(self) -> AsyncIterator[None]:
        self._last_write_s = self._loop.time()
        async with self._drain.limited():
            yield

    async def pings(self, ping: bytes, *, every_s: float) -> None:
        """Write `ping` whenever nothing has been written for `every_s` seconds, until this coroutine is cancelled."""
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
            async with self._drain.limited(), self._write_lock:
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
    """Send a response whose body has `size` bytes, in pieces. Returns when all pieces are sent, or when the client has
    disconnected or reads nothing."""
    writing = Writing(request, web.StreamResponse(headers={**headers, "content-length": str(size)}))
    with suppress(ConnectionError):
        await writing.write_all(pieces)
        await writing.end()
    return writing.response
