"""Connections to the broker by the settings, and its management API. Apart from `worker/assembly.py`, because short
commands need only these: the parts of a worker and the providers' clients take two seconds to import."""

from lanekeeper.amqp.connection import Connection
from service.config.settings import Settings
from topology.broker.management import Management, discover


def connection_for(purpose: str, settings: Settings) -> Connection:
    """A connection that is not opened yet; the broker lists it with its `purpose`."""
    return Connection(settings.broker_url, name=f"lanekeeper {purpose}", ssl_context=settings.ssl_context())


async def management_of(settings: Settings, connection: Connection) -> Management | None:
    """Find the management API of the broker to which `connection` is open; None if none is found."""
    return await discover(
        settings.broker_url,
        settings.management,
        connection=await connection.underlying(),
        ssl_context=settings.tls.given_context(),
    )
