"""A WebSocket with time limits for writing, so that a client that does not read cannot keep it open.

aiohttp, the HTTP library, waits without a limit until the client has read what was sent: in `close`, when it answers a
ping, and when it closes a connection because of an invalid message or a missed heartbeat. And if several tasks wait to
write and one is cancelled, aiohttp cancels them all. So here one separate task waits for aiohttp, and the others wait
for that task.
"""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Final

from aiohttp import WSMsgType, web
from aiohttp.abc import AbstractStreamWriter

WRITE_WITHIN_S: Final = 30.0
"""If a client reads nothing for this many seconds, its WebSocket connection is aborted."""
LEAST_BYTES_PER_S: Final = 256 * 1024
"""The slowest accepted rate, in bytes a second, at which a client reads a large text, after the first `WRITE_WITHIN_S`
seconds."""
CLOSE_WITHIN_S: Final = 5.0
"""The last messages must be sent, and the WebSocket closed, within this many seconds."""


class BoundedSocket(web.WebSocketResponse):
    """aiohttp's WebSocket with time limits: the connection is aborted if a write takes longer than `WRITE_WITHIN_S`, or
    closing longer than `CLOSE_WITHIN_S`, because the client does not read."""

    def __init__(self, request: web.Request, *, heartbeat_s: float, message_bytes: int) -> None:
        super().__init__(heartbeat=heartbeat_s, max_msg_size=message_bytes, writer_limit=sys.maxsize)
        self._transport = request.transport
        self._protocol = request.protocol
        self._write_lock = asyncio.Lock()
        self._out: AbstractStreamWriter
        self._draining: asyncio.Task[None] | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        self._out = await super().prepare(request)
        return self._out

    async def send_text(self, text: bytes) -> None:
        """Send a text message. Raises ConnectionError if the client has disconnected, or reads nothing."""
        await self._written(text, WSMsgType.TEXT)

    async def send_large(self, text: bytes) -> None:
        """Send a text message, and return when the client has read it and it is no longer in memory. Raises
        ConnectionError if the client has disconnected, or reads nothing."""
        await self.send_text(text)
        await self._within(self._until_client_reads(), WRITE_WITHIN_S + len(text) / LEAST_BYTES_PER_S)

    async def pong(self, message: bytes = b"") -> None:
        await self._written(message, WSMsgType.PONG)

    async def close(self, *, code: int = 1000, message: bytes = b"", drain: bool = True) -> bool:
        asyncio.get_running_loop().call_later(CLOSE_WITHIN_S, self._abort)
        return await super().close(code=code, message=message, drain=drain)

    async def _written(self, content: bytes, kind: WSMsgType) -> None:
        await self._within(self._write(content, kind), WRITE_WITHIN_S)

    async def _write(self, content: bytes, kind: WSMsgType) -> None:
        async with self._write_lock:
            if self._protocol.writing_paused:
                await self._until_client_reads()
            await self.send_frame(content, kind)

    async def _within(self, doing: Coroutine[None, None, None], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await doing
        except TimeoutError:
            self._abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def _until_client_reads(self) -> None:
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._out.drain(), name="socket emptied")
        await asyncio.shield(self._draining)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
