"""Connects a command to the broker. While the command is connected, only errors are logged."""

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
    """Open a connection to the broker for a command. `purpose` becomes part of the connection's name in RabbitMQ's
    management pages. Raises BrokerUnreachable, AccessRefused."""
    with logs.configured(service="lanekeeper", level="error"):
        async with connection_for(purpose, settings) as connection:
            yield connection


@asynccontextmanager
async def client_of(settings: Settings, *, tracing: Tracing | None = None) -> AsyncIterator[Client]:
    """Open a client for a command that publishes, cancels or fetches requests. Raises BrokerUnreachable,
    AccessRefused."""
    with logs.configured(service="lanekeeper", level="error"):
        client = Client(
            settings.broker_url,
            names=settings.names(),
            ssl_context=settings.ssl_context(),
            tracing=tracing,
            identified=settings.needs_user_id,
            bodies=settings.body_store(),
            cancel_abandoned=False,  # an interrupted command cancels its request itself, and reports the outcome
        )
        async with client:
            yield client
