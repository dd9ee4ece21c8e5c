"""Measures what a request costs each process, and computes what larger loads need.

    ./dev bench scale [--quick] [--write]       ten minutes; needs Docker

One, two and three workers on Redis, with one broker node and with three; callers ask all the time. --write puts the
tables into docs/scale.md."""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import uvloop
from redis.asyncio import Redis

from benchmarks.harness import report
from benchmarks.harness.contestants import Lanekeeper, lanekeeper
from benchmarks.harness.load import Spec, send
from benchmarks.harness.processes import ROOT, cpu_s, resident_mib, simulated
from benchmarks.harness.requesters import Http
from benchmarks.harness.results import Results
from benchmarks.harness.stage import Stage, stage
from benchmarks.scenarios import Figures
from tests.faults.nodes import Cluster, cluster, docker, single
from tests.support.private_broker import LOOPBACK, free_ports

COMMAND = "./dev bench scale"
PAGE, FOLDER = ROOT / "docs/scale.md", ROOT / "benchmarks/results/scale"
WORKERS, SLOTS = 3, 200
WITHIN_S = 300.0
RATES, CALL_S, PROCESS_SLOTS, USED = (10, 1000, 100_000), 10, 1000, 0.6
"""What is computed: for these rates, with calls so long and so many slots a process; `USED` of the time of a Redis is
used."""


@dataclass(frozen=True)
class Ground:
    """One broker node or three, a Redis, and the provider."""

    on: Stage
    who: Lanekeeper
    node_pids: Sequence[int]


@asynccontextmanager
async def ground(brokers: Cluster) -> AsyncIterator[Ground]:
    pids = [int(await docker("inspect", "--format={{.State.Pid}}", node.host)) for node in brokers.nodes]
    async with stage(brokers.amqp_urls[0]) as on:
        environ = {"LANEKEEPER_AMQP_URL": brokers.amqp_url, "LANEKEEPER_STORE_URL": on.redis_url or ""}
        yield Ground(on, replace(lanekeeper(lanes=("normal",)), environ=environ), pids)


async def costs(of: Ground, *, workers: int, requests: int) -> Figures:
    """What a request costs each process."""
    on, who = of.on, of.who
    await on.reset(who)
    async with Redis.from_url(on.redis_url or "") as redis, on.workers(who, slots=SLOTS, processes=workers) as pids:
        server = (await redis.info("server"))["process_id"]

        async def look() -> list[float]:
            info = await redis.info("everything")
            told = [info["used_memory"], info["cmdstat_evalsha"]["calls"]]
            cpu = [sum(map(cpu_s, pids)), cpu_s(server), *map(cpu_s, of.node_pids)]
            return [on.call_log.calls, time.monotonic(), *told, *cpu]

        asking = asyncio.create_task(on.send(who, Spec(do="ask", last=requests, at_once=SLOTS * workers)))
        await on.called(requests // 5, within_s=WITHIN_S)
        first = await look()
        await on.called(requests * 9 // 10, within_s=WITHIN_S)
        last = await look()
        await asking
        on.check(who, requests)
        count, took_s, kept, scripts, worker_s, redis_s, *node_s = (b - a for a, b in zip(first, last, strict=True))
        cpu = {"worker_ms": worker_s, "redis_ms": redis_s, "node_ms": max(node_s), "nodes_ms": sum(node_s)}
        return {
            "per_s": count / took_s,
            **{name: 1000 * spent_s / count for name, spent_s in cpu.items()},
            "scripts": scripts / count,
            "kept_bytes": kept / count,
        }


async def gateway(of: Ground, *, requests: int) -> Figures:
    """What a call of `POST /v1/messages` costs the gateway."""
    (port,), on = free_ports(1), of.on
    edge = replace(of.who, command=("-m", "service.cli.main", "gateway", "--port", str(port)))
    await on.reset(edge)
    async with (
        simulated(on.folder) as (url, _),
        on.workers(of.who, slots=SLOTS, base_url=url),
        on.workers(edge, ready=False, port=port) as (pid,),
        Http(f"http://{LOOPBACK}:{port}") as calls,
    ):
        await send(calls, Spec(do="ask", last=requests // 5, at_once=50))
        before_s = cpu_s(pid)
        await send(calls, Spec(do="ask", last=requests, at_once=50))
        return {"gateway_ms": 1000 * (cpu_s(pid) - before_s) / requests, "gateway_mib": resident_mib(pid)}


async def memory(of: Ground) -> Figures:
    """What a worker needs, and a request in flight."""
    await of.on.reset(of.who)
    async with of.on.workers(of.who, slots=PROCESS_SLOTS) as (pid,):
        idle_mib, spec = resident_mib(pid), Spec(do="ask", last=PROCESS_SLOTS, at_once=PROCESS_SLOTS, call_ms=20_000)
        asking = asyncio.create_task(of.on.send(of.who, spec))
        await of.on.called(PROCESS_SLOTS, within_s=WITHIN_S)
        figures = {"idle_mib": idle_mib, "flight_mib": (resident_mib(pid) - idle_mib) / PROCESS_SLOTS}
        await asking
        return figures


async def measure(*, quick: bool) -> Results:
    found, began = Results.none_yet(("aio-pika", "uvloop"), quick=quick), time.monotonic()
    rounds, requests = (1, 1000) if quick else (3, 4000)
    for kind, brokers in (("one node", single), ("three nodes", cluster)):
        async with brokers() as started, ground(started) as of:
            found.versions["RabbitMQ"] = of.on.version
            for number in range(rounds):
                for workers in range(1, WORKERS + 1):
                    name = f"{kind}, {workers} worker{'s' * (workers > 1)}"
                    await found.add("costs", name, number, costs(of, workers=workers, requests=requests))
                if brokers is cluster:
                    continue
                await found.add("gateway", "gateway", number, gateway(of, requests=requests // 2))
                await found.add("memory", "worker", number, memory(of))
    found.took_s = time.monotonic() - began
    return found


COLUMNS = {
    "requests/s": ("costs", "per_s"),
    "worker, CPU-ms": ("costs", "worker_ms"),
    "Redis": ("costs", "redis_ms"),
    "busiest broker node": ("costs", "node_ms"),
    "all nodes": ("costs", "nodes_ms"),
    "calls of Redis": ("costs", "scripts"),
}
SIZES: Sequence[str] = (
    *("requests/s", "in flight", "cells", "worker processes", "their memory, GiB", "cores of workers"),
    *("cores of gateways, if all comes by HTTP", "cores of all broker nodes", "cores of all Redis"),
    *("memory of all Redis, GiB, for an hour's results", "AMQP connections of workers", "Redis connections, at most"),
)
THREE = f"three nodes, {WORKERS} workers"


def tables(found: Results) -> str:
    rows = dict.fromkeys(run.contestant for run in found.runs if run.scenario == "costs")
    parts = [report.head(found, COMMAND), report.side_by_side(found, rows, COLUMNS)]
    with suppress(LookupError):  # `missing` names what has no figure
        parts.append(report.aligned(sizes(found)))
    return report.page(*parts)


def middle(found: Results, scenario: str, who: str, figure: str) -> float:
    if median := found.median(scenario, who, figure):
        return median.value
    raise LookupError(scenario)


def sizes(found: Results) -> list[Sequence[str]]:
    """What `RATES` need."""
    worker, node, redis = (middle(found, "costs", THREE, each) for each in ("worker_ms", "node_ms", "redis_ms"))
    # a run after another fills memory that Redis already has: the largest figure is that of a new one
    kept = max(run.figures.get("kept_bytes", 0) for run in found.runs if run.scenario == "costs")
    edge, idle = middle(found, "gateway", "gateway", "gateway_ms"), middle(found, "memory", "worker", "idle_mib")
    flight = middle(found, "memory", "worker", "flight_mib")
    limit, columns = USED * 1000 / redis, [SIZES]
    for rate in RATES:
        flying, processes = rate * CALL_S, max(2, math.ceil(rate * CALL_S / PROCESS_SLOTS))
        memory_gib, kept_gib = (processes * idle + flying * flight) / 1024, rate * 3600 * kept / 2**30
        cores = [rate * each / 1000 for each in (worker, edge, 3 * node, redis)]
        numbers = rate, flying, math.ceil(rate / limit), processes, memory_gib, *cores, kept_gib, 2 * processes
        columns.append(tuple(report.number(each) for each in (*numbers, 64 * processes)))
    return list(zip(*columns, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 1,000 requests, not three of 4,000")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    given = parser.parse_args()
    results = uvloop.run(measure(quick=given.quick))
    print(f"written to {results.save(FOLDER)}", file=sys.stderr)
    print(report.page(tables(results), report.missing(results)))
    if given.write:
        report.between(PAGE, tables(results), command=COMMAND)
