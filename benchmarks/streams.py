"""Measures streamed answers: what an event costs, how late it comes, and when the first one comes.

A provider sends events of content at a fixed rate to many streams that begin together. They are read directly, through
the shortest proxy that can be written with aiohttp (the floor), through `lanekeeper serve`, through `lanekeeper
gateway` and `consume` as two processes, over AMQP with our client, and through LiteLLM's proxy; the contestants take
turns in one run. A stream that is not whole yields no figure. CPU time is that of
the time between, without beginnings and ends. `--before`: another checkout, with its own .venv, beside this one.

    ./dev bench streams [--quick] [--rounds 3] [--seconds 12] [--before DIR] [--only NAME,…] [--write]
    ./dev bench streams --report FILE [--write]         measures nothing: the tables of earlier results
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
import uvloop

from benchmarks import litellm
from benchmarks.harness import report
from benchmarks.harness.contestants import Lanekeeper, lanekeeper
from benchmarks.harness.processes import ROOT, clean_environ, cpu_s, process, resident_mib
from benchmarks.harness.report import OURS, PAGE, Aim, Measured, value
from benchmarks.harness.results import Median, Results, load, quantile
from benchmarks.harness.stage import Spoiled, Stage, stage
from benchmarks.harness.streaming import Reading
from tests.support.private_broker import LOOPBACK, free_ports

COMMAND = "./dev bench streams"
PACKAGES = ("aiohttp", "anthropic", "uvloop")
RESULTS = Path(__file__).parent / "results" / "streams"
DIRECT, FLOOR, TWO, AMQP, PEER = "direct", "floor", "gateway + consume", "AMQP, our client", "litellm"
BEFORE: Final = ", before"


@dataclass(frozen=True)
class Load:
    """A number of streams that begin together, each with its events a second."""

    name: str
    streams: int
    rate: int


LOADS = (Load("20 streams", 20, 50), Load("120 streams", 120, 50), Load("500 streams", 500, 20))


@dataclass(frozen=True)
class Served:
    """What is measured: where it is called, and its processes."""

    url: str
    pids: Mapping[str, int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


Serving = Callable[[], AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def direct(url: str) -> AsyncIterator[Served]:
    yield Served(url)


@asynccontextmanager
async def floor(on: Stage, url: str) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "benchmarks.harness.streaming", "forward", str(port), url)
    async with process(command, environ=clean_environ(), log=on.folder / "floor", port=port) as pid:
        yield Served(f"http://{LOOPBACK}:{port}", {"floor": pid})


@asynccontextmanager
async def in_one(on: Stage, url: str, who: Lanekeeper) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    await on.reset(who)
    async with on.workers(who, slots=550, base_url=url, port=port) as (pid,):
        yield Served(f"http://{LOOPBACK}:{port}", {"serve": pid})


@asynccontextmanager
async def in_two(on: Stage, url: str, code: Path) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(dir=on.folder) as folder:
        worker = worker_of(code, "normal", LANEKEEPER_STORE_URL=f"sqlite:///{folder}/store.sqlite")
        (port,) = free_ports(1)
        gateway = replace(worker, command=("-m", "service.cli.main", "gateway", "--port", "{port}"))
        await on.reset(worker)
        async with (
            on.workers(worker, slots=550, base_url=url) as (work,),
            on.workers(gateway, slots=550, base_url=url, port=port, ready=False) as (front,),
        ):
            yield Served(f"http://{LOOPBACK}:{port}", {"gateway": front, "consume": work})


@asynccontextmanager
async def over_amqp(on: Stage, url: str) -> AsyncIterator[Served]:
    worker = worker_of(ROOT, "normal")
    await on.reset(worker)
    async with on.workers(worker, slots=550, base_url=url) as (pid,):
        yield Served(on.amqp_url, {"consume": pid}, environ=on.environment(worker))


@asynccontextmanager
async def peer(on: Stage, url: str) -> AsyncIterator[Served]:
    workers = ("--num_workers", str(os.cpu_count() or 1))
    async with litellm.proxy(on.folder, url, litellm.PRODUCTION, options=workers) as (their_url, headers, pid):
        yield Served(their_url, {"litellm": pid}, headers)


def worker_of(code: Path, *lanes: str, **environ: str) -> Lanekeeper:
    return lanekeeper(
        code=code,
        lanes=lanes,
        LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1e9",
        LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN="1e9",
        LANEKEEPER_BUDGET__OUTPUT_TOKENS_PER_MIN="1e9",
        **environ,
    )


def broker_pid(amqp_url: str) -> int | None:
    """The broker's process: of this machine, or of a container whose port is published here; None if not found."""
    port = urlsplit(amqp_url).port
    listening = {found.pid for found in psutil.net_connections("tcp") if found.laddr and found.laddr.port == port}
    for pid in listening - {None}:
        if psutil.Process(pid).name().startswith("beam"):
            return int(pid or 0)
    try:
        given = ("docker", "ps", "-q", "--filter", f"publish={port}")
        name = subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()
        told = ("docker", "inspect", "-f", "{{.State.Pid}}", name)
        return int(subprocess.run(told, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


async def measured(served: Served, given: Load, seconds: float, broker: int | None) -> dict[str, float]:
    """Read the streams. CPU is counted from when all have begun until all have ended."""
    count_at, events = time.monotonic() + 0.4 * seconds, int(given.rate * seconds)
    reading = Reading(
        url=served.url,
        headers=dict(served.headers),
        streams=given.streams,
        rate=given.rate,
        events=events,
        count_at=count_at,
    )
    pids = {**served.pids, **({} if broker is None else {"broker": broker})}
    before_mib = sum(map(resident_mib, served.pids.values()))
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.harness.streaming", "read", json.dumps(asdict(reading))),
        env={**clean_environ(), **served.environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await asyncio.sleep(count_at - time.monotonic())
        began_s = {name: cpu_s(pid) for name, pid in pids.items()}
        await asyncio.sleep(0.4 * seconds)
        most_mib = sum(map(resident_mib, served.pids.values()))
        output, errors = await made.communicate()
        ended_s = {name: cpu_s(pid) for name, pid in pids.items()}
    finally:
        if made.returncode is None:
            made.kill()
    printed = [line for line in output.decode().splitlines() if line.startswith("READ ")]
    if made.returncode or not printed:
        raise Spoiled(errors.decode()[-1500:])
    found = json.loads(printed[0].removeprefix("READ "))
    later = given.streams * events - found["early"]
    used = {f"{name}_us": 1e6 * (ended_s[name] - before) / later for name, before in began_s.items()}
    return {
        **used,
        "us": sum(value for name, value in used.items() if name != "broker_us"),
        "first_p50_ms": quantile(found["first_ms"], 0.5),
        "first_p99_ms": quantile(found["first_ms"], 0.99),
        "late_p50_ms": quantile(found["late_ms"], 0.5),
        "late_p99_ms": quantile(found["late_ms"], 0.99),
        "kib": 1024 * (most_mib - before_mib) / given.streams,
    }


async def measure(options: argparse.Namespace) -> Results:
    began, found = time.monotonic(), Results.none_yet(PACKAGES, quick=options.quick)
    async with AsyncExitStack() as stack:
        on = await stack.enter_async_context(stage())
        found.versions["RabbitMQ"] = on.version
        broker = broker_pid(on.amqp_url)
        if broker is None:
            found.left_out.append("the broker's CPU: its process was not found")
        (port,) = free_ports(1)
        command = (sys.executable, "-m", "benchmarks.harness.streaming", "provide", str(port))
        providing = process(command, environ=clean_environ(), log=on.folder / "streaming", port=port)
        await stack.enter_async_context(providing)
        url = f"http://{LOOPBACK}:{port}"
        ways: dict[str, Serving] = {DIRECT: lambda: direct(url), FLOOR: lambda: floor(on, url)}
        for suffix, code in {"": ROOT, **({BEFORE: options.before} if options.before else {})}.items():
            who = worker_of(code)
            ways[OURS + suffix] = lambda who=who: in_one(on, url, who)  # type: ignore[misc]
            ways[TWO + suffix] = lambda code=code: in_two(on, url, code)  # type: ignore[misc]
        ways[AMQP] = lambda: over_amqp(on, url)
        if litellm.PROGRAM.exists():
            found.versions["litellm"] = litellm.version()
            ways[PEER] = lambda: peer(on, url)
        else:
            found.left_out.append(litellm.WHY_NOT)
        for number in range(options.rounds):
            for name, serving in ways.items():
                if options.only and name not in options.only.split(","):
                    continue
                async with serving() as served:
                    await measured(served, Load("warm", 10, 20), 3, None)
                    for given in LOADS:
                        if options.load and given.name not in options.load.split(","):
                            continue
                        if name == PEER and given.streams > 120:
                            continue
                        figures: Awaitable[dict[str, float]] = measured(served, given, options.seconds, broker)
                        await found.add(given.name, name, number, figures)
    found.took_s = time.monotonic() - began
    print(f"written to {found.save(RESULTS)}", file=sys.stderr)
    return found


def _added(scenario: str, figure: str, *, of: str = OURS) -> Measured:
    """The median difference to the direct call, computed within each round."""

    def difference(found: Results) -> Median | None:
        ours, plain = found.of(scenario, of, figure), found.of(scenario, DIRECT, figure)
        shared = sorted(ours.keys() & plain.keys())
        return Median.of([ours[each] - plain[each] for each in shared]) if shared else None

    return difference


def _two(figure: str) -> Measured:
    return lambda found: found.median("120 streams", TWO, figure)


AIMS = (
    Aim("`serve`: CPU an event, 120 streams", 60, True, value("120 streams", "us"), " µs"),
    Aim("`gateway` and `consume` together: CPU an event, 120 streams", 120, True, _two("us"), " µs"),
    Aim("the broker between them: CPU an event", 30, True, _two("broker_us"), " µs"),
    Aim("20 streams begin together: first token, added p50", 15, True, _added("20 streams", "first_p50_ms"), " ms"),
    Aim("120 streams begin together: first token, added p50", 60, True, _added("120 streams", "first_p50_ms"), " ms"),
    Aim(
        "500 streams of 20 events/s: the last event is late, p99", 50, True, value("500 streams", "late_p99_ms"), " ms"
    ),
    Aim("memory a stream, 500 streams", 150, True, value("500 streams", "kib"), " KiB"),
)


def tables(found: Results) -> str:
    told = [report.head(found, COMMAND)]
    names = (DIRECT, FLOOR, OURS, OURS + BEFORE, TWO, TWO + BEFORE, AMQP, PEER)
    for given in LOADS:
        columns = {
            "CPU an event: ours, µs": "us",
            "broker, µs": "broker_us",
            "first token: p50 ms": "first_p50_ms",
            "p99 ms": "first_p99_ms",
            "last event late: p50 ms": "late_p50_ms",
            "late p99 ms": "late_p99_ms",
            "KiB a stream": "kib",
        }
        table = report.side_by_side(found, names, {head: (given.name, figure) for head, figure in columns.items()})
        if table:
            told.append(f"{given.streams} streams of {given.rate} events a second:\n\n{table}")
    return report.page(*told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 6 seconds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, with its .venv, beside this one")
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--load", help="loads, separated by commas")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: show these results")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = options.seconds or (6 if options.quick else 12)
    results = load(options.report) if options.report else uvloop.run(measure(options))
    print(report.page(tables(results), report.aims(results, AIMS), report.missing(results)))
    if options.write:
        report.between(PAGE, tables(results), command=COMMAND)
