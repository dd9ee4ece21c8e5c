"""Measures the memory and CPU of a gateway and of a worker while many large bodies are sent at once. With `--answers`:
while many large answers are requested at once, and then while one stored answer is fetched as many times at once.

`lanekeeper gateway`, `lanekeeper serve` and the simulated API each run in their own process; the store of bodies is a
folder.

    .venv/bin/python benchmarks/bodies.py [--answers] [--bodies 50] [--mebibytes 20] [--slots 8]
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
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import gateway as gateway_bench
import ground
import psutil

MIB = 1024 * 1024
HEADERS = {"x-api-key": "benchmark", "content-type": "application/json"}


def body(mebibytes: int) -> bytes:
    """The body of a request with `mebibytes` images of 1 MiB each."""
    data = base64.b64encode(os.urandom(MIB * 3 // 4)).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages = [{"role": "user", "content": [*[image] * mebibytes, {"type": "text", "text": "What is this?"}]}]
    return json.dumps({"model": "claude-haiku-5-5", "max_tokens": 100, "messages": messages}).encode()


def body_for_answer(mebibytes: int) -> bytes:
    """The body of a request to which the simulated API answers with `mebibytes` MiB."""
    tokens = mebibytes * MIB // 4
    messages = [{"role": "user", "content": f"Write. [[tokens: {tokens}]]"}]
    return json.dumps({"model": "claude-haiku-5-5", "max_tokens": tokens, "messages": messages}).encode()


@asynccontextmanager
async def started(*command: str, ready: str, environ: dict[str, str]) -> AsyncIterator[tuple[dict, psutil.Process]]:
    """Runs a command of `lanekeeper`; yields the log event `ready` and the process, as soon as the event is logged."""
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
        reading = asyncio.create_task(gateway_bench.discard(process.stderr))
        yield json.loads(line), psutil.Process(process.pid)
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def peaks(processes: dict[str, psutil.Process], found: dict[str, float]) -> None:
    """Until cancelled, keep in `found` each process's peak of resident memory in MiB."""
    while True:
        for name, each in processes.items():
            found[name] = max(found.get(name, 0), each.memory_info().rss / MIB)
        await asyncio.sleep(0.02)


async def main(bodies: int, mebibytes: int, slots: int, *, answers: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        kept = {name: each for name, each in os.environ.items() if not name.startswith(("LANEKEEPER_", "ANTHROPIC_"))}
        async with ground.broker() as url, gateway_bench.provider() as provider:
            environ = {
                **kept,
                "TMPDIR": folder,
                "LANEKEEPER_AMQP_URL": url,
                "LANEKEEPER_STORE_URL": f"sqlite:///{folder}/store.sqlite",
                "LANEKEEPER_LANES__CRITICAL__SLOTS": str(slots),
                "LANEKEEPER_LOG_FORMAT": "json",
                "LANEKEEPER_GATEWAY__PORT": "0",
                "ANTHROPIC_BASE_URL": provider.url,
                "ANTHROPIC_API_KEY": "benchmark",
                **{f"LANEKEEPER_BUDGET__{name}": each for name, each in gateway_bench.PLENTY.items()},
            }
            async with (
                started("serve", "--port", "0", ready="service.ready", environ=environ) as (_, worker),
                started("gateway", "--port", "0", ready="gateway.ready", environ=environ) as (event, gateway),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            ):
                processes, found = {"gateway": gateway, "worker": worker}, {}
                url = event["url"]
                await call(session, url, body(0))
                idle = {name: each.memory_info().rss / MIB for name, each in processes.items()}
                sent = body_for_answer(mebibytes) if answers else body(mebibytes)
                rounds = {f"{mebibytes} MiB, {slots} slots": lambda: call(session, url, sent)}
                if answers:
                    await call(session, url, sent, idempotency_key="one")
                    rounds["of one that is stored"] = lambda: read(session.get(f"{url}/v1/requests/one"))
                for what, one in rounds.items():
                    found.clear()
                    cpu = {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}
                    watching = asyncio.create_task(peaks(processes, found))
                    began_s = time.monotonic()
                    await asyncio.gather(*(one() for _ in range(bodies)))
                    took_s = time.monotonic() - began_s
                    watching.cancel()
                    print(f"{bodies} {'answers' if answers else 'bodies'} at once, {what}: {took_s:.1f} s")
                    for name, each in processes.items():
                        used = 1000 * (sum(each.cpu_times()[:2]) - cpu[name]) / bodies
                        most = f"{idle[name]:.0f} MiB idle, {found[name]:.0f} MiB at most"
                        print(f"{name}: {most}, {used:.0f} ms of CPU each")


async def call(session: aiohttp.ClientSession, url: str, body: bytes, **headers: str) -> None:
    """Post `body` to `/v1/messages` and read the answer. In names of headers, `_` stands for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await read(session.post(f"{url}/v1/messages", data=body, headers={**HEADERS, **named}))


async def read(calling: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> None:
    """Read an answer to its end, and discard it. Its status must be 200."""
    async with calling as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=50)
    parser.add_argument("--mebibytes", type=int, default=20)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--answers", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.bodies, given.mebibytes, given.slots, answers=given.answers))
