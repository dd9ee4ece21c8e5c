"""How a command reaches the broker. Only errors are logged meanwhile."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.telemetry.tracing import Tracing
from service.config.settings import Settings
from service.telemetry import logs
from service.worker.broker import connection_for


@asynccontextmanager
async def connected(settings: Settings, purpose: str) -> AsyncIterator[Connection]:
    """Raises BrokerUnreachable, AccessRefused."""
    with logs.written(service="lanekeeper", level="error"):
        async with connection_for(purpose, settings) as connection:
            yield connection


@asynccontextmanager
async def client_of(settings: Settings, *, tracing: Tracing | None = None) -> AsyncIterator[Client]:
    """Raises BrokerUnreachable, AccessRefused."""
    with logs.written(service="lanekeeper", level="error"):
        client = Client(
            settings.broker_url,
            names=settings.names(),
            ssl_context=settings.ssl_context(),
            tracing=tracing,
            identified=settings.needs_user_id,
            cancel_abandoned=False,  # an interrupted command reports what became of its request
        )
        async with client:
            yield client
