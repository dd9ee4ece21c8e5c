"""Connects the service to the broker and its management API, and checks the worker's permissions and the topology
before the worker takes requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerUnreachable, TopologyMismatch
from service.config.settings import Settings
from service.side_tasks import beside
from topology.broker.admin.apply import apply
from topology.broker.admin.management import Management, discover
from topology.broker.admin.rights import WritingRights
from topology.broker.admin.verify import verify
from topology.model import Topology


def connection_for(purpose: str, settings: Settings) -> Connection:
    """Create a connection to the configured broker, without opening it. The broker lists it under a name that contains
    `purpose`."""
    return Connection(settings.broker_url, name=f"lanekeeper {purpose}", ssl_context=settings.ssl_context())


async def management_of(settings: Settings, connection: Connection) -> Management | None:
    """Find the management API of the broker to which `connection` is open; None if none is found."""
    return await discover(
        settings.broker_url,
        settings.management,
        connection=await connection.underlying(),
        ssl_context=settings.tls.given_context(),
    )


@asynccontextmanager
async def watched_rights(connection: Connection, names: Names) -> AsyncIterator[WritingRights]:
    """Check that the worker's AMQP user may publish replies and events. If the broker cannot answer now, the check is
    repeated in the background while the block runs.

    Without this permission a worker would take requests, fail to publish their replies, and return the requests to
    their queues, until they are dead-lettered because they were delivered too often. Raises AccessRefused."""
    rights = WritingRights(connection, (("", f"{names.reply_prefix}nobody"), (names.events, "nobody")))
    try:
        await rights.check()
    except (BrokerBlocked, BrokerUnreachable):
        pass  # the broker has an alarm or is unreachable: the worker takes no requests until `rights.run` has checked
    except AccessRefused as error:
        raise AccessRefused(
            f"a worker must be allowed to write: {error}; "
            "give its user the rights that `lanekeeper topology export --user NAME:worker` shows"
        ) from error
    async with beside(rights.run(), name="rights"):
        yield rights


async def apply_or_check(topology: Topology, connection: Connection, *, declares: bool) -> None:
    """Declare the topology (queues, exchanges, bindings) if `declares` is true; otherwise check that the broker has it.
    Raises TopologyMismatch."""
    if declares:
        await apply(topology, await connection.underlying())
        return
    differences = (await verify(topology, None, await connection.underlying())).differences
    if differences:
        raise TopologyMismatch(
            f"the broker's topology is not as declared ({len(differences)} differences): {differences[0].line}; "
            "run: lanekeeper topology apply"
        )
