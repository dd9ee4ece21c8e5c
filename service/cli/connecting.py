"""How a command reaches the broker: over one connection, and the management API if there is one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.telemetry.tracing import Tracing
from service.config.settings import Settings
from service.telemetry import logs
from topology.broker.admin.management import Management, discover


@asynccontextmanager
async def connected(settings: Settings, purpose: str) -> AsyncIterator[Connection]:
    """Raises BrokerUnreachable, AccessRefused."""
    async with Connection(
        settings.broker_url, name=f"lanekeeper {purpose}", ssl_context=settings.ssl_context()
    ) as connection:
        yield connection


async def management_of(settings: Settings, connection: Connection) -> Management | None:
    """The management API that belongs to the connection, if it can be found."""
    return await discover(
        settings.broker_url,
        settings.management,
        connection=await connection.underlying(),
        ssl_context=settings.tls.given_context(),
    )


@asynccontextmanager
async def client_of(settings: Settings, *, tracing: Tracing | None = None) -> AsyncIterator[Client]:
    """A client of the settings' broker; only errors are logged meanwhile. Raises BrokerUnreachable, AccessRefused."""
    with logs.written(service="lanekeeper", level="error"):
        client = Client(
            settings.broker_url,
            names=settings.names(),
            ssl_context=settings.ssl_context(),
            tracing=tracing,
            identified=settings.needs_user_id,
            cancel_abandoned=False,  # who is interrupted says what became of it
        )
        async with client:
            yield client
