"""What `POST /v1/messages` costs by the gateway, beside calling the same simulated API directly, in turns in one run.

`lanekeeper serve` (lanes, gateway, SQLite) and the simulated API, which answers at once, are processes of their own.

    .venv/bin/python benchmarks/gateway.py [--rounds 5] [--calls 200] [--at-once 50]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import ground
import psutil
import uvloop

PROMPT = "Tell me what a lane is. " * 40  # about 1 KB
HEADERS = {"x-api-key": "benchmark", "anthropic-version": "2023-06-01", "content-type": "application/json"}
PLENTY = {"REQUESTS_PER_MIN": "1e6", "INPUT_TOKENS_PER_MIN": "1e9", "OUTPUT_TOKENS_PER_MIN": "1e9"}


@asynccontextmanager
async def provider() -> AsyncIterator[str]:
    """The simulated API's base URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli.main", "simulate", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield next(word.rstrip(",;") for word in line.split() if word.startswith("http://"))
    finally:
        process.terminate()
        await process.wait()


def body(*, stream: bool) -> bytes:
    said = [{"role": "user", "content": PROMPT}]
    return json.dumps({"model": "claude-haiku-5-5", "max_tokens": 100, "messages": said, "stream": stream}).encode()


@asynccontextmanager
async def served(url: str, base_url: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """`lanekeeper serve`: the gateway's URL and the process."""
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        kept = {name: each for name, each in os.environ.items() if not name.startswith(("LANEKEEPER_", "ANTHROPIC_"))}
        environ = {
            **kept,
            "LANEKEEPER_AMQP_URL": url,
            "LANEKEEPER_STORE_URL": f"sqlite:///{folder}/store.sqlite",
            "LANEKEEPER_LANES__CRITICAL__SLOTS": "50",
            "LANEKEEPER_LOG_FORMAT": "json",
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": "benchmark",
            **{f"LANEKEEPER_BUDGET__{name}": each for name, each in PLENTY.items()},
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "service.cli.main", "serve", "--port", "0",
            env=environ, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        stderr = process.stderr
        try:
            address = None
            while address is None:
                line = await stderr.readline()
                assert line, "lanekeeper serve has ended"
                address = json.loads(line).get("health") if b'"service.ready"' in line else None
            reading = asyncio.create_task(_passed_over(stderr))
            yield str(address), psutil.Process(process.pid)
            reading.cancel()
        finally:
            process.terminate()
            await process.wait()


async def _passed_over(log: asyncio.StreamReader) -> None:
    while await log.readline():
        pass


async def whole(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds until the answer is there."""
    began = time.perf_counter()
    async with session.post(f"{url}/v1/messages", data=body(stream=False), headers=HEADERS) as got:
        assert got.status == 200, await got.text()
        await got.read()
    return time.perf_counter() - began


async def first_token(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds until the first piece of the answer is there."""
    began, first = time.perf_counter(), None
    async with session.post(f"{url}/v1/messages", data=body(stream=True), headers=HEADERS) as got:
        async for line in got.content:
            if first is None and line.startswith(b"event: content_block_delta"):
                first = time.perf_counter() - began
    assert first is not None
    return first


async def together(one: Callable[[], Awaitable[object]], *, calls: int, at_once: int) -> float:
    """Calls a second."""
    left = iter(range(calls))

    async def caller() -> None:
        for _ in left:
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return calls / (time.perf_counter() - began)


def ms(values: list[float], quantile: float) -> float:
    return 1000 * sorted(values)[min(len(values) - 1, int(quantile * len(values)))]


async def main(rounds: int, calls: int, at_once: int) -> None:
    async with (
        ground.broker() as url,
        provider() as direct,
        served(url, direct) as (gateway, process),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        for each in (direct, gateway):
            await together(lambda each=each: whole(session, each), calls=calls, at_once=at_once)
        for name, one in (("whole answer", whole), ("first token", first_token)):
            found: dict[str, list[float]] = {direct: [], gateway: []}
            for _ in range(rounds):
                for each, values in found.items():
                    values += [await one(session, each) for _ in range(calls)]
            added = [ms(found[gateway], q) - ms(found[direct], q) for q in (0.5, 0.99)]
            print(f"one client, {name}: added p50 {added[0]:.1f} ms, p99 {added[1]:.1f} ms")
        rates: dict[str, list[float]] = {direct: [], gateway: []}
        cpu = sum(process.cpu_times()[:2])
        for _ in range(rounds):
            for each, values in rates.items():
                one_call = lambda each=each: whole(session, each)  # noqa: E731
                values.append(await together(one_call, calls=4 * calls, at_once=at_once))
        cpu = (sum(process.cpu_times()[:2]) - cpu) / (rounds * 4 * calls)
        told = {
            name: f"{statistics.median(rates[each]):.0f}" for name, each in (("direct", direct), ("gateway", gateway))
        }
        print(f"{at_once} clients, calls a second: {told}; CPU of serve {1000 * cpu:.2f} ms a call")
        print(f"memory of serve: {process.memory_info().rss / 2**20:.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=50)
    given = parser.parse_args()
    uvloop.run(main(given.rounds, given.calls, given.at_once))
