"""Measures `POST /v1/messages` through the gateway, directly at the same simulated API, and through LiteLLM's proxy.
They take turns in one run.

`lanekeeper serve` (lanes, gateway, SQLite) runs once as one process and once, like LiteLLM's proxy, as one for each
core. The simulated API answers at once. Every answer is compared with its question: a run that lost a call, or mixed
up two answers, yields no figure. The raw figures are written to benchmarks/results/gateway/; --write also puts the
tables into docs/performance.md. LiteLLM's Rust proxy is left out, because no package registry has it.

    ./dev bench gateway [--quick] [--rounds 5] [--calls 200] [--at-once 50] [--write]
    ./dev bench gateway --report FILE [--write]         measures nothing: the tables of earlier results
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import litellm
from benchmarks.harness import report
from benchmarks.harness.contestants import lanekeeper
from benchmarks.harness.load import Spec, send
from benchmarks.harness.processes import cpu_s, resident_mib, simulated
from benchmarks.harness.report import OURS, PAGE, Aim, Measured, ratio, value
from benchmarks.harness.requesters import Http
from benchmarks.harness.results import Median, Results, load, quantile
from benchmarks.harness.stage import Stage, stage
from tests.support.private_broker import LOOPBACK, free_ports

COMMAND = "./dev bench gateway"
PACKAGES = ("aiohttp", "anthropic", "uvloop")
RESULTS = Path(__file__).parent / "results" / "gateway"
STREAMS = 500
DIRECT, PEER = "direct", "litellm"
SPREAD = "one for each core"
"""`lanekeeper serve` in as many processes as LiteLLM's proxy, which share a store."""
CORES = os.cpu_count() or 1
ONE, FIRST, MANY = "one client", "first token", "many clients"
_NUMBERS = count(0, 100_000)
"""The first numbers of loads: each call has its own number, which the simulated API echoes."""


class Spread:
    """Calls several servers in turn."""

    def __init__(self, servers: Sequence[Http]) -> None:
        self._turns = cycle(servers)

    async def ask(self, body: bytes, **how: Any) -> None:
        await next(self._turns).ask(body, **how)

    async def first_part(self, body: bytes, **how: Any) -> float:
        return await next(self._turns).first_part(body, **how)


@dataclass(frozen=True)
class Server:
    """A server whose `/v1/messages` is called."""

    name: str
    calls: Http | Spread
    pids: Sequence[int]

    async def latencies_ms(self, do: str, *, calls: int, at_once: int = 1) -> list[float]:
        first = next(_NUMBERS)
        sent = await send(self.calls, Spec(do=do, first=first, last=first + calls, at_once=at_once))
        return sent.latencies_ms

    async def alone(self, do: str, *, calls: int) -> dict[str, float]:
        """Quantiles of calls one after the other."""
        found = await self.latencies_ms(do, calls=calls)
        return {"p50_ms": quantile(found, 0.5), "p99_ms": quantile(found, 0.99)}

    async def rate(self, *, calls: int, at_once: int) -> dict[str, float]:
        """Calls a second, with `at_once` at a time, and the server's CPU for each."""
        before_s, began_s = self._cpu_s(), time.perf_counter()
        await self.latencies_ms("ask", calls=calls, at_once=at_once)
        took_s = time.perf_counter() - began_s
        return {"per_s": calls / took_s, "cpu_ms": 1000 * (self._cpu_s() - before_s) / calls}

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))

    async def streams(self, at_once: int) -> dict[str, float]:
        """The server's peak of resident memory while `at_once` streams are open."""
        streaming = asyncio.create_task(self.latencies_ms("first_part", calls=at_once, at_once=at_once))
        most = 0.0
        while not streaming.done():
            most = max(most, sum(map(resident_mib, self.pids)))
            await asyncio.sleep(0.2)
        await streaming
        return {"mib": most}


@asynccontextmanager
async def served(
    on: Stage, base_url: str, *, name: str = OURS, slots: int, processes: int = 1
) -> AsyncIterator[Server]:
    """Runs `lanekeeper serve`, with `slots` slots in the lane normal, which calls without a lane go to."""
    who = lanekeeper(
        name,
        LANEKEEPER_NAMESPACE=f"bench-{processes}",
        LANEKEEPER_STORE_URL=f"sqlite:///{on.folder}/{processes}.sqlite",
        LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1e6",
        LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN="1e9",
        LANEKEEPER_BUDGET__OUTPUT_TOKENS_PER_MIN="1e9",
    )
    async with AsyncExitStack() as stack:
        pids, calls = list[int](), list[Http]()
        for port in free_ports(processes):
            running = on.workers(who, slots=slots // processes, base_url=base_url, port=port, ready=False)
            pids += await stack.enter_async_context(running)
            calls.append(await stack.enter_async_context(Http(f"http://{LOOPBACK}:{port}")))
        yield Server(name, Spread(calls), pids)


async def measure(options: argparse.Namespace) -> Results:
    calls, at_once, began = options.calls, options.at_once, time.monotonic()
    found = Results.none_yet(PACKAGES, quick=options.quick)
    async with AsyncExitStack() as stack:
        on = await stack.enter_async_context(stage())
        found.versions["RabbitMQ"] = on.version
        url, pid = await stack.enter_async_context(simulated(on.folder))
        servers = [Server(DIRECT, await stack.enter_async_context(Http(url)), (pid,))]
        servers.append(await stack.enter_async_context(served(on, url, slots=at_once)))
        spread = served(on, url, name=SPREAD, slots=at_once, processes=CORES)
        servers.append(await stack.enter_async_context(spread))
        if litellm.PROGRAM.exists():
            found.versions["litellm"] = litellm.version()
            workers = ("--num_workers", str(CORES))
            proxy = litellm.proxy(on.folder, url, litellm.PRODUCTION, options=workers)
            their_url, headers, pid = await stack.enter_async_context(proxy)
            servers.append(Server(PEER, await stack.enter_async_context(Http(their_url, headers)), (pid,)))
        else:
            found.left_out.append(litellm.WHY_NOT)
        for each in servers:
            await found.add("warm", each.name, 0, each.rate(calls=calls, at_once=at_once))
        for number in range(options.rounds):
            for each in servers:
                await found.add(ONE, each.name, number, each.alone("ask", calls=calls))
            for each in servers:
                await found.add(FIRST, each.name, number, each.alone("first_part", calls=calls))
            for each in servers:
                await found.add(MANY, each.name, number, each.rate(calls=4 * calls, at_once=at_once))
    async with (
        stage() as on,
        simulated(on.folder, "--latency", "10s") as (url, _),
        served(on, url, slots=STREAMS) as ours,
    ):
        await found.add("streams", ours.name, 0, ours.streams(STREAMS))
    found.took_s = time.monotonic() - began
    print(f"written to {found.save(RESULTS)}", file=sys.stderr)
    return found


def _added(scenario: str, figure: str) -> Measured:
    """The median difference to the direct call, computed within each round."""

    def measured(found: Results) -> Median | None:
        ours, direct = found.of(scenario, OURS, figure), found.of(scenario, DIRECT, figure)
        shared = sorted(ours.keys() & direct.keys())
        return Median.of([ours[each] - direct[each] for each in shared]) if shared else None

    return measured


AIMS = (
    Aim(f"{ONE}: added p50", 3, True, _added(ONE, "p50_ms"), " ms"),
    Aim(f"{ONE}: added p99", 15, True, _added(ONE, "p99_ms"), " ms"),
    Aim(f"{FIRST}: added p50", 5, True, _added(FIRST, "p50_ms"), " ms"),
    Aim(f"{FIRST}: added p99", 15, True, _added(FIRST, "p99_ms"), " ms"),
    Aim("calls/s at 50 clients, to LiteLLM's", 4, False, ratio(MANY, "per_s", of=SPREAD, to=PEER)),
    Aim("memory of `serve` with 500 streams", 300, True, value("streams", "mib"), " MiB"),
)
COLUMNS = {
    "whole answer, one client: p50 ms": (ONE, "p50_ms"),
    "p99 ms": (ONE, "p99_ms"),
    "first token: p50 ms": (FIRST, "p50_ms"),
    "first token: p99 ms": (FIRST, "p99_ms"),
    "calls/s, 50 clients": (MANY, "per_s"),
    "CPU-ms a call": (MANY, "cpu_ms"),
}


def tables(found: Results) -> str:
    return report.page(report.head(found, COMMAND), report.side_by_side(found, (DIRECT, OURS, SPREAD, PEER), COLUMNS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of 100 calls")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: show these results")
    given = parser.parse_args()
    given.rounds = given.rounds or (2 if given.quick else 5)
    given.calls = given.calls or (100 if given.quick else 200)
    results = load(given.report) if given.report else uvloop.run(measure(given))
    print(report.page(tables(results), report.aims(results, AIMS), report.missing(results)))
    if given.write:
        report.between(PAGE, tables(results), command=COMMAND)
