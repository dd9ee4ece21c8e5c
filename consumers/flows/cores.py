"""The processes in which CPU-bound handlers run: as many as there are cores, each with one call at a time.

They are started with a fresh interpreter, not forked. A process that takes too long, or whose call is cancelled, is
killed, because nothing else stops a function that computes; the next call starts another one.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from consumers.flows.child import ANSWERED, CALL, IMPORT, RESULT, RUN

IMPORT_WITHIN_S = 60.0


class ChildDied(Exception):
    """The process ended under its call."""


class NotImported(Exception):
    """The process cannot import the function; the text says why."""


class Child:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._imported: set[str] = set()

    async def have(self, run: str) -> None:
        """Import a function, so that its first call takes no longer than others. Raises NotImported."""
        if run in self._imported:
            return
        try:
            async with asyncio.timeout(IMPORT_WITHIN_S):
                kind, text = await self.call(run, b"", most_bytes=0, kind=IMPORT)
        except (ChildDied, TimeoutError) as error:
            raise NotImported(str(error) or f"not within {IMPORT_WITHIN_S:g} s") from None
        if kind != ANSWERED:
            raise NotImported(text.decode(errors="replace"))
        self._imported.add(run)

    async def call(self, run: str, body: bytes, *, most_bytes: int, kind: bytes = RUN) -> tuple[bytes, bytes]:
        """The kind of the result, and its bytes. Raises ChildDied."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        name = run.encode()
        try:
            self._process.stdin.write(CALL.pack(kind, len(name), most_bytes, len(body)) + name + body)
            await self._process.stdin.drain()
            found, size = RESULT.unpack(await self._process.stdout.readexactly(RESULT.size))
            return found, await self._process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            raise ChildDied(f"signal {-code}" if code < 0 else f"exit code {code}") from None

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ended(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        """Kill the process, and those that its handlers have started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Cores:
    """Starts and kills the processes. `size`: how many run at the same time; None: one for each core."""

    def __init__(self, size: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._places = asyncio.Semaphore(size or cores or 1)
        self._idle: list[Child] = []
        self._all: set[Child] = set()

    @asynccontextmanager
    async def one(self, run: str) -> AsyncIterator[Child]:
        """Wait for a free process that has imported `run`. If the block raises or is cancelled, the process is killed.
        Raises NotImported."""
        async with self._places:
            self._idle = [child for child in self._idle if not child.has_ended]
            child = self._idle.pop() if self._idle else await self._start()
            try:
                await child.have(run)
                yield child
            except BaseException:
                child.kill()
                raise
            self._idle.append(child)

    async def _start(self) -> Child:
        # a session of its own: Ctrl-C on a terminal is for the worker, which lets running calls finish
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "consumers.flows.child", stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        child = Child(process)
        self._all = {other for other in self._all if not other.has_ended} | {child}
        return child

    async def aclose(self) -> None:
        for child in self._all:
            child.kill()
        await asyncio.gather(*(child.ended() for child in self._all))
