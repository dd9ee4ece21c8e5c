"""The contestant Lanekeeper: worker processes on a real broker; requests are sent with its client."""

import asyncio
import json
import os
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from contest.gate import spec
from contest.load import Ask, Asking, Load

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from topology.broker.admin.remove import remove
from topology.declaration import declare
from topology.lanes import DEFAULT_LANES

START_WITHIN_S = 60
COUNTED_EVENTS = ("breaker.changed", "account.paused", "limits.learned", "request.retried", "request.deferred")
"""Log events of the workers that are counted."""


@asynccontextmanager
async def lanekeeper(
    base_url: str,
    load: Load,
    *,
    broker_url: str,
    workers: int = 1,
    redis_url: str | None = None,
    events: Counter[str] | None = None,
) -> AsyncIterator[Asking]:
    """Start `workers` processes that share a store: Redis, or a file if there is one process. At the end, `events` gets
    the number of each log event."""
    names = Names(f"contest-{uuid.uuid4().hex[:8]}")
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        environ = _environment(load) | {
            "LANEKEEPER_AMQP_URL": broker_url,
            "LANEKEEPER_NAMESPACE": names.namespace,
            "LANEKEEPER_STORE_URL": redis_url or f"sqlite:///{folder}/store.sqlite",
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": "benchmark",
            "LANEKEEPER_LOG_FORMAT": "json",
            "LANEKEEPER_LOG_LEVEL": "debug" if events is not None else "info",
        }
        processes: list[asyncio.subprocess.Process] = []
        try:
            async with Client(broker_url, names=names) as client:
                with Path(folder, "log").open("wb") as log:  # noqa: ASYNC230
                    for number in range(workers):
                        processes.append(
                            await asyncio.create_subprocess_exec(
                                *(sys.executable, "-m", "service.cli.main", "serve", "--port", "0"),
                                env=environ,
                                stdout=log,
                                stderr=log,
                            )
                        )
                        await _consuming(client, workers=number + 1)

                async def ask(ask: Ask) -> None:
                    final = await client.request(ask.body, key=f"{ask.lane}.benchmark.budget")
                    ask.attempts = final.attempt

                yield ask
        finally:
            for process in processes:
                process.terminate()
            await asyncio.gather(*(process.wait() for process in processes))
            if events is not None:
                events.update(_events_in(Path(folder, "log")))
            await _remove_topology(broker_url, names)


def _events_in(log: Path) -> Iterator[str]:
    """The names of the counted events in a log, each with its `state` and `reason`."""
    for line in log.read_text().splitlines():
        if line.startswith("{") and (event := json.loads(line))["event"] in COUNTED_EVENTS:
            yield " ".join([event["event"], *(event[what] for what in ("state", "reason") if what in event)])


def _environment(load: Load) -> dict[str, str]:
    """This process's environment without any settings, but with the burst scaled by the load's speed."""
    foreign = ("LANEKEEPER_", "ANTHROPIC_", "OTEL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept if load.speed == 1 else {**kept, "LANEKEEPER_BUDGET__BURST_S": f"{spec(load).burst_s:g}"}


async def _consuming(client: Client, *, workers: int) -> None:
    """Wait until so many workers consume every lane."""
    async with asyncio.timeout(START_WITHIN_S):
        for lane in DEFAULT_LANES:
            while (depth := await client.depth(lane.name)) is None or depth.consumers < workers:
                await asyncio.sleep(0.2)


async def _remove_topology(broker_url: str, names: Names) -> None:
    async with Connection(broker_url, name="benchmark") as connection:
        await remove(declare(DEFAULT_LANES, names=names, broker_version=connection.version), connection)
