"""A worker in the demo's own process, and a client that sends requests to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lanekeeper import Client
from service.config.settings import Settings
from service.worker import running as worker
from service.worker.assembly import assemble
from service.worker.worker import Worker

GRACE_S = 1.0


@asynccontextmanager
async def working(settings: Settings, *, lanes: tuple[str, ...] = ()) -> AsyncIterator[tuple[Worker, Client]]:
    """Run a worker for the given lanes inside the block; none given: for all lanes. The block begins when every queue
    is consumed."""
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
