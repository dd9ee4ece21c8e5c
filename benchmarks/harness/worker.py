"""A worker in the benchmark's own process, where the benchmark sees each call as it happens."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.harness.processes import broker
from lanekeeper import Client
from service.config.settings import Settings, simulating
from service.demo import working


@asynccontextmanager
async def worker(base_url: str, *, namespace: str, **settings: object) -> AsyncIterator[Client]:
    """Yields a client of a worker with these settings, which calls the provider at `base_url`."""
    with tempfile.TemporaryDirectory() as folder:
        async with broker() as url:
            places = {"amqp_url": url, "namespace": namespace, "store_url": f"sqlite:///{folder}/store"}
            given = Settings.model_validate({"anthropic_api_key": "simulated", **places, **settings})
            async with working(simulating(given, base_url)) as (_, client):
                yield client
