"""Measures what a request costs each process, and at which rate a lane's one queue, or the one Redis, is the limit.

    ./dev bench scale [--quick] [--write]       fifteen minutes; needs Docker

Costs: one, two and three workers on Redis, with one broker node and with three; callers ask all the time. A queue's
process in RabbitMQ uses one core, and Redis too, so each has a limit. Two cores do not reach it, so it is lowered:
Redis gets a quota of CPU time (as root), the queue's process is suspended most of the time. Then it is the bottleneck,
and so many requests a second should pass as its share of a core divided by its cost of a request; with two cells
(namespaces, each with its Redis) twice as many. --write puts the tables into docs/scale.md."""

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aio_pika
import psutil
import uvloop
from redis.asyncio import Redis

from benchmarks.harness import report
from benchmarks.harness.contestants import FLOOR, Lanekeeper, lanekeeper
from benchmarks.harness.load import Spec, read_mark, send
from benchmarks.harness.processes import ROOT, clean_environ, cpu_s, process, redis, resident_mib, simulated
from benchmarks.harness.provider import CallLog
from benchmarks.harness.requesters import Http
from benchmarks.harness.results import Results
from benchmarks.harness.stage import MOST, Spoiled, Stage, stage
from benchmarks.scenarios import Figures
from lanekeeper.contract.names import Names
from tests.faults.nodes import Cluster, Node, cluster, docker, single
from tests.support.private_broker import LOOPBACK, free_ports

COMMAND = "./dev bench scale"
PAGE, FOLDER = ROOT / "docs/scale.md", ROOT / "benchmarks/results/scale"
WORKERS, SLOTS, CALLERS = 3, 200, 600
PART = 3
"""A limit is lowered to this part of what passed without it."""
WITHIN_S = 300.0
LONGEST_S = 0.5
"""The longest suspension of a queue's process."""
SETTLES_S = 1.0
"""A held queue is not full at first."""
RATES, CALL_S, PROCESS_SLOTS, USED = (10, 1000, 100_000), 10, 1000, 0.6
"""What is computed: for these rates, with calls so long and so many slots a process; `USED` of a limit is used."""
LOOK = """{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)),
{{Name, _}} = amqqueue:get_pid(Q), P = whereis(Name), Now = fun() -> os:system_time(microsecond) end,
Work = fun() -> {{element(2, process_info(P, reductions)), element(1, erlang:statistics(reductions))}} end,
Until = Now() + {for_us},
Hold = fun(F, Ran, Last) -> case Now() < Until of false -> Ran; true -> {held}
At = Now(), timer:sleep({run_ms}), Next = Now() - At, F(F, Ran + Next, Next) end end,
{{Own, All}} = Work(), From = Now(), Ran = Hold(Hold, 0, 1000), To = Now(), {{Own2, All2}} = Work(),
io:format("~w", [[Ran, Own2 - Own, All2 - All, From, To]])."""
HELD = (
    "erlang:suspend_process(P), timer:sleep(min({longest_ms}, round(Last * {rest} / 1000))), erlang:resume_process(P),"
)
"""It runs for 1 to 3 ms in between, because Erlang's timers are no finer; it is suspended as long as the share asks."""


@dataclass(frozen=True)
class Ground:
    """One broker node or three, a Redis, and the provider."""

    on: Stage
    who: Lanekeeper
    nodes: Sequence[Node]
    node_pids: Sequence[int]

    async def look(self, queue: str, *, share: float, seconds: float) -> Figures:
        """What passes through a queue, whose process has so large a share of a core."""
        pid, log = self.node_pids[0], self.on.call_log
        hurry(pid)
        cpu_us, calls = 1e6 * cpu_s(pid), log.calls
        run_ms, held = (
            (1, HELD.format(rest=1 / share - 1, longest_ms=round(1000 * LONGEST_S))) if share < 1 else (50, "")
        )
        expression = LOOK.format(queue=queue, held=held, run_ms=run_ms, for_us=round(1e6 * seconds))
        said = await self.nodes[0].run("rabbitmqctl", "--quiet", "eval", expression)
        ran_us, own, whole, *span_us = json.loads(said[: said.index("]") + 1])
        node_us = (1e6 * cpu_s(pid) - cpu_us) / (log.calls - calls)
        begun_s, end_s = (at / 1e6 - time.time() + time.monotonic() for at in span_us)
        passed = sum(begun_s + SETTLES_S <= at < end_s for at in log.began[:MOST])
        has, per_s = ran_us / 1e6 / (end_s - begun_s), passed / (end_s - begun_s - SETTLES_S)
        queue_us = 1e6 * has / per_s if share < 1 else node_us * own / whole
        return {"share": has, "per_s": per_s, "queue_us": queue_us, "node_us": node_us}


def cell(brokers: str, redis_url: str | None, names: Names) -> Lanekeeper:
    who = lanekeeper(lanes=("normal",), names=names)
    return replace(who, environ={"LANEKEEPER_AMQP_URL": brokers, "LANEKEEPER_STORE_URL": redis_url or ""})


@asynccontextmanager
async def ground(brokers: Cluster) -> AsyncIterator[Ground]:
    pids = [int(await docker("inspect", "--format={{.State.Pid}}", node.host)) for node in brokers.nodes]
    async with stage(brokers.amqp_urls[0]) as on:
        yield Ground(on, cell(brokers.amqp_url, on.redis_url, Names("bench")), brokers.nodes, pids)


def hurry(pid: int) -> None:
    """Let a process and its children have a core as soon as they can run: other processes must not be their limit."""
    with suppress(PermissionError):
        for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for thread in each.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, -20)


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


async def sink(url: str, queue: str, log: str) -> None:
    """The lightest consumer: acknowledges and counts."""
    call_log, connection = CallLog(Path(log), most=MOST), await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=SLOTS)

    async def count(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        call_log.begin(read_mark(message.body)[0], time.monotonic())
        await message.ack()

    await (await channel.get_queue(queue)).consume(count)
    await asyncio.Event().wait()


async def bare(of: Ground, *, share: float, seconds: float) -> Figures:
    """A queue without Lanekeeper: light publishers and consumers."""
    on, queue = of.on, FLOOR.queue
    await on.reset(FLOOR)
    command = (sys.executable, "-m", "benchmarks.scale", "sink", on.amqp_url, queue, str(on.folder / "call_log"))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(process(command, environ=clean_environ(), log=on.folder / "sink"))
        halves = [Spec(do="publish", first=at, last=at + MOST // 2 - 1, at_once=300) for at in (0, MOST // 2)]
        sending = [asyncio.create_task(on.send(FLOOR, each)) for each in halves]
        try:
            await on.called(1000)
            return await of.look(queue, share=share, seconds=seconds)
        finally:
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


async def queue_held(of: Ground, *, share: float, requests: int, seconds: float) -> Figures:
    """Lanekeeper while the lane's queue is the limit."""
    on, who = of.on, of.who
    await on.reset(who)
    async with on.workers(who, slots=SLOTS, processes=WORKERS):
        asking = asyncio.create_task(on.send(who, Spec(do="ask", last=requests, at_once=CALLERS)))
        await on.called(CALLERS // 3, within_s=WITHIN_S)
        figures = await of.look(who.queue, share=share, seconds=seconds)
        if asking.done():
            raise Spoiled(f"{requests} requests were too few")
        await asking
        on.check(who, requests)
        return figures


@contextmanager
def quota(pid: int, *, share: float) -> Iterator[None]:
    """Leave a process so large a share of a core, by a control group of its own. Only root can do that."""
    root = Path("/sys/fs/cgroup")
    is_new = (root / "cgroup.controllers").exists()
    group = root / ("" if is_new else "cpu") / f"lanekeeper-{pid}"
    group.mkdir()
    try:
        allowed = f"{round(share * 100_000)}"  # in 100 ms, the period by default
        (group / ("cpu.max" if is_new else "cpu.cfs_quota_us")).write_text(allowed)
        (group / "cgroup.procs").write_text(f"{pid}")
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(f"{pid}")
        group.rmdir()


async def redis_held(of: Ground, cells: Sequence[Lanekeeper], *, share: float, requests: int) -> Figures:
    """Lanekeeper while Redis is the limit, in each of the cells, which share the broker alone."""
    on, total, servers = of.on, requests * len(cells), []
    async with AsyncExitStack() as stack:
        for who in cells:
            await on.reset(who)
            client = await stack.enter_async_context(Redis.from_url(who.environ["LANEKEEPER_STORE_URL"]))
            servers.append((await client.info("server"))["process_id"])
            await stack.enter_async_context(on.workers(who, slots=SLOTS, processes=WORKERS // len(cells) + 1))
        for pid in servers:
            stack.enter_context(quota(pid, share=share))
        specs = [Spec(do="ask", first=at, last=at + requests, at_once=CALLERS) for at in range(0, total, requests)]
        asking = [asyncio.create_task(on.send(*both)) for both in zip(cells, specs, strict=True)]
        await on.called(total // 5, within_s=WITHIN_S)
        cpu, calls, at_s = sum(map(cpu_s, servers)), on.call_log.calls, time.monotonic()
        await on.called(total * 4 // 5, within_s=WITHIN_S)
        calls, took_s, cpu = on.call_log.calls - calls, time.monotonic() - at_s, sum(map(cpu_s, servers)) - cpu
        await asyncio.gather(*asking)
        on.check(cells[0], total)
        return {"share": share * len(cells), "per_s": calls / took_s, "used": cpu / took_s}


async def limited(of: Ground, found: Results, number: int, *, requests: int, seconds: float) -> None:
    """Lower one limit after the other to a `PART` of what passed without it."""
    share = middle(found, "bare", "queue", "per_s") * middle(found, "bare", "queue", "queue_us") / 1e6 / PART
    await found.add("bare held", "queue", number, bare(of, share=share, seconds=seconds))
    per_s, redis_ms = middle(found, "costs", ONE, "per_s"), middle(found, "costs", ONE, "redis_ms")
    share = per_s * middle(found, "bare held", "queue", "queue_us") / 1e6 / PART
    many = CALLERS + round(per_s * seconds)
    await found.add("held", "queue", number, queue_held(of, share=share, requests=many, seconds=seconds))
    (folder := of.on.folder / f"second-{number}").mkdir()
    async with redis(folder) as second:
        share, other = per_s * redis_ms / 1e3 / PART, cell(of.on.amqp_url, second, Names("bench2"))
        await found.add("held", "Redis", number, redis_held(of, (of.who,), share=share, requests=requests))
        await found.add("held", "two cells", number, redis_held(of, (of.who, other), share=share, requests=requests))


async def measure(*, quick: bool) -> Results:
    found, began = Results.none_yet(("aio-pika", "uvloop"), quick=quick), time.monotonic()
    rounds, requests, seconds = (1, 1000, 3.0) if quick else (3, 4000, 8.0)
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
                await found.add("bare", "queue", number, bare(of, share=1, seconds=seconds))
                with suppress(LookupError):  # what came before has no figure
                    await limited(of, found, number, requests=requests, seconds=seconds)
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
ONE, THREE = (f"{kind}, {WORKERS} workers" for kind in ("one node", "three nodes"))


def tables(found: Results) -> str:
    rows = dict.fromkeys(run.contestant for run in found.runs if run.scenario == "costs")
    parts = [report.head(found, COMMAND), report.side_by_side(found, rows, COLUMNS)]
    with suppress(LookupError):  # `missing` names what has no figure
        parts += [report.aligned(limits(found)), report.aligned(sizes(found))]
    return report.page(*parts)


def middle(found: Results, scenario: str, who: str, figure: str) -> float:
    if median := found.median(scenario, who, figure):
        return median.value
    raise LookupError(scenario)


def limits(found: Results) -> list[Sequence[str]]:
    """Where the limits lie, and where the formula says."""
    queue_us, redis_ms = middle(found, "bare held", "queue", "queue_us"), middle(found, "costs", ONE, "redis_ms")
    rows: list[Sequence[str]] = [("limit", "has of a core", "requests/s by the formula", "measured", "with a core")]
    for name, whole in (("queue", 1e6 / queue_us), ("Redis", 1000 / redis_ms), ("two cells", 1000 / redis_ms)):
        share, per_s = (middle(found, "held", name, figure) for figure in ("share", "per_s"))
        rows.append((name, f"{share:.3f}", *map(report.number, (share * whole, per_s, whole))))
    return rows


def sizes(found: Results) -> list[Sequence[str]]:
    """What `RATES` need."""
    worker, node, redis = (middle(found, "costs", THREE, each) for each in ("worker_ms", "node_ms", "redis_ms"))
    # a run after another fills memory that Redis already has: the largest figure is that of a new one
    kept = max(run.figures.get("kept_bytes", 0) for run in found.runs if run.scenario == "costs")
    edge, idle = middle(found, "gateway", "gateway", "gateway_ms"), middle(found, "memory", "worker", "idle_mib")
    flight, queue = middle(found, "memory", "worker", "flight_mib"), middle(found, "bare held", "queue", "queue_us")
    limit, columns = USED * min(1000 / redis, 1e6 / queue), [SIZES]
    for rate in RATES:
        flying, processes = rate * CALL_S, max(2, math.ceil(rate * CALL_S / PROCESS_SLOTS))
        memory_gib, kept_gib = (processes * idle + flying * flight) / 1024, rate * 3600 * kept / 2**30
        cores = [rate * each / 1000 for each in (worker, edge, 3 * node, redis)]
        numbers = rate, flying, math.ceil(rate / limit), processes, memory_gib, *cores, kept_gib, 2 * processes
        columns.append(tuple(report.number(each) for each in (*numbers, 64 * processes)))
    return list(zip(*columns, strict=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["sink"]:
        uvloop.run(sink(*sys.argv[2:]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 1,000 requests, not three of 4,000")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    given = parser.parse_args()
    results = uvloop.run(measure(quick=given.quick))
    print(f"written to {results.save(FOLDER)}", file=sys.stderr)
    print(report.page(tables(results), report.missing(results)))
    if given.write:
        report.between(PAGE, tables(results), command=COMMAND)
