"""Measures `POST /v1/messages` through the gateway, directly at the same simulated API, and through LiteLLM's proxy.
The three take turns in one run.

`lanekeeper serve` (lanes, gateway, SQLite), LiteLLM and the simulated API, which answers at once, each run in their own
process. Every answer is compared with its question: a run that lost a call, or mixed up two answers, yields no figure.
The raw figures are written to benchmarks/results/gateway/; --write also puts the tables into README.md and
docs/performance.md. LiteLLM's Rust proxy is left out, because no package registry has it.

    ./dev bench gateway [--quick] [--rounds 5] [--calls 200] [--at-once 50] [--litellm PROGRAM] [--write]
    ./dev bench gateway --report FILE [--write]         measures nothing: the tables of earlier results
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path

import aiohttp
import ground
import uvloop
from contest import litellm
from peers import with_litellm
from suite.gateway_table import text, write
from suite.medians import quantile
from suite.processes import clean_environ, cpu_s, resident_mib
from suite.results import Results, Run, load, machine

from lanekeeper.amqp.connection import Connection

MODEL = "claude-haiku-5-5"
PROMPT = "Tell me what a lane is. " * 40  # about 1 KB
PLENTY = {"REQUESTS_PER_MIN": "1e6", "INPUT_TOKENS_PER_MIN": "1e9", "OUTPUT_TOKENS_PER_MIN": "1e9"}
RESULTS = Path(__file__).parent / "results" / "gateway"
STREAMS = 500
_NUMBERS = count(1)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A server whose `/v1/messages` is called: its URL, process id, and the headers that a call needs."""

    name: str
    url: str
    pid: int
    headers: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def provider() -> AsyncIterator[Contestant]:
    """Runs the simulated API."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli.main", "simulate", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        url = next(word.rstrip(",;") for word in line.split() if word.startswith("http://"))
        yield Contestant(name="direct", url=url, pid=process.pid)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def serve(url: str, base_url: str, *, slots: int) -> AsyncIterator[Contestant]:
    """Runs `lanekeeper serve`, with `slots` slots in the lane critical."""
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        environ = clean_environ(
            LANEKEEPER_AMQP_URL=url,
            LANEKEEPER_STORE_URL=f"sqlite:///{folder}/store.sqlite",
            LANEKEEPER_LANES__CRITICAL__SLOTS=str(slots),
            LANEKEEPER_LOG_FORMAT="json",
            ANTHROPIC_BASE_URL=base_url,
            ANTHROPIC_API_KEY="benchmark",
            **{f"LANEKEEPER_BUDGET__{name}": each for name, each in PLENTY.items()},
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "service.cli.main", "serve", "--port", "0",
            env=environ, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        try:
            address = None
            while address is None:
                line = await process.stderr.readline()
                assert line, "lanekeeper serve has ended"
                address = json.loads(line).get("health") if b'"service.ready"' in line else None
            reading = asyncio.create_task(discard(process.stderr))
            yield Contestant(name="lanekeeper", url=str(address), pid=process.pid)
            reading.cancel()
        finally:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def peer(base_url: str, program: Path) -> AsyncIterator[Contestant]:
    """Runs LiteLLM's proxy."""
    async with with_litellm.served(base_url, model=MODEL, program=program) as (url, key, pid):
        yield Contestant(name="litellm", url=url, pid=pid, headers={"authorization": f"Bearer {key}"})


async def discard(log: asyncio.StreamReader) -> None:
    """Read a process's log to its end, so that the process never waits for a reader."""
    while await log.readline():
        pass


class Calling:
    """Calls one contestant. Each call has its own number in the prompt, which the simulated API echoes in its
    answer."""

    def __init__(self, session: aiohttp.ClientSession, to: Contestant) -> None:
        self._session = session
        self.to = to

    async def whole(self) -> float:
        """Make a call that is not streamed. Returns the seconds until the answer is complete."""
        mark, began = f"call {next(_NUMBERS)}.", time.perf_counter()
        async with self._post(mark, stream=False) as response:
            answer = await response.read()
        took = time.perf_counter() - began
        if response.status != 200 or mark not in json.loads(answer)["content"][0]["text"]:
            raise RuntimeError(f"{self.to.name}: lost a call: {response.status} {answer[:300]!r}")
        return took

    async def first_token(self, *, extra: str = "") -> float:
        """Make a streamed call, with `extra` in its prompt, and read it to its end. Returns the seconds until the first
        piece of the answer."""
        mark, began, first, answer = f"call {next(_NUMBERS)}.", time.perf_counter(), None, ""
        async with self._post(mark + extra, stream=True) as response:
            async for line in response.content:
                if line.startswith(b"data:") and b"content_block_delta" in line:
                    first = first or time.perf_counter() - began
                    answer += json.loads(line[5:])["delta"].get("text", "")
        if first is None or mark not in answer:
            raise RuntimeError(f"{self.to.name}: lost a stream: {response.status} {answer[:300]!r}")
        return first

    def _post(self, mark: str, *, stream: bool) -> "aiohttp.client._RequestContextManager":
        messages = [{"role": "user", "content": f"{mark} {PROMPT}"}]
        body = {"model": MODEL, "max_tokens": 1000, "messages": messages, "stream": stream}
        headers = {"x-api-key": "benchmark", "anthropic-version": "2023-06-01", **self.to.headers}
        return self._session.post(f"{self.to.url}/v1/messages", json=body, headers=headers)


async def together(one: Callable[[], Awaitable[object]], *, calls: int, at_once: int) -> float:
    """Make `calls` calls, `at_once` at a time. Returns the seconds that all of them took."""
    left = iter(range(calls))

    async def caller() -> None:
        for _ in left:
            await one()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(caller())
    return time.perf_counter() - began


async def latency(one: Callable[[], Awaitable[float]], calls: int) -> dict[str, float]:
    """Quantiles of the times that `one` returns, for calls one after the other."""
    values = [1000 * await one() for _ in range(calls)]
    return {"p50_ms": quantile(values, 0.5), "p99_ms": quantile(values, 0.99)}


async def rate(calling: Calling, *, calls: int, at_once: int) -> dict[str, float]:
    """Calls a second, with `at_once` at a time, and the server's CPU for each."""
    before = cpu_s(calling.to.pid)
    took = await together(calling.whole, calls=calls, at_once=at_once)
    return {"per_s": calls / took, "cpu_ms": 1000 * (cpu_s(calling.to.pid) - before) / calls}


async def streams(calling: Calling, at_once: int) -> dict[str, float]:
    """The server's peak of resident memory while `at_once` streams are open, each for some ten seconds."""
    most = resident_mib(calling.to.pid)

    async def look() -> None:
        nonlocal most
        while True:
            await asyncio.sleep(0.2)
            most = max(most, resident_mib(calling.to.pid))

    looking = asyncio.create_task(look())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(calling.first_token(extra=" [[latency: 10s]]"))
    finally:
        looking.cancel()
    return {"mib": most}


async def measured(found: Results, scenario: str, name: str, number: int, figures: Awaitable[dict[str, float]]) -> None:
    """Await the figures of a run and append them to `found`, or the error if the run failed."""
    try:
        run = Run(scenario=scenario, contestant=name, round=number, figures=await figures)
    except (RuntimeError, OSError, aiohttp.ClientError, ExceptionGroup, KeyError, ValueError) as error:
        run = Run(scenario=scenario, contestant=name, round=number, error=f"{type(error).__name__}: {error}"[:500])
    found.runs.append(run)


async def measure(options: argparse.Namespace) -> Results:
    """Run all scenarios with all contestants in turns, and save the results."""
    rounds, calls, at_once = options.rounds, options.calls, options.at_once
    versions = {name: version(name) for name in ("aiohttp", "anthropic", "uvloop")}
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    found = Results(at=now, machine=machine(), versions=versions, quick=options.quick)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(ground.broker())
        async with Connection(url, name="benchmark") as connection:
            versions["RabbitMQ"] = connection.version
        direct = await stack.enter_async_context(provider())
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))
        )
        contestants = [direct, await stack.enter_async_context(serve(url, direct.url, slots=at_once))]
        if options.litellm.exists():
            versions["litellm"] = await litellm.version(options.litellm)
            try:
                contestants.append(await stack.enter_async_context(peer(direct.url, options.litellm)))
            except TimeoutError:
                found.left_out.append("LiteLLM: it did not start")
        else:
            found.left_out.append(
                f"LiteLLM: no {options.litellm}; benchmarks/contest/litellm.py says how to install it"
            )
        callings = [Calling(session, each) for each in contestants]
        for each in callings:  # warm
            await measured(found, "warm", each.to.name, 0, rate(each, calls=calls, at_once=at_once))
        for number in range(rounds):
            for each in callings:
                await measured(found, "one client", each.to.name, number, latency(each.whole, calls))
            for each in callings:
                await measured(found, "first token", each.to.name, number, latency(each.first_token, calls))
            for each in callings:
                how = rate(each, calls=4 * calls, at_once=at_once)
                await measured(found, "many clients", each.to.name, number, how)
    async with ground.broker() as url, provider() as direct, aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0)
    ) as session, serve(url, direct.url, slots=STREAMS) as ours:  # fmt: skip
        await measured(found, "streams", ours.name, 0, streams(Calling(session, ours), STREAMS))
    found.took_s = time.monotonic() - began
    print(f"written to {found.save(RESULTS)}", file=sys.stderr)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of 100 calls")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--litellm", type=Path, default=litellm.PROGRAM)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md and docs/performance.md")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: show these results")
    given = parser.parse_args()
    given.rounds = given.rounds or (2 if given.quick else 5)
    given.calls = given.calls or (100 if given.quick else 200)
    results = load(given.report) if given.report else uvloop.run(measure(given))
    print(text(results))
    if given.write:
        write(results)
