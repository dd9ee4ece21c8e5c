"""Whether a worker's memory stays flat: resident size of `lanekeeper consume` over 50,000 requests.

    .venv/bin/python benchmarks/memory.py [--requests 50000] [--at-once 50]

Aim: within 10 % from the first tenth to the end, and under 150 MB.
"""

import argparse
import asyncio
import json
import os
import sys

import ground
import psutil
import uvloop

from lanekeeper import Client
from service.worker.assembly import assemble

LOOKS = 20
PROMPT = "Tell me what a lane is. " * 40  # about 1 KB


async def main(requests: int, at_once: int) -> None:
    async with ground.broker() as url, ground.provider() as base_url:
        async with assemble(ground.settings(url, base_url), declares=True) as parts:
            version, names = parts.version, parts.names
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "service.cli.main", "consume", "--port", "0"),
            env={
                **os.environ,
                "LANEKEEPER_AMQP_URL": url,
                "ANTHROPIC_API_KEY": "benchmark",
                "ANTHROPIC_BASE_URL": base_url,
                "LANEKEEPER_LOG_LEVEL": "warning",
            },
        )
        try:
            async with Client(url, names=names) as client:
                await client.request({"prompt": "are you there?"}, key="critical.benchmark.memory")
                sizes = await _sizes(client, psutil.Process(worker.pid), requests, at_once)
        finally:
            worker.terminate()
            await worker.wait()
    after_warming, last = sizes[max(1, LOOKS // 10)], sizes[-1]
    print(f"RabbitMQ {version}: resident MB of a worker after each {requests // LOOKS} of {requests} requests")
    print("  " + " ".join(f"{size:.1f}" for size in sizes))
    print(f"  from a tenth to the end: {100 * (last / after_warming - 1):+.1f} %; most {max(sizes):.1f} MB")


async def _sizes(client: Client, process: psutil.Process, requests: int, at_once: int) -> list[float]:
    body = json.dumps({"max_tokens": 100, "messages": [{"role": "user", "content": PROMPT}]}).encode()
    sizes = [_resident_mb(process)]
    for _ in range(LOOKS):
        left = iter(range(requests // LOOKS))

        async def ask(left: "iter[int]" = left) -> None:  # type: ignore[valid-type]
            for _ in left:
                await client.request(body, key="critical.benchmark.memory")

        await asyncio.gather(*(ask() for _ in range(at_once)))
        sizes.append(_resident_mb(process))
    return sizes


def _resident_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--at-once", type=int, default=50)
    options = parser.parse_args()
    uvloop.run(main(options.requests, options.at_once))
