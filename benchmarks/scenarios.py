"""The scenarios: each function runs one contestant once and returns its figures, or raises Spoiled.

Each scenario is repeated in rounds; in a round, its contestants take turns.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.load import Sent, Spec
from benchmarks.harness.processes import cpu_s, resident_mib
from benchmarks.harness.provider import LOOK_EVERY_S
from benchmarks.harness.results import quantile
from benchmarks.harness.stage import Spoiled, Stage

Figures = dict[str, float]
WARM = 0.2
"""The fraction of a drain's requests that is answered before the measurement begins."""
SLOTS = 50
FEW = 8
"""The number of slots in scenarios that measure how much of them is used."""
JOB_MS = 50
FILLING = 200
IDLE_S = 0.6
RESIDENT_WARM = 0.1


@dataclass(frozen=True, kw_only=True)
class Look:
    """The provider's calls and the workers' CPU time at one moment."""

    calls: int
    at_s: float
    cpu_s: float

    @classmethod
    def at(cls, stage: Stage, pids: Sequence[int]) -> "Look":
        return cls(calls=stage.call_log.calls, at_s=time.monotonic(), cpu_s=sum(map(cpu_s, pids)))

    def until(self, last: "Look") -> Figures:
        calls = last.calls - self.calls
        cpu_ms = 1000 * (last.cpu_s - self.cpu_s) / calls
        return {"per_s": calls / (last.at_s - self.at_s), "cpu_ms": cpu_ms, "per_core_s": 1000 / cpu_ms}


async def drain(stage: Stage, who: Contestant, *, requests: int) -> Figures:
    """Publish requests, then start the worker, and measure while it works on the last four fifths of them."""
    await stage.reset(who)
    await stage.send(who, Spec(do="publish", last=requests, at_once=FILLING))
    stage.call_log.held = True
    async with stage.workers(who, slots=SLOTS) as pids:
        stage.call_log.held = False
        await stage.called(int(WARM * requests))
        first = Look.at(stage, pids)
        await stage.called(requests)
        figures = first.until(Look.at(stage, pids))
        await stage.answered(who, requests)
    await stage.nothing_lost(who, requests)
    return figures


async def publish(stage: Stage, who: Contestant, *, requests: int) -> Figures:
    """Publish with confirms by the contestant's own client, fifty at once."""
    await stage.reset(who)
    spec = Spec(do="publish", first=requests // 10, last=requests, warm=requests // 10, at_once=50)
    sent = await stage.send(who, spec, client=True)
    if (ready := await stage.waiting(who)) != requests:
        raise Spoiled(f"{who.name}: {ready} of {requests} confirmed messages are in the queue")
    return {"per_s": sent.per_s}


async def rpc(stage: Stage, who: Contestant, *, alone: int, callers: int, idle: int) -> Figures:
    """Send requests by the contestant's own client and wait for the answers: one caller, then fifty callers, then
    single requests to an idle worker."""
    await stage.reset(who)
    at = 0

    def ask(count: int, *, warm: int, at_once: int = 1, pause_s: float = 0.0) -> Spec:
        nonlocal at
        at += warm + count
        return Spec(do="ask", first=at - count, last=at, warm=warm, at_once=at_once, pause_s=pause_s)

    async with stage.workers(who, slots=SLOTS):
        one = await stage.send(who, ask(alone, warm=30), client=True)
        many = await stage.send(who, ask(callers, warm=100, at_once=50), client=True)
        woken = await stage.send(who, ask(idle, warm=2, pause_s=IDLE_S), client=True)
        stage.check(who, at)
    return {
        "rpc_p50_ms": quantile(one.latencies_ms, 0.5),
        "callers_per_s": many.per_s,
        "idle_p50_ms": quantile(woken.latencies_ms, 0.5),
    }


async def flood(stage: Stage, who: Contestant, *, jobs: int, asks: int, every_s: float = 0.1) -> Figures:
    """Measure the wait of critical requests, from publishing to the start of the call. They are sent every 100 ms while
    batch jobs of 50 ms wait."""
    await stage.reset(who)
    await stage.send(who, Spec(do="publish", last=jobs, at_once=FILLING, call_ms=JOB_MS, lanes=("batch",)))
    async with stage.workers(who, slots=FEW):
        await stage.called(8 * FEW)
        spec = Spec(do="publish", first=jobs, last=jobs + asks, every_s=every_s, call_ms=JOB_MS, lanes=("critical",))
        sent = await stage.send(who, spec)
        figures = await _waits(stage, who, sent)
    await stage.nothing_lost(who, jobs + asks)
    return figures


async def _waits(stage: Stage, who: Contestant, sent: Sent) -> Figures:
    """The waits of requests, all of which must begin, and the used part of the `FEW` slots while they were sent."""
    call_log, since, until = stage.call_log, min(sent.began), max(sent.began)
    async with asyncio.timeout(30):
        while not all(call_log.began[number] for number in sent.numbers):
            await asyncio.sleep(LOOK_EVERY_S)
    now = time.monotonic()
    waits = [1000 * max(0.0, call_log.began[number] - at) for number, at in zip(sent.numbers, sent.began, strict=True)]
    busy = sum(
        max(0.0, min(call_log.ended[number] or now, until) - max(call_log.began[number], since))
        for number in range(call_log.most)
        if call_log.began[number]
    )
    if call_log.repeated:
        raise Spoiled(f"{who.name}: {call_log.repeated} called twice")
    return {
        "critical_p50_ms": quantile(waits, 0.5),
        "critical_p99_ms": quantile(waits, 0.99),
        "slots_used": 100 * busy / (FEW * (until - since)),
    }


async def memory(stage: Stage, who: Contestant, *, requests: int) -> Figures:
    """Measure resident memory: idle, with 200 requests in flight, and after a tenth and all of the requests of a long
    queue."""
    await stage.reset(who)
    async with stage.workers(who, slots=200) as (pid,):
        await asyncio.sleep(3)
        figures = {"idle_mib": resident_mib(pid)}
        await stage.send(who, Spec(do="publish", last=200, at_once=50, call_ms=3000))
        await stage.called(200)
        figures["in_flight_mib"] = resident_mib(pid)
        await stage.answered(who, 200)
    await stage.reset(who)
    await stage.send(who, Spec(do="publish", last=requests, at_once=FILLING))
    async with stage.workers(who, slots=SLOTS, ready=False) as (pid,):
        await stage.called(int(RESIDENT_WARM * requests))
        early = resident_mib(pid)
        await stage.called(requests, within_s=400)
        late = resident_mib(pid)
        await stage.answered(who, requests)
    return figures | {"growth_percent": 100 * (late / early - 1)}
