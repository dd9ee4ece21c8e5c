"""How many messages wait in queues of the broker."""

from collections.abc import Mapping

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from topology.broker.heads import Heads


async def in_queues(connection: Connection, queues: list[str]) -> Mapping[str, int]:
    """The number of waiting messages for each queue. Raises BrokerError."""
    return {queue: depth.ready for queue, depth in (await depths(connection, queues)).items()}


async def with_set_aside(connection: Connection, heads: Mapping[str, Heads], queues: list[str]) -> Mapping[str, int]:
    """Adds, for an intake, the messages that are set aside in its side queues. `heads`: those queues, by intake."""
    ready = await in_queues(connection, queues)
    return {queue: count + (heads[queue].ready if queue in heads else 0) for queue, count in ready.items()}
