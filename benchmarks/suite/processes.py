"""Starts the processes of a run (provider and workers), and measures the CPU time and memory of a worker and its
children."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from suite.call_log import CallLog

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
STOP_S = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without any settings, and with the benchmarks' folder on the import path."""
    foreign = ("LANEKEEPER_", "ANTHROPIC_", "OTEL_", "CELERY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", **more}


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
async def process(command: Sequence[str], *, environ: Mapping[str, str], log: Path) -> AsyncIterator[int]:
    """Run a process during the block; yields its process id. Raises RuntimeError, with the end of its log, if the
    process ended before the block did."""
    with log.open("ab") as file:
        made = await asyncio.create_subprocess_exec(*command, env=environ, stdout=file, stderr=file, cwd=log.parent)
    try:
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


@asynccontextmanager
async def provider(folder: Path, *, most: int) -> AsyncIterator[tuple[str, CallLog]]:
    """Run the provider; yields its URL and its log of calls."""
    call_log = CallLog(folder / "call_log", most=most)
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "suite.provider", str(folder / "call_log"), str(most)),
        env=clean_environ(),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert made.stdout is not None
        yield (await made.stdout.readline()).decode().strip(), call_log
    finally:
        with suppress(ProcessLookupError):
            made.terminate()
        await made.wait()


@asynccontextmanager
async def folder() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as made:
        yield Path(made)
