"""Starts a broker and a Redis for benchmarks, and makes settings for a worker on them."""

import asyncio
import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from service.config.copies import with_provider
from service.config.loading import load_settings
from service.config.settings import Settings
from service.private_broker.broker import private_broker
from service.private_broker.source import LOOPBACK, free_ports

structlog.configure(
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING), cache_logger_on_first_use=True
)


@asynccontextmanager
async def broker() -> AsyncIterator[str]:
    """Yields an AMQP URL: LANEKEEPER_AMQP_URL if it is set, else that of a private broker, which it starts."""
    if url := os.environ.get("LANEKEEPER_AMQP_URL"):
        yield url
        return
    async with private_broker() as made:
        yield made.amqp_url


@asynccontextmanager
async def redis() -> AsyncIterator[str | None]:
    """Starts a Redis whose append-only file is synced every second; yields its URL, or None if redis-server is not
    installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", LOOPBACK, "--dir", folder]
        process = await asyncio.create_subprocess_exec(
            *command, "--save", "", "--appendonly", "yes", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            while b"Ready to accept connections" not in await process.stdout.readline():
                pass
            yield f"redis://{LOOPBACK}:{port}/0"
        finally:
            process.terminate()
            await process.wait()


def settings(url: str, base_url: str, **options: Any) -> Settings:
    """Settings for a worker on the broker `url` and the provider `base_url`, with a new SQLite store. The environment
    is ignored."""
    folder = tempfile.mkdtemp(prefix="lanekeeper-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = load_settings(environ={"LANEKEEPER_AMQP_URL": url}, store_url=f"sqlite:///{folder}/store.sqlite", **options)
    return with_provider(made, base_url, key="benchmark")
