"""Measures what gathering does for a handler that takes many at once: latency against the number of calls.

    ./dev bench embeddings [--seconds 5] [--fixed-ms 80] [--each-ms 2] [--rates 20 100] [--bulk 1000]

Requests come at random times, so many in a second on average; then many at once, worked on in 64 slots. The endpoint
is stood in for by a wait: a call takes `fixed-ms`, and `each-ms` more for each text. Worker, client and endpoint share
this process; each row is one run.
"""

import argparse
import asyncio
import random
import time
from statistics import quantiles
from typing import Any

import uvloop

from benchmarks.harness.worker import worker
from lanekeeper import Client
from service.config.flows import HandlerSettings

COUNTS, WINDOWS_MS = (10, 20, 50), (10, 20, 50)
SLOTS = 64


class Endpoint:
    """`calls`: how many it was asked."""

    calls = 0
    fixed_s = each_s = 0.0

    async def answer(self, texts: int) -> None:
        self.calls += 1
        await asyncio.sleep(self.fixed_s + self.each_s * texts)


async def embed_one(asked: Any) -> Any:
    await endpoint.answer(1)
    return [0.0]


async def embed_many(asked: list[Any]) -> list[Any]:
    await endpoint.answer(len(asked))
    return [[0.0]] * len(asked)


endpoint = Endpoint()


async def one(client: Client, handler: str) -> float:
    """How long it took, in ms."""
    began_s = time.monotonic()
    await client.request({"text": "…"}, key="critical.bench.embed", handler=handler, timeout_s=600)
    return 1000 * (time.monotonic() - began_s)


async def asked(client: Client, handler: str, *, rate: int, seconds: float) -> list[float]:
    rng, tasks = random.Random(7), list[asyncio.Task[float]]()
    until_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until_s:
            tasks.append(group.create_task(one(client, handler)))
            await asyncio.sleep(rng.expovariate(rate))
    return [task.result() for task in tasks]


async def measure(options: argparse.Namespace) -> None:
    endpoint.fixed_s, endpoint.each_s = options.fixed_ms / 1000, options.each_ms / 1000
    handlers = {"alone": HandlerSettings(run=f"{__name__}:embed_one")} | {
        f"count-{count}-window-{window_ms}": HandlerSettings(
            run=f"{__name__}:embed_many", many=True, count=count, window_ms=window_ms
        )
        for count in COUNTS
        for window_ms in WINDOWS_MS
    }
    lanes = {"critical": {"slots": SLOTS, "slots_max": SLOTS}}
    nobody = "http://127.0.0.1:1"
    async with worker(nobody, namespace="bench-embeddings", handlers=handlers, lanes=lanes) as client:
        await asked(client, "alone", rate=50, seconds=1)
        for rate in options.rates:
            for name in handlers:
                endpoint.calls = 0
                took_ms = await asked(client, name, rate=rate, seconds=options.seconds)
                cuts = quantiles(took_ms, n=20)
                print(
                    f"{rate}/s {name}: {len(took_ms)} requests, {endpoint.calls} calls "
                    f"({len(took_ms) / endpoint.calls:.1f} each), p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f} ms"
                )
        for name in handlers:
            endpoint.calls, began_s = 0, time.monotonic()
            await asyncio.gather(*(one(client, name) for _ in range(options.bulk)))
            took_s = time.monotonic() - began_s
            each = options.bulk / endpoint.calls
            print(f"{options.bulk} at once {name}: {endpoint.calls} calls ({each:.1f} each), {took_s:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--fixed-ms", type=float, default=80)
    parser.add_argument("--each-ms", type=float, default=2)
    parser.add_argument("--rates", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--bulk", type=int, default=1000)
    uvloop.run(measure(parser.parse_args()))
