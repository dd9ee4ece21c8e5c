"""Processes for code that computes, each with one call at a time: handlers of the kind `cpu`, and templates.

They are started with a fresh interpreter, not forked. A process whose call takes too long, or is cancelled, is killed,
because nothing else stops a function that computes; the next call starts another one. Why this is no library's pool:
docs/decisions/0031-processes-of-our-own.md.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from consumers.flows.pool_worker import ANSWERED, CALL, IMPORT, RESULT, RUN

IMPORT_WITHIN_S = 60.0
SECRET_PREFIXES = ("LANEKEEPER_", "ANTHROPIC_")
"""Environment variables that only the worker needs: its settings, with keys and the broker's URL, and those of the
provider's SDK."""


class ProcessDied(Exception):
    """The process ended under its call. `code`: its exit code; negative: a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"signal {-code}" if code < 0 else f"exit code {code}")
        self.code = code


class NotImported(Exception):
    """No process can import the function; the text says why."""


class PoolProcess:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._imported: set[str] = set()
        self._is_in_call = False
        self._is_killed = False

    async def have(self, run: str) -> None:
        """Import a function, so that its first call takes no longer than others. Raises NotImported."""
        if run in self._imported:
            return
        try:
            async with asyncio.timeout(IMPORT_WITHIN_S):
                kind, text = await self.call(run, b"", most_bytes=0, kind=IMPORT)
        except (ProcessDied, TimeoutError) as error:
            raise NotImported(str(error) or f"not within {IMPORT_WITHIN_S:g} s") from None
        if kind != ANSWERED:
            raise NotImported(text.decode(errors="replace"))
        self._imported.add(run)

    async def call(self, run: str, body: bytes, *, most_bytes: int, kind: bytes = RUN) -> tuple[bytes, bytes]:
        """The kind of the result, and its bytes. Raises ProcessDied."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        name = run.encode()
        self._is_in_call = True
        try:
            self._process.stdin.write(CALL.pack(kind, len(name), most_bytes, len(body)) + name)
            self._process.stdin.write(body)
            await self._process.stdin.drain()
            found, size = RESULT.unpack(await self._process.stdout.readexactly(RESULT.size))
            text = await self._process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessDied(await self._process.wait()) from None
        self._is_in_call = False
        return found, text

    @property
    def is_idle(self) -> bool:
        """Whether it can take another call."""
        return not (self._is_in_call or self._is_killed or self.has_ended)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ended(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        """Kill the process, and those that its functions have started; once, because later its id may be another's."""
        if self._is_killed:
            return
        self._is_killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@dataclass(slots=True, eq=False)
class _WaitingCall:
    rank: int
    tenant: str
    turn: "asyncio.Future[None]"


class ProcessPool:
    """Starts and kills the processes, and decides whose call is next: that of the lowest rank; then that of the tenant
    with the fewest running calls; then that of the tenant whose calls have taken the least time.

    `size`: how many calls run at the same time; None: one for each core. `urgent_rank`: calls of this rank may use one
    process more, so that they do not wait for longer ones of other lanes. `memory_bytes`: of address space, for each
    process. `cpu_s`: of CPU time, for each call. 0: no limit."""

    def __init__(
        self, size: int | None = None, *, urgent_rank: int | None = None, memory_bytes: int = 0, cpu_s: int = 0
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._size = size or cores or 1
        self._urgent_rank = urgent_rank
        self._limits = str(memory_bytes), str(cpu_s)
        self._idle: list[PoolProcess] = []
        self._all: set[PoolProcess] = set()
        self._waiting: list[_WaitingCall] = []
        self._running_urgent = 0
        self._running: Counter[str] = Counter()
        self._took_s: dict[str, float] = {}
        """By tenant with running or waiting calls. Who comes anew begins at `_floor_s`, that of the last call begun."""
        self._floor_s = 0.0

    @asynccontextmanager
    async def process(self, run: str, *, rank: int = 0, tenant: str = "") -> AsyncIterator[PoolProcess]:
        """Wait for a free process that has imported `run`. If the block leaves it in the middle of a call, it is
        killed. Raises NotImported."""
        async with self._turn(rank, tenant):
            process = await self._idle_or_new()
            try:
                await process.have(run)
                yield process
            except NotImported:  # what the import has left behind should not meet the next one
                process.kill()
                raise
            finally:
                if process.is_idle:
                    self._idle.append(process)
                else:
                    process.kill()

    async def aclose(self) -> None:
        running = [process for process in self._all if not process.has_ended]
        for process in running:
            process.kill()
        await asyncio.gather(*(process.ended() for process in running))

    async def _idle_or_new(self) -> PoolProcess:
        while self._idle:
            if (process := self._idle.pop()).is_idle:
                return process
        try:
            # a session of its own: Ctrl-C on a terminal is for the worker, which lets running calls finish
            process = PoolProcess(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "consumers.flows.pool_worker",
                    *self._limits,
                    stdin=PIPE,
                    stdout=PIPE,
                    start_new_session=True,
                    env=environment_without_secrets(os.environ),
                )
            )
        except OSError as error:
            raise NotImported(f"no process can be started: {error}") from None
        self._all = {other for other in self._all if not other.has_ended} | {process}
        return process

    # ---- whose turn it is --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self, rank: int, tenant: str) -> AsyncIterator[None]:
        clock = asyncio.get_running_loop().time
        waiting = _WaitingCall(rank, tenant, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._took_s.setdefault(tenant, self._floor_s)
        self._serve()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._forget(tenant)
            else:  # its turn came at the moment of the cancellation
                self._end(waiting, took_s=0.0)
            raise
        began_s = clock()
        try:
            yield
        finally:
            self._end(waiting, took_s=clock() - began_s)

    def _serve(self) -> None:
        # one that was cancelled may still be in the list, because its task has not run since
        while able := [each for each in self._waiting if not each.turn.done() and self._has_place(each.rank)]:
            chosen = min(able, key=lambda each: (each.rank, self._running[each.tenant], self._took_s[each.tenant]))
            self._waiting.remove(chosen)
            self._floor_s = self._took_s[chosen.tenant]
            self._running[chosen.tenant] += 1
            self._running_urgent += chosen.rank == self._urgent_rank
            chosen.turn.set_result(None)

    def _has_place(self, rank: int) -> bool:
        running = self._running.total()
        if self._urgent_rank is None:
            return running < self._size
        is_urgent = rank == self._urgent_rank
        return running <= self._size and (is_urgent or running - self._running_urgent < self._size)

    def _end(self, ended: _WaitingCall, *, took_s: float) -> None:
        self._running[ended.tenant] -= 1
        self._running_urgent -= ended.rank == self._urgent_rank
        self._took_s[ended.tenant] += took_s
        self._forget(ended.tenant)
        self._serve()

    def _forget(self, tenant: str) -> None:
        if not self._running[tenant] and all(each.tenant != tenant for each in self._waiting):
            del self._running[tenant], self._took_s[tenant]


def environment_without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the processes."""
    return {name: value for name, value in environment.items() if not name.upper().startswith(SECRET_PREFIXES)}
