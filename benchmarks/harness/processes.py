"""Starts the processes of a run (broker, Redis, simulated API, workers), and measures the CPU time and memory of a
process and its children."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from tests.support.private_broker import LOOPBACK, free_ports, private_broker

ROOT = Path(__file__).parents[2]
START_WITHIN_S = 180.0
STOP_S = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without any settings, and with this checkout on the import path."""
    foreign = ("LANEKEEPER_", "ANTHROPIC_", "OTEL_", "CELERY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def cpu_s(pid: int) -> float:
    """CPU time of a process and its living children, user and system, of all threads, from /proc/<pid>/stat."""
    with suppress(psutil.NoSuchProcess):
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        return sum(_own_cpu_s(each) for each in family)
    return 0.0


def _own_cpu_s(pid: int) -> float:
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return 0.0


def resident_mib(pid: int) -> float:
    """Resident memory of a process and its children in MiB. Pages that they share are counted once for each process."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(each.memory_info().rss for each in family)) / 2**20


@asynccontextmanager
async def process(
    command: Sequence[str], *, environ: Mapping[str, str], log: Path, port: int | None = None
) -> AsyncIterator[int]:
    """Run a process during the block; yields its process id as soon as it listens on `port`. Raises RuntimeError, with
    the end of its log, if the process ended before the block did."""
    with log.open("ab") as file:
        made = await asyncio.create_subprocess_exec(
            *command, env=dict(environ), stdout=file, stderr=file, cwd=log.parent
        )
    try:
        if port is not None:
            async with asyncio.timeout(START_WITHIN_S):
                while made.returncode is None and not await _listens(port):
                    await asyncio.sleep(0.05)
        if made.returncode is None:
            yield made.pid
    finally:
        ended = made.returncode
        if ended is None:
            with suppress(ProcessLookupError):
                made.terminate()
            try:
                await asyncio.wait_for(made.wait(), STOP_S)
            except TimeoutError:
                made.kill()
                await made.wait()
    if ended is not None:
        raise RuntimeError(f"{command[:3]} ended with {ended}: {log.read_text(errors='replace')[-2000:]}")


async def _listens(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.close()
        return True
    return False


@asynccontextmanager
async def simulated(folder: Path, *options: str) -> AsyncIterator[tuple[str, int]]:
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "service.cli.main", "simulate", "--port", str(port), *options)
    async with process(command, environ=clean_environ(), log=folder / f"simulated-{port}", port=port) as pid:
        yield f"http://{LOOPBACK}:{port}", pid


@asynccontextmanager
async def broker() -> AsyncIterator[str]:
    """Yields an AMQP URL: LANEKEEPER_AMQP_URL if it is set, else that of a private broker, which it starts."""
    if url := os.environ.get("LANEKEEPER_AMQP_URL"):
        yield url
        return
    async with private_broker() as made:
        yield made.amqp_url


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[str | None]:
    """Starts a Redis whose append-only file is synced every second; yields its URL, or None if redis-server is not
    installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "yes"]
    async with process(command, environ=clean_environ(), log=folder / "redis", port=port):
        yield f"redis://{LOOPBACK}:{port}/0"
