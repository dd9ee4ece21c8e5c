"""A connection that can be broken: a TCP proxy between a worker and its broker, provider or store.

async with Proxy("127.0.0.1", 5672) as line:
    connect to line.port …
    line.freeze()               nothing passes, and nobody is told (a blackhole); `freeze(FROM)`: half-open
    line.slow(delay_s=0.4, jitter_s=0.3, bytes_per_s=64_000)
    await line.refuse()         no new connection
    line.reset()                RST to all that are open
    line.cut(after_bytes=100)   each closes in the middle of what comes next
    line.garble()               bytes that nobody sent are put into what each carries next
    await line.mend()           as if nothing had been; what was frozen passes now
"""

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 16_384
TO = "to the server"
FROM = "from the server"
GARBAGE_BYTES = 7


@dataclass(slots=True)
class _Way:
    """What happens to bytes in one direction."""

    passes: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None


class Proxy:
    """Passes connections on to `host`, `port`. It listens on a free port of loopback, which stays the same."""

    def __init__(self, host: str, port: int, *, rng: random.Random | None = None) -> None:
        self._server_at = (host, port)
        self._rng = rng or random.Random()
        self._ways = {TO: _Way(), FROM: _Way()}
        self._lines: set[_Line] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.connected = 0
        """Connections that were taken so far."""

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def open(self) -> int:
        return len(self._lines)

    async def mend(self) -> None:
        for way in self._ways.values():
            way.delay_s, way.jitter_s, way.bytes_per_s = 0.0, 0.0, None
            way.passes.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._take, LOOPBACK, self.port, reuse_address=True)
            self.port = self._server.sockets[0].getsockname()[1]

    def freeze(self, *ways: str) -> None:
        for way in ways or (TO, FROM):
            self._ways[way].passes.clear()

    def slow(self, *, delay_s: float, jitter_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        for way in self._ways.values():
            way.delay_s, way.jitter_s, way.bytes_per_s = delay_s, jitter_s, bytes_per_s

    async def refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def reset(self) -> None:
        for line in tuple(self._lines):
            line.reset()

    def cut(self, *, after_bytes: int) -> None:
        for line in self._lines:
            line.left_bytes = after_bytes

    def garble(self) -> None:
        for line in self._lines:
            line.is_garbled = True

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._server_at)
        except OSError:
            _reset(writer)
            return
        line = _Line(writer, server_writer, self._rng)
        self._lines.add(line)
        for source, target, way in ((reader, server_writer, TO), (server_reader, writer, FROM)):
            task = asyncio.create_task(line.carry(source, target, self._ways[way]), name=f"proxy {way}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._lines.discard(line) if line.is_closed else None)


class _Line:
    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, rng: random.Random) -> None:
        self._writers = (client, server)
        self._rng = rng
        self.left_bytes: int | None = None
        self.is_garbled = False
        self.is_closed = False

    def reset(self) -> None:
        self.is_closed = True
        for writer in self._writers:
            _reset(writer)

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: _Way) -> None:
        loop = asyncio.get_running_loop()
        # Limited: a frozen connection holds what fits, and then the sender's own buffers fill.
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
        reading = asyncio.create_task(self._read(source, waiting, way, loop.time), name="proxy reads")
        try:
            while True:
                due_s, chunk = await waiting.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await way.passes.wait()
                if way.bytes_per_s:
                    await asyncio.sleep(len(chunk) / way.bytes_per_s)
                chunk = self._spoilt(chunk)
                if not chunk:
                    break
                target.write(chunk)
                await target.drain()
        except OSError:
            pass
        finally:
            reading.cancel()
            self.is_closed = True
            for writer in self._writers:
                writer.close()

    async def _read(
        self,
        source: asyncio.StreamReader,
        waiting: "asyncio.Queue[tuple[float, bytes]]",
        way: _Way,
        now_s: Callable[[], float],
    ) -> None:
        chunk = b"-"
        while chunk:
            chunk = b""  # the end of the stream waits its turn like any other data
            with suppress(OSError):
                chunk = await source.read(CHUNK_BYTES)
            late_s = way.delay_s + self._rng.uniform(-way.jitter_s, way.jitter_s)
            await waiting.put((now_s() + max(0.0, late_s), chunk))

    def _spoilt(self, chunk: bytes) -> bytes:
        if self.is_garbled and chunk:
            # Bytes are inserted, not replaced: any length before them is then wrong, as a checksum would be. They are
            # ASCII, so none is the end of a frame.
            self.is_garbled = False
            at = self._rng.randrange(len(chunk))
            return chunk[:at] + bytes(self._rng.randrange(128) for _ in range(GARBAGE_BYTES)) + chunk[at:]
        if self.left_bytes is not None:
            chunk = chunk[: self.left_bytes]
            self.left_bytes -= len(chunk)
        return chunk


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
