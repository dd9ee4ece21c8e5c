"""How many messages wait in a queue, and how many consumers it has.

A passive queue declaration (AMQP's `queue.declare` with `passive`) returns both numbers exactly and without delay
(docs/facts.md, section 9).
"""

import asyncio
from dataclasses import dataclass

from aiormq.exceptions import ChannelAccessRefused

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import border
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable

RPC_TIMEOUT_S = 5
"""The time limit, in seconds, for reading the length of one queue (a passive declaration)."""


@dataclass(frozen=True, slots=True)
class Depth:
    """The length of a queue, and the number of its consumers. `ready` counts the messages that wait in the queue,
    without those that were delivered and are not acknowledged yet."""

    ready: int
    consumers: int


async def depths(connection: Connection, queues: list[str]) -> dict[str, Depth]:
    """Ask the broker for the length and the number of consumers of each queue (passive declaration). Raises
    AccessRefused, BrokerUnreachable (also if a queue does not exist)."""
    channel = await connection.channel(confirms=False, timeout_s=RPC_TIMEOUT_S)
    try:
        with border("cannot look at the queues"):
            found = {}
            for queue in queues:
                declared = await channel.queue_declare(queue, passive=True, timeout=RPC_TIMEOUT_S)
                found[queue] = Depth(declared.message_count or 0, declared.consumer_count or 0)
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await channel.close()
    except BrokerUnreachable as error:
        if isinstance(error.__cause__, ChannelAccessRefused):
            raise AccessRefused(f"{error}: from 4.3 on, a user needs some right to a queue to see it") from error
        raise
    return found
