"""Measures what each tenant of a lane gets while one of them has 10,000 requests waiting, and how long others wait.

    .venv/bin/python benchmarks/fairness.py [--tenants 3] [--processes 1] [--waiting 10000] [--slots 16] [--settle-s 30]

The lane is `normal`; a call takes half a second. The first tenant's requests are published before all others. Then each
further tenant always has as many requests under way or waiting as the lane has slots, and one more tenant sends a
single request every quarter of a second. For ten seconds, the provider's calls are counted by tenant. The aim for each
tenant is at least half of an equal share, 1/(2n).
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import ground
import uvloop

from consumers.capacity.activity import quantile
from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import Depth, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import TENANT, Names
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedAPI
from service.simulated.options import SimulatedOptions
from topology.broker.admin.apply import apply
from topology.declaration import declare
from topology.lanes import DEFAULT_LANES

LANE = "normal"
INTAKE = Names().intake(LANE)
LATENCY_MS = 500
USER = "lanekeeper"
"""The private broker's user. It is listed in LANEKEEPER_SPEAKERS, so it may name the tenants of its requests."""
COUNTED_S = 10.0
ASKS_EVERY_S = 0.25
PUBLISHING_AT_ONCE = 200
FLOOD = "tenant-0"
SINGLE = "single"


@asynccontextmanager
async def process(url: str, base_url: str, folder: str, slots: int) -> AsyncIterator[None]:
    """Runs `lanekeeper serve` in its own process."""
    environ = {
        **os.environ,
        "LANEKEEPER_AMQP_URL": url,
        "LANEKEEPER_STORE_URL": f"sqlite:///{folder}/store.sqlite",
        "LANEKEEPER_SPEAKERS": USER,
        "LANEKEEPER_LOG_LEVEL": "warning",
        "ANTHROPIC_API_KEY": "benchmark",
        "ANTHROPIC_BASE_URL": base_url,
        "LANEKEEPER_GATEWAY__PORT": "0",
        f"LANEKEEPER_LANES__{LANE.upper()}__SLOTS": str(slots),
        "LANEKEEPER_BUDGET__REQUESTS_PER_MIN": "1000000",
        "LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN": "1000000000",
        "LANEKEEPER_BUDGET__OUTPUT_TOKENS_PER_MIN": "1000000000",
    }
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli.main", "serve", env=environ, cwd=folder, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        worker.terminate()
        await worker.wait()


class Load:
    """Sends the tenants' requests, and records the waits of single requests."""

    def __init__(self, client: Client, publisher: Publisher) -> None:
        self._client = client
        self._publisher = publisher
        self.waits_ms: list[int] = []
        """Waits of single requests that were sent after `counts_from_s`."""
        self.counts_from_s = 0.0

    async def flood(self, count: int) -> None:
        """Publish the first tenant's requests; nobody waits for their answers."""
        left = iter(range(count))

        async def publish() -> None:
            for number in left:
                await self._publisher.publish(
                    Message(
                        body=json.dumps({"prompt": f"{FLOOD} {number}"}).encode(),
                        message_id=uuid.uuid4().hex,
                        content_type="application/json",
                        user_id=USER,
                        headers={TENANT: FLOOD, "x-lane-sent-ms": time.time_ns() // 1_000_000},
                    ),
                    exchange="lane.requests",
                    routing_key=f"{LANE}.benchmark.flood",
                    mandatory=False,
                )

        await asyncio.gather(*(publish() for _ in range(PUBLISHING_AT_ONCE)))

    async def ask(self, tenant: str) -> int:
        """Send one request and await its answer. Returns its wait in ms."""
        final = await self._client.request(
            {"prompt": f"{tenant} asks"}, key=f"{LANE}.benchmark.fairness", tenant=tenant
        )
        return final.wait_ms

    async def always(self, tenant: str) -> None:
        """Send requests of a tenant one after the other, until cancelled."""
        while True:
            await self.ask(tenant)

    async def now_and_then(self) -> None:
        """Send a single request every `ASKS_EVERY_S`, until cancelled."""

        async def once() -> None:
            asked_s = time.monotonic()
            wait_ms = await self.ask(SINGLE)
            if asked_s >= self.counts_from_s > 0:
                self.waits_ms.append(wait_ms)

        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(once())
                await asyncio.sleep(ASKS_EVERY_S)


async def intake(connection: Connection) -> Depth:
    """The lane's intake: how many messages and consumers it has."""
    return (await depths(connection, [INTAKE]))[INTAKE]


async def main(tenants: int, processes: int, waiting: int, slots: int, settle_s: float) -> None:
    async with (
        ground.broker() as url,
        SimulatedAPI(SimulatedOptions(latency_ms=LATENCY_MS)) as api,
        AsyncExitStack() as stack,
    ):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lanekeeper-fairness-"))
        connection = await stack.enter_async_context(Connection(url, name="load"))
        declared = declare(DEFAULT_LANES, names=Names(), broker_version=connection.version)
        await apply(declared, await connection.underlying())
        for _ in range(processes):
            await stack.enter_async_context(process(url, api.base_url, folder, slots))
        while (await intake(connection)).consumers < processes:
            await asyncio.sleep(0.1)
        client = await stack.enter_async_context(Client(url, cancel_abandoned=False))
        load = Load(client, Publisher(connection, tracing=Tracing()))
        began = time.monotonic()
        await load.flood(waiting)
        flooded = time.monotonic()
        at_once = slots * processes
        tasks = [
            asyncio.create_task(load.always(f"tenant-{tenant}")) for tenant in range(1, tenants) for _ in range(at_once)
        ]
        tasks.append(asyncio.create_task(load.now_and_then()))
        deadline = time.monotonic() + settle_s  # until the scouts have read through the flood
        while time.monotonic() < deadline and (await intake(connection)).ready > slots:
            await asyncio.sleep(0.1)
        settled = time.monotonic()
        load.counts_from_s = settled
        since_s = time.monotonic()
        await asyncio.sleep(COUNTED_S)
        counted = [call for call in api.calls if call.started_s >= since_s]
        calls = Counter(call.prompt.split(" ")[0] for call in counted)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sides = [each.name for each in declared.queues if ".normal.side." in each.name]
        found = await depths(connection, [INTAKE, *sides])
        print("  waiting: " + ", ".join(f"{queue} {depth.ready}" for queue, depth in found.items() if depth.ready))
        total = sum(calls.values())
        shares = {each: calls[each] / total for each in [f"tenant-{number}" for number in range(tenants)]}
        waits = sorted(load.waits_ms)
        print(
            f"{tenants} tenants, {processes} processes, {slots} slots each: {total / COUNTED_S:.0f} calls/s, least "
            f"share {min(shares.values()):.3f}, aim {1 / (2 * tenants):.3f}"
        )
        print(f"  {waiting} published in {flooded - began:.1f} s, read through {settled - flooded:.1f} s later")
        print("  shares: " + ", ".join(f"{each} {share:.3f}" for each, share in shares.items()))
        asked = f"{len(waits)} single requests answered"
        print(
            f"  {asked}: wait p50 {quantile(waits, 0.5)} ms, p95 {quantile(waits, 0.95)} ms, max {waits[-1:]} ms",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--settle-s", type=float, default=30)
    options = parser.parse_args()
    uvloop.run(main(options.tenants, options.processes, options.waiting, options.slots, options.settle_s))
