"""The scenarios: each function runs one contestant once and returns its figures, or raises Spoiled.

Each scenario is repeated in rounds; in a round, its contestants take turns.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suite.contestants import Contestant
from suite.medians import quantile
from suite.processes import cpu_s, resident_mib
from suite.requester import Sent, Spec
from suite.stage import LOOK_EVERY_S, Spoiled, Stage

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


async def drain(
    stage: Stage,
    who: Contestant,
    *,
    requests: int,
    processes: int = 1,
    size: int = 1024,
    tenants: int = 1,
    queued: int | None = None,
) -> Figures:
    """Publish `queued` requests, then start the workers, and measure while they work on the first `requests` of
    them."""
    queued = queued or requests
    await stage.reset(who)
    await stage.send(who, Spec(do="publish", last=queued, at_once=min(FILLING, queued), size=size, tenants=tenants))
    stage.call_log.held = True
    async with stage.workers(who, slots=SLOTS, processes=processes) as pids:
        stage.call_log.held = False
        await stage.called(int(WARM * requests))
        first = Look.at(stage, pids)
        await stage.called(requests)
        figures = first.until(Look.at(stage, pids))
        if queued == requests:
            await stage.answered(who, requests)
    await stage.nothing_lost(who, queued)
    return figures


async def publish(stage: Stage, who: Contestant, *, requests: int) -> Figures:
    """Publish with confirms by the contestant's own client, fifty at once."""
    await stage.reset(who)
    spec = Spec(do="publish", first=requests // 10, last=requests, warm=requests // 10, at_once=50)
    sent = await stage.send(who, spec, client=True)
    if (ready := await stage.waiting(who)) != requests:
        raise Spoiled(f"{who.name}: {ready} of {requests} confirmed messages are in the queue")
    count = len(sent.numbers)
    return {"per_s": count / sent.took_s, "cpu_ms": 1000 * sent.cpu_s / count}


async def rpc(stage: Stage, who: Contestant, *, alone: int, callers: int, idle: int) -> Figures:
    """Send requests by the contestant's own client and wait for the answers: one caller, then fifty callers, then
    single requests to an idle worker."""
    await stage.reset(who)
    at, figures = 0, {}

    def ask(count: int, *, warm: int, at_once: int = 1, pause_s: float = 0.0) -> Spec:
        nonlocal at
        at += warm + count
        return Spec(do="ask", first=at - count, last=at, warm=warm, at_once=at_once, pause_s=pause_s)

    async with stage.workers(who, slots=SLOTS) as pids:
        one = _ms(await stage.send(who, ask(alone, warm=30), client=True))
        figures |= {"rpc_p50_ms": quantile(one, 0.5), "rpc_p99_ms": quantile(one, 0.99)}
        first = Look.at(stage, pids)
        many = await stage.send(who, ask(callers, warm=100, at_once=50), client=True)
        figures |= {"callers_per_s": len(many.numbers) / many.took_s, "callers_p50_ms": quantile(_ms(many), 0.5)}
        figures["callers_cpu_ms"] = first.until(Look.at(stage, pids))["cpu_ms"]
        woken = await stage.send(who, ask(idle, warm=2, pause_s=IDLE_S), client=True)
        figures["idle_p50_ms"] = quantile(_ms(woken), 0.5)
        stage.check(who, at)
    return figures


async def few_callers(stage: Stage, who: Contestant, *, requests: int) -> Figures:
    """Ten callers send requests, so that ten requests wait or run at any time."""
    await stage.reset(who)
    async with stage.workers(who, slots=SLOTS) as pids:
        warm = requests // 5
        await stage.send(who, Spec(do="ask", last=warm, at_once=10), client=True)
        first = Look.at(stage, pids)
        await stage.send(who, Spec(do="ask", first=warm, last=warm + requests, at_once=10), client=True)
        figures = first.until(Look.at(stage, pids))
        stage.check(who, warm + requests)
    return figures


async def first_part(stage: Stage, who: Contestant, *, requests: int) -> Figures:
    """Measure the time from publishing to the first part of a streamed answer, with ten streams at a time."""
    await stage.reset(who)
    async with stage.workers(who, slots=SLOTS) as pids:
        await stage.send(who, Spec(do="first_part", last=20, at_once=10), client=True)
        first = Look.at(stage, pids)
        spec = Spec(do="first_part", first=20, last=20 + requests, at_once=10)
        waits = _ms(await stage.send(who, spec, client=True))
        cpu = first.until(Look.at(stage, pids))["cpu_ms"]
        stage.check(who, 20 + requests)
    return {"first_part_p50_ms": quantile(waits, 0.5), "first_part_p99_ms": quantile(waits, 0.99), "stream_cpu_ms": cpu}


async def flood(stage: Stage, who: Contestant, *, jobs: int, asks: int, every_s: float = 0.1) -> Figures:
    """Measure the wait of critical requests, from publishing to the start of the call. They are sent every 100 ms while
    batch jobs of 50 ms wait."""
    await stage.reset(who)
    await stage.send(who, Spec(do="publish", last=jobs, at_once=FILLING, call_ms=JOB_MS, lanes=("batch",)))
    async with stage.workers(who, slots=FEW):
        await stage.called(8 * FEW)
        spec = Spec(do="publish", first=jobs, last=jobs + asks, every_s=every_s, call_ms=JOB_MS, lanes=("critical",))
        sent = await stage.send(who, spec)
        figures = await _waits(stage, who, sent, {"critical": sent.numbers})
    await stage.nothing_lost(who, jobs + asks)
    return figures


async def mixed(stage: Stage, who: Contestant, *, seconds: float) -> Figures:
    """Send ten times as many requests as eight slots can answer: 400 a second, with calls of 200 ms. Of 40 requests 1
    is critical, 5 are normal, the others are batch jobs."""
    call_ms, count = 200, int(seconds * 400)
    lanes = ("critical", *(6 * ("batch",) + ("normal",)) * 5, *4 * ("batch",))
    await stage.reset(who)
    async with stage.workers(who, slots=FEW):
        spec = Spec(do="publish", last=count, every_s=seconds / count, call_ms=call_ms, lanes=lanes)
        sent = await stage.send(who, spec)
        by_lane = {
            lane: [number for number in sent.numbers if lanes[number % len(lanes)] == lane]
            for lane in ("critical", "normal")
        }
        # the last requests would begin only after the measurement
        figures = await _waits(
            stage, who, sent, {lane: sorted(each)[: int(0.9 * len(each))] for lane, each in by_lane.items()}
        )
    await stage.nothing_lost(who, count)
    return figures


async def _waits(stage: Stage, who: Contestant, sent: Sent, lanes: Mapping[str, Sequence[int]]) -> Figures:
    """The waits of critical and normal requests, and the used part of the `FEW` slots while requests were sent. All
    critical requests must begin; for a normal request that has not begun, its wait so far counts."""
    call_log, since, until = stage.call_log, min(sent.began), max(sent.began)
    async with asyncio.timeout(30):
        while not all(call_log.began[number] for number in lanes["critical"]):
            await asyncio.sleep(LOOK_EVERY_S)
    asked, now, figures = dict(zip(sent.numbers, sent.began, strict=True)), time.monotonic(), {}
    for lane, numbers in lanes.items():
        waits = [1000 * max(0.0, (call_log.began[number] or now) - asked[number]) for number in numbers]
        figures |= {f"{lane}_p50_ms": quantile(waits, 0.5), f"{lane}_p99_ms": quantile(waits, 0.99)}
    busy = sum(
        max(0.0, min(call_log.ended[number] or now, until) - max(call_log.began[number], since))
        for number in range(stage.call_log.most)
        if call_log.began[number]
    )
    if call_log.repeated:
        raise Spoiled(f"{who.name}: {call_log.repeated} called twice")
    figures["slots_used"] = 100 * busy / (FEW * (until - since))
    return figures


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
        early, first = resident_mib(pid), Look.at(stage, [pid])
        await stage.called(requests // 5)
        deep = first.until(Look.at(stage, [pid]))
        await stage.called(requests, within_s=400)
        late = resident_mib(pid)
        await stage.answered(who, requests)
    return figures | {
        "after_mib": late,
        "growth_percent": 100 * (late / early - 1),
        "deep_cpu_ms": deep["cpu_ms"],
        "deep_per_s": deep["per_s"],
    }


def _ms(sent: Sent) -> list[float]:
    return [1000 * each for each in sent.latencies_s]
