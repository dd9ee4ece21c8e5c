"""How many calls may be under way at one time, and how many bytes of bodies they may hold."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from service.gateway.problems import refused, stopping

BODIES_BYTES = 256 * 1024 * 1024


class Room:
    """Counts the calls. What is above is refused, to be tried again a little later."""

    def __init__(self, calls: int) -> None:
        self._most = calls
        self._bytes = 0
        self.calls = 0
        self.is_closed = False
        """The process stops: no new calls."""
        self._left = asyncio.Event()

    @contextmanager
    def taken(self, body_bytes: int) -> Iterator[None]:
        """Be under way inside this block. Raises ApiError."""
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
            self._left.set()

    async def emptied(self) -> None:
        """Close it, and return when no call is under way."""
        self.is_closed = True
        while self.calls:
            self._left.clear()
            await self._left.wait()
