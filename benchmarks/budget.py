"""Compares how a small budget is spent by Lanekeeper, without a gate, by a semaphore and by LiteLLM's proxy.

    ./dev bench budget [--minutes 5] [--quick] [--only lanekeeper,semaphore]

All contestants get the same load at the same time. Each has its own simulated provider, which enforces 60 requests and
40,000 input tokens a minute. 500 batch jobs wait, and a critical request comes every two seconds. A wait is the time
until the answer, without the provider's own time; for a request without an answer, the time that it has waited at the
end. "Used" is a part of what could be used: what the provider's buckets held at the beginning, plus the refill.
Contestants without a queue of their own have as many slots for each lane as Lanekeeper, so that no critical request
waits behind batch jobs; all but Lanekeeper repeat a refused call after its `retry-after`.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import uvloop

from benchmarks import litellm
from benchmarks.harness import report
from benchmarks.harness.contestants import lanekeeper
from benchmarks.harness.load import Spec, send
from benchmarks.harness.processes import simulated
from benchmarks.harness.requesters import HEADERS, Noted, Own
from benchmarks.harness.results import Results, quantile
from benchmarks.harness.stage import Stage, stage
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES

REQUESTS, INPUT_TOKENS, BURST_S, LATENCY_S = 60, 40_000, 10, 1.0
JOBS = 500
EVERY_S = 2.0
SIZES = tuple(4 * tokens for tokens in random.Random(1).choices(range(400, 901), k=JOBS))
"""In bytes; the simulated API counts four to a token. Requests and tokens run out at about the same time."""
AT_ONCE = 8
AGAIN_S = 1.0
COLUMNS = {
    "critical wait: p50, s": ("budget", "p50_s"),
    "p99, s": ("budget", "p99_s"),
    "critical answered": ("budget", "critical"),
    "asked": ("budget", "asked"),
    "batch answered": ("budget", "batch"),
    "429s": ("budget", "refused"),
    "requests used, %": ("budget", "requests_used"),
    "input used, %": ("budget", "input_used"),
    "calls for each answer": ("budget", "calls"),
}
Asking = Callable[[str], AbstractAsyncContextManager[Any]]
"""Gets the provider's URL; yields a requester."""


class Rival:
    """Calls over HTTP, and repeats a call that was refused. `slots`: how many requests of a lane run at a time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        slots: Mapping[str, asyncio.Semaphore],
        priorities: Mapping[str, int] | None = None,
    ) -> None:
        self._session, self._url, self._slots, self._priorities = session, url, slots, priorities

    async def ask(self, body: bytes, *, lane: str, **_: object) -> None:
        if self._priorities:
            body = json.dumps({**json.loads(body), "priority": self._priorities[lane]}).encode()
        async with self._slots[lane]:
            while (again_s := await self._refused(body)) is not None:
                await asyncio.sleep(again_s)

    async def _refused(self, body: bytes) -> float | None:
        """Make the call. Returns the seconds until the next try; None if it was answered."""
        async with self._session.post(self._url, data=body) as response:
            await response.read()
            return None if response.status == 200 else float(response.headers.get("retry-after", AGAIN_S))


def _slots() -> dict[str, asyncio.Semaphore]:
    return {lane.name: asyncio.Semaphore(lane.slots) for lane in DEFAULT_LANES}


@asynccontextmanager
async def _session(**headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={**HEADERS, **headers},
    ) as session:
        yield session


def contestants(on: Stage) -> dict[str, Asking]:
    @asynccontextmanager
    async def ours(base_url: str) -> AsyncIterator[Own]:
        who = lanekeeper()
        await on.reset(who)
        async with on.workers(who, slots=0, base_url=base_url), Own(on.environment(who)) as own:
            yield own

    @asynccontextmanager
    async def direct(base_url: str, *, slots: Mapping[str, asyncio.Semaphore]) -> AsyncIterator[Rival]:
        async with _session() as session:
            yield Rival(session, f"{base_url}/v1/messages", slots)

    def proxy(further: str) -> Asking:
        @asynccontextmanager
        async def made(base_url: str) -> AsyncIterator[Rival]:
            settings = litellm.LIMITED.format(requests=REQUESTS, input_tokens=INPUT_TOKENS) + further
            async with (
                litellm.proxy(on.folder, base_url, settings) as (url, headers, _),
                _session(**headers) as session,
            ):
                yield Rival(session, f"{url}/v1/chat/completions", _slots(), litellm.PRIORITIES)

        return made

    return {
        "lanekeeper": ours,
        "nogate": partial(direct, slots=_slots()),
        "semaphore": partial(direct, slots=dict.fromkeys(_slots(), asyncio.Semaphore(AT_ONCE))),
        "litellm": proxy(""),
        "litellm-strict": proxy(litellm.STRICT),
    }


async def spend(on: Stage, asking: Asking, *, seconds: float) -> dict[str, float]:
    limits = ("--requests-per-minute", str(REQUESTS), "--input-tokens-per-minute", str(INPUT_TOKENS))
    speed = ("--burst", f"{BURST_S}s", "--latency", f"{LATENCY_S:g}s", "--output-tokens", "200")
    async with simulated(on.folder, *limits, *speed) as (base_url, _), asking(base_url) as requester:
        noted, began_s = Noted(requester), time.monotonic()
        jobs = Spec(do="ask", last=JOBS, at_once=JOBS, lanes=(BATCH.name,), sizes=SIZES)
        last = JOBS + int((seconds - EVERY_S) / EVERY_S)
        critical = Spec(do="ask", first=JOBS, last=last, every_s=EVERY_S, lanes=(CRITICAL.name,), sizes=SIZES)
        tasks = [asyncio.create_task(send(noted, jobs))]
        await asyncio.sleep(EVERY_S)  # all batch jobs are waiting by then
        tasks.append(asyncio.create_task(send(noted, critical)))
        await asyncio.sleep(began_s + seconds - time.monotonic())
        end_s, answered = time.monotonic(), dict(noted.answered)
        async with _session() as session, session.get(f"{base_url}/simulated/stats") as response:
            stats = await response.json()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if noted.failed:
        print(f"{len(noted.failed)} requests failed: {noted.failed[0]}")
    asked = {number: at_s for number, at_s in noted.asked.items() if number >= JOBS}
    waits = [max(0.0, answered.get(number, end_s) - at_s - LATENCY_S) for number, at_s in asked.items()]
    settled, running = sum(stats["models"].values()), stats["running"]
    input_tokens = stats["input_tokens"] * (1 + running / max(1, settled))  # of running calls: as of the others
    minutes = (seconds + BURST_S) / 60
    return {
        "p50_s": quantile(waits, 0.5),
        "p99_s": quantile(waits, 0.99),
        "critical": len(answered.keys() & asked.keys()),
        "asked": len(asked),
        "batch": len(answered.keys() - asked.keys()),
        "refused": stats["outcomes"].get("rate_limited", 0),
        "requests_used": 100 * (settled + running) / REQUESTS / minutes,
        "input_used": 100 * input_tokens / INPUT_TOKENS / minutes,
        "calls": (stats["calls"] - running) / max(1, len(answered)),
    }


async def main(seconds: float, only: list[str]) -> None:
    found = Results.none_yet(())
    async with stage() as on:
        found.versions["RabbitMQ"] = on.version
        runs: list[Awaitable[None]] = []
        for name, asking in contestants(on).items():
            if name not in only and only:
                continue
            if name.startswith("litellm") and not litellm.PROGRAM.exists():
                found.left_out.append(litellm.WHY_NOT)
                continue
            runs.append(found.add("budget", name, 0, spend(on, asking, seconds=seconds)))
        await asyncio.gather(*runs)
        names = list(contestants(on))
    print(report.page(report.side_by_side(found, names, COLUMNS), report.missing(found)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--only", default="", help="names of contestants, separated by commas")
    options = parser.parse_args()
    uvloop.run(main(30 if options.quick else 60 * options.minutes, [name for name in options.only.split(",") if name]))
