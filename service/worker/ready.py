"""Asks the broker how many messages wait in its queues."""

from collections.abc import Mapping

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from topology.broker.heads import Heads


async def in_queues(connection: Connection, queues: list[str]) -> Mapping[str, int]:
    """Ask the broker how many messages wait in each queue. Raises BrokerError."""
    return {queue: depth.ready for queue, depth in (await depths(connection, queues)).items()}


async def with_set_aside(connection: Connection, heads: Mapping[str, Heads], queues: list[str]) -> Mapping[str, int]:
    """Ask the broker how many messages wait in each queue, and add the messages in a lane's side queues to the number
    of its intake queue. `heads`: the side queues of each intake, by the intake's name. Raises BrokerError."""
    ready = await in_queues(connection, queues)
    return {queue: count + (heads[queue].ready if queue in heads else 0) for queue, count in ready.items()}
