"""A WebSocket with time limits for writing, so that a client that does not read cannot keep it open.

These limits are needed because aiohttp, the HTTP library, waits without a limit until the client has read what was
sent: in `close`, when it answers a ping, and when it closes a connection because of an invalid message or a missed
heartbeat.
"""

import asyncio
import sys
from typing import Final

from aiohttp import WSMsgType, web
from aiohttp.abc import AbstractStreamWriter

from service.gateway.writing import Drain

LEAST_BYTES_PER_S: Final = 256 * 1024
"""The lowest accepted rate, in bytes a second, at which a client reads a large text: the time that the text takes at
this rate is added to `WRITE_WITHIN_S`."""
CLOSE_WITHIN_S: Final = 5.0
"""When a WebSocket is closed, its last messages must be sent and the closing completed within this many seconds."""


class BoundedSocket(web.WebSocketResponse):
    """aiohttp's WebSocket with time limits: the connection is aborted if a write takes longer than `WRITE_WITHIN_S`, or
    closing longer than `CLOSE_WITHIN_S`, because the client does not read."""

    def __init__(self, request: web.Request, *, heartbeat_s: float, message_bytes: int) -> None:
        super().__init__(heartbeat=heartbeat_s, max_msg_size=message_bytes, writer_limit=sys.maxsize)
        self._protocol = request.protocol
        self._drain = Drain(request)
        self._write_lock = asyncio.Lock()
        self._out: AbstractStreamWriter

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        self._out = await super().prepare(request)
        return self._out

    async def send_text(self, text: bytes) -> None:
        """Send a text message. Raises ConnectionError if the client has disconnected, or reads nothing."""
        await self._write(text, WSMsgType.TEXT)

    async def send_large(self, text: bytes) -> None:
        """Send a text message, and return when the client has read it and it is no longer in memory. Raises
        ConnectionError if the client has disconnected, or reads nothing."""
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
