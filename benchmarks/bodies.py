"""The memory of a gateway and of a worker while large bodies are under way, all sent at once.

`lanekeeper gateway`, `lanekeeper serve` and the simulated API are processes of their own; the store of
bodies is a folder.

    .venv/bin/python benchmarks/bodies.py [--bodies 50] [--mebibytes 20] [--slots 8]
"""

import argparse
import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import gateway as beside
import ground
import psutil

MIB = 1024 * 1024
HEADERS = {"x-api-key": "benchmark", "content-type": "application/json"}


def body(mebibytes: int) -> bytes:
    """A request with that many images of a mebibyte."""
    data = base64.b64encode(os.urandom(MIB * 3 // 4)).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    said = [{"role": "user", "content": [*[image] * mebibytes, {"type": "text", "text": "What is this?"}]}]
    return json.dumps({"model": "claude-haiku-5-5", "max_tokens": 100, "messages": said}).encode()


@asynccontextmanager
async def started(*command: str, ready: str, environ: dict[str, str]) -> AsyncIterator[tuple[dict, psutil.Process]]:
    """A command of `lanekeeper`: the log event that says that it is ready, and its process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli.main", *command, env=environ, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        while True:
            line = await process.stderr.readline()
            assert line, f"lanekeeper {command[0]} has ended"
            if b"%b" % ready.encode() in line:
                break
        reading = asyncio.create_task(beside._passed_over(process.stderr))
        yield json.loads(line), psutil.Process(process.pid)
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def peaks(processes: dict[str, psutil.Process], found: dict[str, float]) -> None:
    while True:
        for name, each in processes.items():
            found[name] = max(found.get(name, 0), each.memory_info().rss / MIB)
        await asyncio.sleep(0.02)


async def main(bodies: int, mebibytes: int, slots: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        kept = {name: each for name, each in os.environ.items() if not name.startswith(("LANEKEEPER_", "ANTHROPIC_"))}
        async with ground.broker() as url, beside.provider() as provider:
            environ = {
                **kept,
                "TMPDIR": folder,
                "LANEKEEPER_AMQP_URL": url,
                "LANEKEEPER_STORE_URL": f"sqlite:///{folder}/store.sqlite",
                "LANEKEEPER_LANES__CRITICAL__SLOTS": str(slots),
                "LANEKEEPER_LOG_FORMAT": "json",
                "LANEKEEPER_GATEWAY__PORT": "0",
                "ANTHROPIC_BASE_URL": provider,
                "ANTHROPIC_API_KEY": "benchmark",
                **{f"LANEKEEPER_BUDGET__{name}": each for name, each in beside.PLENTY.items()},
            }
            async with (
                started("serve", "--port", "0", ready="service.ready", environ=environ) as (_, worker),
                started("gateway", "--port", "0", ready="gateway.ready", environ=environ) as (told, gate),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            ):
                processes, found = {"gateway": gate, "worker": worker}, {}
                await call(session, told["url"], beside.body(stream=False))
                idle = {name: each.memory_info().rss / MIB for name, each in processes.items()}
                cpu = {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}
                said = body(mebibytes)
                watching = asyncio.create_task(peaks(processes, found))
                began_s = time.monotonic()
                await asyncio.gather(*(call(session, told["url"], said) for _ in range(bodies)))
                took_s = time.monotonic() - began_s
                watching.cancel()
                print(f"{bodies} bodies of {len(said) / MIB:.1f} MiB at once, {slots} slots: {took_s:.1f} s")
                for name, each in processes.items():
                    used = 1000 * (sum(each.cpu_times()[:2]) - cpu[name]) / bodies
                    print(
                        f"{name}: {idle[name]:.0f} MiB idle, {found[name]:.0f} MiB at most, {used:.0f} ms of CPU a body"
                    )


async def call(session: aiohttp.ClientSession, url: str, said: bytes) -> None:
    async with session.post(f"{url}/v1/messages", data=said, headers=HEADERS) as got:
        assert got.status == 200, await got.text()
        await got.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=50)
    parser.add_argument("--mebibytes", type=int, default=20)
    parser.add_argument("--slots", type=int, default=8)
    given = parser.parse_args()
    asyncio.run(main(given.bodies, given.mebibytes, given.slots))
