"""Runs a contestant's provider, `lanekeeper simulate` with enforced limits in its own process, and reads its counts."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from contest.load import OUTPUT_TOKENS, Load

from service.private_broker.source import LOOPBACK, free_ports

START_WITHIN_S = 30


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The provider's counts since its first start."""

    calls: int = 0
    running: int = 0
    """Calls that are admitted and not answered yet."""
    requests: int = 0
    """Calls that its limits admitted."""
    input_tokens: float = 0.0
    refused: int = 0
    """Calls answered with 429."""
    outcomes: Counter[str]
    """Finished calls, by the provider's word for their outcome."""


class SimulatedProvider:
    """A provider that can be stopped and started again; its counts continue."""

    def __init__(self, load: Load, *, options: Sequence[str] = ()) -> None:
        (self.port,) = free_ports(1)
        self.base_url = f"http://{LOOPBACK}:{self.port}"
        self._load = load
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._before = Counts(outcomes=Counter())

    async def start(self) -> None:
        load = self._load
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.cli.main", "simulate", "--port", str(self.port)),
            *("--requests-per-minute", str(round(load.requests_per_minute * load.speed))),
            *("--input-tokens-per-minute", str(round(load.input_tokens_per_minute * load.speed))),
            *("--burst", f"{1000 * load.burst_s / load.speed:g}ms", "--output-tokens", str(OUTPUT_TOKENS)),
            *("--latency", f"{1000 * load.latency_s / load.speed:g}ms", *self._options),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(START_WITHIN_S):
            await self._process.stdout.readline()

    async def stop(self) -> None:
        """Stop the process and keep its counts, because the next process begins at 0."""
        if self._process is not None and self._process.returncode is None:
            self._before = await self.counts()
            self._process.terminate()
            await self._process.wait()
        self._process = None

    async def counts(self) -> Counts:
        async with aiohttp.ClientSession() as session, session.get(f"{self.base_url}/simulated/stats") as response:
            return _added(self._before, await response.json())


@asynccontextmanager
async def provider(load: Load, *options: str) -> AsyncIterator[SimulatedProvider]:
    made = SimulatedProvider(load, options=options)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def _added(before: Counts, stats: dict[str, Any]) -> Counts:
    """The sum of the counts of earlier processes and of the current one. The input of running calls is estimated by the
    average of the settled ones."""
    outcomes = Counter(stats["outcomes"])
    settled = sum(stats["models"].values())
    each = stats["input_tokens"] / settled if settled else 0.0
    running = stats["running"]  # admitted, and not settled yet
    return Counts(
        calls=before.calls + stats["calls"],
        running=running,
        requests=before.requests + settled + running,
        input_tokens=before.input_tokens + stats["input_tokens"] + running * each,
        refused=before.refused + outcomes["rate_limited"],
        outcomes=before.outcomes + outcomes,
    )
