"""Runs a worker in the demo's own process, with a client that sends requests to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Unpack

from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.options import Options
from lanekeeper.replies import Final
from service.config.settings import Settings
from service.worker import running as worker
from service.worker.assembly import assemble
from service.worker.worker import Worker

GRACE_S = 1.0
ANSWER_WITHIN_S = 90.0


@asynccontextmanager
async def working(settings: Settings, *, lanes: tuple[str, ...] = ()) -> AsyncIterator[tuple[Worker, Client]]:
    """Run a worker for the given lanes (all, if none are given) inside the block. The block begins when the worker
    consumes all queues of these lanes."""
    stop, ready = asyncio.Event(), asyncio.Event()
    async with (
        assemble(settings, lanes=lanes, declares=True) as parts,
        Client(settings.broker_url, names=parts.names) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(worker.run(parts, stop=stop, grace_s=GRACE_S, on_ready=ready.set), name="worker")
        try:
            await ready.wait()
            yield parts, client
        finally:
            stop.set()


async def answer_of(client: Client, prompt: str, *, key: str, **options: Unpack[Options]) -> Final | None:
    """Send a request, and return its answer; None if the request fails, or no answer comes in time."""
    with suppress(LanekeeperError):
        return await client.request({"prompt": prompt}, key=key, timeout_s=ANSWER_WITHIN_S, **options)
    return None
