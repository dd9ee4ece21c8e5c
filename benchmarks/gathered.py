"""Measures what gathering does for requests for embeddings: calls of the provider, latency, and CPU time of the worker.

    ./dev bench gathered [--requests 1000] [--rate 200] [--count 32] [--windows-ms 20 45] [--rounds 5]

`lanekeeper serve` and the simulated provider (`--latency-ms` for each call) have processes of their own. Requests of 20
tokens come over AMQP at random times, so many in a second on average, first to a lane that gathers none, then to one
for each window, in turns; all lanes are one worker's, and have the same slots.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import uvloop

from benchmarks.harness.processes import broker, clean_environ, cpu_s, process, simulated
from lanekeeper import Client
from lanekeeper.contract.names import OPENAI_EMBEDDINGS, Names
from tests.support.private_broker import free_ports

NAMESPACE = "bench-gathered"
MODEL = "text-embedding-3-small"
TEXT = "The rivers of the country flow through many lakes, and into three seas; the longest "
DIMENSIONS = 256
"""Fewer than usual, so that the simulated provider's CPU time does not count."""
SLOTS = 128
WARM = 200


class Round(NamedTuple):
    """The figures of one lane's turn."""

    calls: int
    p50_ms: float
    p95_ms: float
    per_s: float
    cpu_ms: float


def environment(
    options: argparse.Namespace, *, amqp_url: str, base_url: str, folder: Path, port: int
) -> dict[str, str]:
    windows_ms = {"ALONE": 0, **{f"W{each}": each for each in options.windows_ms}}
    lanes: dict[str, Any] = {"CRITICAL__ENABLED": "false", "NORMAL__ENABLED": "false", "BATCH__ENABLED": "false"}
    for rank, (name, window_ms) in enumerate(windows_ms.items()):
        lanes |= {
            f"{name}__RANK": rank + 10,
            f"{name}__SLOTS": SLOTS,
            f"{name}__SLOTS_MAX": SLOTS,
            f"{name}__SIDE_QUEUES": 0,  # one tenant has no other to be fair to
            f"{name}__GATHER_EMBEDDINGS": options.count if window_ms else 1,
            f"{name}__GATHER_WINDOW_S": window_ms / 1000 or 0.045,
        }
    return clean_environ(
        LANEKEEPER_AMQP_URL=amqp_url,
        LANEKEEPER_NAMESPACE=NAMESPACE,
        LANEKEEPER_STORE_URL=f"sqlite:///{folder}/store.sqlite",
        LANEKEEPER_LOG_LEVEL="warning",
        LANEKEEPER_GATEWAY__PORT=str(port),
        LANEKEEPER_PROVIDERS__OPENAI__KIND="openai",
        LANEKEEPER_PROVIDERS__OPENAI__BASE_URL=f"{base_url}/v1",
        LANEKEEPER_PROVIDERS__OPENAI__API_KEY="benchmark",
        LANEKEEPER_PROVIDERS__OPENAI__REQUESTS_PER_MIN="1000000",
        LANEKEEPER_PROVIDERS__OPENAI__INPUT_TOKENS_PER_MIN="1000000000",
        LANEKEEPER_PROVIDERS__OPENAI__OUTPUT_TOKENS_PER_MIN="1000000000",
        **{f"LANEKEEPER_LANES__{name}": str(value) for name, value in lanes.items()},
    )


def calls_of(base_url: str) -> int:
    with urllib.request.urlopen(f"{base_url}/simulated/stats") as answer:
        return int(json.loads(answer.read())["calls"])


async def one(client: Client, lane: str, number: int) -> float:
    """How long it took, in ms."""
    asked = {"model": MODEL, "input": f"{TEXT}{number}", "encoding_format": "base64", "dimensions": DIMENSIONS}
    began_s = time.monotonic()
    await client.request(asked, key=f"{lane}.bench.embed", dialect=OPENAI_EMBEDDINGS, timeout_s=120)
    return 1000 * (time.monotonic() - began_s)


async def asked(client: Client, lane: str, *, requests: int, rate: float, seed: int) -> list[float]:
    rng, tasks, next_s = random.Random(seed), list[asyncio.Task[float]](), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            tasks.append(group.create_task(one(client, lane, number)))
            next_s += rng.expovariate(rate)
    return [task.result() for task in tasks]


async def measure(options: argparse.Namespace) -> None:
    (port,), lanes = free_ports(1), ["alone", *(f"w{each}" for each in options.windows_ms)]
    rounds = defaultdict[str, list[Round]](list)
    with tempfile.TemporaryDirectory() as name:
        folder, latency = Path(name), f"{options.latency_ms}ms"
        async with broker() as amqp_url, simulated(folder, "--latency", latency) as (base_url, _):
            environ = environment(options, amqp_url=amqp_url, base_url=base_url, folder=folder, port=port)
            command = (sys.executable, "-m", "service.cli.main", "serve")
            async with (
                process(command, environ=environ, log=folder / "worker", port=port) as worker,
                Client(amqp_url, names=Names(NAMESPACE)) as client,
            ):
                for lane in lanes:
                    await asked(client, lane, requests=WARM, rate=options.rate / 2, seed=0)
                for nth in range(options.rounds):
                    for lane in lanes if nth % 2 == 0 else lanes[::-1]:
                        calls, used_s, began_s = calls_of(base_url), cpu_s(worker), time.monotonic()
                        took_ms = await asked(client, lane, requests=options.requests, rate=options.rate, seed=nth)
                        per_s = options.requests / (time.monotonic() - began_s)
                        cuts, cpu_ms = quantiles(took_ms, n=20), 1000 * (cpu_s(worker) - used_s) / options.requests
                        rounds[lane].append(Round(calls_of(base_url) - calls, cuts[9], cuts[18], per_s, cpu_ms))
                        show(f"round {nth + 1}, {lane}", rounds[lane][-1:])
    for lane in lanes:
        show(lane, rounds[lane])
    for lane in lanes[1:]:
        later_ms = [round.p50_ms - alone.p50_ms for round, alone in zip(rounds[lane], rounds["alone"], strict=True)]
        share = median(round.calls for round in rounds[lane]) / options.requests
        print(f"{lane}: {share:.2f} of the calls, p50 {median(later_ms):+.0f} ms (by rounds)")


def show(what: str, rounds: list[Round]) -> None:
    found = Round(*(median(each) for each in zip(*rounds, strict=True)))
    print(
        f"{what}: {found.calls:.0f} calls, p50 {found.p50_ms:.0f} ms, p95 {found.p95_ms:.0f} ms, "
        f"{found.per_s:.0f}/s answered, {found.cpu_ms:.2f} ms of CPU each",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--windows-ms", type=int, nargs="+", default=[20, 45])
    parser.add_argument("--latency-ms", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    uvloop.run(measure(parser.parse_args()))
