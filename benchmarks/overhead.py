"""What a request costs beside the call itself: the same SDK call with Lanekeeper around it, and without.

One process holds requester and worker; a simulated provider that answers at once is another one, over loopback HTTP.
They are measured in turns in one run, and the ratio is what counts (machines are noisy). CPU is this process's alone.
`messages.create`, as most people call the SDK (its default transport, the answer parsed), is measured beside them.

    .venv/bin/python benchmarks/overhead.py [--rounds 5] [--requests 2000] [--at-once 50]
"""

import argparse
import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import ground
import uvloop
from anthropic import AsyncAnthropic

from lanekeeper import Client
from service.worker import heap
from service.worker import running as worker
from service.worker.assembly import assemble
from topology.codec.request import Request

PROMPT = "Tell me what a lane is. " * 40  # about 1 KB


@dataclass(frozen=True)
class Round:
    """What one round of requests came to."""

    per_s: float
    cpu_ms: float


async def measured(count: int, at_once: int, one: Callable[[], Awaitable[object]]) -> Round:
    """Run `one` `count` times, `at_once` at a time."""
    left = iter(range(count))

    async def runner() -> None:
        for _ in left:
            await one()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(runner() for _ in range(at_once)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Round(count / wall, 1000 * cpu / count)


async def main(rounds: int, requests: int, at_once: int) -> None:
    async with ground.broker() as url, ground.provider() as base_url:
        settings = ground.settings(url, base_url, lanes={"critical": {"slots": at_once}})
        provider = ground.adapter(base_url)
        stop = asyncio.Event()
        async with assemble(settings, declares=True) as parts, Client(url, names=parts.names) as client:
            heap.settle()
            working = asyncio.create_task(worker.run(parts, stop=stop, grace_s=5))
            body = json.dumps(
                {"model": "claude-haiku-5-5", "max_tokens": 100, "messages": [{"role": "user", "content": PROMPT}]}
            ).encode()

            async def alone() -> None:
                await provider.stream(_request(body), timeout_s=30, parts=None)

            sdk = AsyncAnthropic(api_key="benchmark", base_url=base_url, max_retries=0)

            async def usual() -> None:
                await sdk.messages.create(
                    model="claude-haiku-5-5", max_tokens=100, messages=[{"role": "user", "content": PROMPT}]
                )

            async def whole() -> None:
                await client.request(body, key="critical.benchmark.overhead")

            await measured(requests // 4, at_once, alone)
            await measured(requests // 4, at_once, usual)
            await measured(requests // 4, at_once, whole)
            without, within, usually = [], [], []
            for _ in range(rounds):
                without.append(await measured(requests, at_once, alone))
                usually.append(await measured(requests // 2, at_once, usual))
                within.append(await measured(requests, at_once, whole))
            stop.set()
            await working
        await provider.aclose()
        await sdk.close()
    call, plain, all_of_it = (statistics.median(each.cpu_ms for each in of) for of in (without, usually, within))
    print(
        f"RabbitMQ {parts.topology.broker_version}, {rounds} rounds of {requests} requests, {at_once} at once; medians"
    )
    ours = all_of_it - call
    print(f"  the same SDK call alone    {_rate(without)} requests/s   {call:.3f} CPU-ms each")
    print(f"  messages.create, as usual  {_rate(usually)} requests/s   {plain:.3f} CPU-ms each")
    print(f"  through Lanekeeper         {_rate(within)} requests/s   {all_of_it:.3f} CPU-ms each, all in")
    shares = f"{ours / call:.2f} of that call, {ours / plain:.2f} of the usual"
    print(f"  our part                   {ours:.3f} CPU-ms: {shares}")


def _rate(rounds: list[Round]) -> str:
    return f"{statistics.median(each.per_s for each in rounds):6.0f}"


def _request(body: bytes) -> Request:
    return Request(
        id=uuid.uuid4().hex,
        lane="critical",
        app="benchmark",
        body=body,
        model="claude-haiku-5-5",
        max_tokens=100,
        stream=False,
        beta=None,
        sent_ms=0,
        sent_by="sender",
        due_ms=None,
        deadline_ms=0,
        attempts=0,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=50)
    options = parser.parse_args()
    uvloop.run(main(options.rounds, options.requests, options.at_once))
