"""Worker processes that are restarted whenever they end, as a service manager does, each with its own connections."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.support.processes import Running, interpreter
from tests.support.waiting import until

FAILPOINT_EXIT = 86
"""The exit code of a worker that dies at a failpoint (`consumers/settle.py`)."""
PAUSE_S = 0.2
"""The pause before a restart."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A worker process has ended."""

    at_s: float
    worker: int
    code: int
    told: frozenset[signal.Signals]
    """The signals that were sent to it."""

    @property
    def is_expected(self) -> bool:
        """Whether it ended as it was told to, or at a failpoint; anything else is a crash."""
        if self.code == 0:
            return signal.SIGTERM in self.told
        if self.code == 130:
            return signal.SIGTERM in self.told  # a second signal, during the grace time of the first
        return self.code == FAILPOINT_EXIT or -self.code in self.told


@dataclass(slots=True)
class Worker:
    """One of the workers; each restart makes a new process."""

    number: int
    environ: dict[str, str]
    running: Running | None = None
    told: set[signal.Signals] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.running is not None and not self.running.has_ended and bool(self.running.told("service.ready"))

    @property
    def pid(self) -> int:
        assert self.running is not None
        return self.running.process.pid

    def send(self, number: signal.Signals) -> None:
        """Send SIGKILL, SIGTERM, SIGSTOP, SIGCONT or another signal."""
        self.told.add(number)
        if self.running is not None and not self.running.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self, *, within_s: float = 40) -> None:
        """Wait until the current process has ended."""
        if self.running is not None:
            await asyncio.wait_for(self.running.process.wait(), timeout=within_s)


class Crew:
    """One worker for each of `environs`, until the block ends. `module`: the module that runs them."""

    def __init__(
        self,
        environs: Sequence[Mapping[str, str]],
        *,
        folder: Path,
        module: str = "service.cli.main",
    ) -> None:
        self.workers = [Worker(number, dict(environ)) for number, environ in enumerate(environs)]
        self.endings: list[Ending] = []
        self._folder = folder
        self._module = module
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def crashes(self) -> list[Ending]:
        """Endings that were not expected."""
        return [each for each in self.endings if not each.is_expected]

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._keep(each), name=f"keeps worker {each.number}") for each in self.workers
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.workers:
            each.send(signal.SIGCONT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ready(self, *, within_s: float = 150) -> None:
        """Wait until all workers take requests."""
        await until(lambda: all(each.is_ready for each in self.workers), within_s=within_s)

    async def _keep(self, worker: Worker) -> None:
        life = 0
        while True:
            life += 1
            worker.told.clear()
            async with interpreter(
                "serve", environ=worker.environ, folder=self._folder, module=self._module
            ) as running:
                worker.running = running
                try:
                    code = await running.process.wait()
                    self.endings.append(Ending(time.monotonic(), worker.number, code, frozenset(worker.told)))
                finally:
                    self._write_down(worker, life, running)
            await asyncio.sleep(PAUSE_S)

    def _write_down(self, worker: Worker, life: int, running: Running) -> None:
        (self._folder / f"worker-{worker.number}-{life}.log").write_text("\n".join(map(str, running.events)))
