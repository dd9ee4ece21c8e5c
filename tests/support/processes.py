"""Runs `lanekeeper` as a separate process that tests may signal and kill; its log is read while it runs.

environ = environment(vhost, api)
async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
    await worker.ready()
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from tests.support import forks, serving
from tests.support.brokers import At, url_of
from tests.support.defaults import ENVIRONMENT, store_url
from tests.support.forks import HOUSE, Forked
from tests.support.waiting import STARTED_S, until

COMMAND = "service.cli.main"
QUICK = {"LANEKEEPER_RETRY__BASE_S": "0.05", "LANEKEEPER_RETRY__CAP_S": "0.2"}
PLENTY = {f"LANEKEEPER_BUDGET__{name.upper()}": f"{each:.0f}" for name, each in serving.PLENTY.items()}


class Provider(Protocol):
    @property
    def base_url(self) -> str: ...


def environment(broker: str | At | None, provider: Provider | None = None, /, **settings: str) -> dict[str, str]:
    """Our environment with only these settings: a broker, with its management API unless it is given by its URL; a
    provider and a key for it; and any free port."""
    amqp_url = None if broker is None else url_of(broker)
    # Python's last: without its compiled files, a process compiles all modules at each start, for ten seconds of CPU
    foreign = ("LANEKEEPER_", "ANTHROPIC_", "OTEL_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    places = {
        "LANEKEEPER_AMQP_URL": amqp_url,
        "LANEKEEPER_MANAGEMENT_URL": getattr(broker, "management_url", None),
        "LANEKEEPER_STORE_URL": store_url(amqp_url),
        "LANEKEEPER_GATEWAY__PORT": "0",
        "ANTHROPIC_BASE_URL": getattr(provider, "base_url", None),
        "ANTHROPIC_API_KEY": "sk-ant-simulated",
    }
    given = {name: value for name, value in places.items() if value is not None}
    return {**kept, "PYTHONPATH": str(HOUSE), **QUICK, **PLENTY, **ENVIRONMENT, **given, **settings}


class Running:
    """One process, with its log as events."""

    def __init__(self, process: Process | Forked) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        """Lines of standard error; a line that is not JSON becomes `{"event": <the line>}`."""
        self.lines: list[str] = []
        """Lines of standard output."""
        self._reading = [asyncio.create_task(self._read_events()), asyncio.create_task(self._read_lines())]

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    def told(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The events in the log with this name and these fields."""
        wanted = {"event": event, **fields}
        return [each for each in self.events if wanted.items() <= each.items()]

    async def tells(self, event: str, *, within_s: float = STARTED_S, **fields: Any) -> dict[str, Any]:
        """Wait for the first event with this name and these fields."""
        await until(lambda: self.told(event, **fields) or self.has_ended, within_s=within_s)
        assert self.told(event, **fields), f"ended with {self.process.returncode}: {self.events}"
        return self.told(event, **fields)[0]

    async def ready(self, *, within_s: float = STARTED_S) -> str:
        """Wait until it accepts requests; returns the URL of its health endpoint, if it has one."""
        return str((await self.tells("service.ready", within_s=within_s))["health"])

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self, *, within_s: float = STARTED_S) -> int:
        """Wait for its end; returns the exit code (-n if signal n ended it) once all its output has been read."""
        code = await asyncio.wait_for(self.process.wait(), timeout=within_s)
        await asyncio.gather(*self._reading)
        return code

    async def _read_events(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip("\n")
            self.events.append(json.loads(text) if text.startswith("{") else {"event": text})

    async def _read_lines(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))


@asynccontextmanager
async def lanekeeper(
    *line: str, environ: Mapping[str, str], folder: Path, module: str = COMMAND
) -> AsyncIterator[Running]:
    """A running command; killed at the end if it still runs. It is a fork (tests/support/forks.py). `module`: the
    module to start, such as `reborn.py`'s."""
    async with _running(await forks.begin(module, *line, environ=environ, folder=folder)) as running:
        yield running


@asynccontextmanager
async def interpreter(
    *line: str, environ: Mapping[str, str], folder: Path, module: str = COMMAND, python: str | Path = sys.executable
) -> AsyncIterator[Running]:
    """The same, but it imports everything itself, as when a user starts it."""
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        module,
        *line,
        env=dict(environ),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    async with _running(process) as running:
        yield running


@asynccontextmanager
async def _running(process: Process | Forked) -> AsyncIterator[Running]:
    running = Running(process)
    try:
        yield running
    finally:
        running.send(signal.SIGKILL)
        await running.ended()


async def run(
    *line: str, environ: Mapping[str, str], folder: Path, within_s: float = STARTED_S
) -> tuple[int, list[str]]:
    async with lanekeeper(*line, environ=environ, folder=folder) as running:
        code = await running.ended(within_s=within_s)
        return code, running.lines
