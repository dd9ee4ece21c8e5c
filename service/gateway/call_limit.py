"""Limits how many HTTP calls the gateway answers at the same time, and the sum of the bytes of their bodies."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from service.gateway.problems import refused, stopping

BODIES_BYTES = 256 * 1024 * 1024
"""The maximum size, in bytes, that the bodies of all HTTP calls in progress may together take in memory."""


class CallLimit:
    """Counts the HTTP calls in progress and their bodies' bytes, and refuses further calls above the limits. A client
    may repeat a refused call a little later."""

    def __init__(self, calls: int) -> None:
        self._most = calls
        self._bytes = 0
        self.calls = 0
        self.is_closed = False
        """True when the process stops: new calls are refused."""
        self._call_ended = asyncio.Event()

    @contextmanager
    def counted(self, body_bytes: int) -> Iterator[None]:
        """Count a call, and its body's bytes, while the block runs. Raises ApiError if a limit is reached."""
        if self.is_closed:
            raise stopping()
        if self.calls >= self._most or self._bytes + body_bytes > BODIES_BYTES:
            raise refused(f"{self.calls} calls are under way here, and no more fit", status=529)
        self.calls += 1
        self._bytes += body_bytes
        try:
            yield
        finally:
            self.calls -= 1
            self._bytes -= body_bytes
            self._call_ended.set()

    async def close(self) -> None:
        """Refuse new HTTP calls, and return when all calls in progress have been answered."""
        self.is_closed = True
        while self.calls:
            self._call_ended.clear()
            await self._call_ended.wait()
