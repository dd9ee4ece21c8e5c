"""Removes a topology from a broker, with all its messages. This is used for topologies that exist only for a short
time, such as the demo's."""

from contextlib import suppress

from aiormq.exceptions import AMQPError

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerError
from topology.model import Topology

RPC_TIMEOUT_S = 30
"""The time limit, in seconds, for removing one queue or exchange."""


async def remove(topology: Topology, connection: Connection) -> None:
    """Delete the exchanges and queues of `topology` from the broker. Errors are ignored, because an object may be
    missing, or the connection lost."""
    with suppress(BrokerError, AMQPError, RuntimeError, OSError, TimeoutError):
        channel = await connection.channel(confirms=False, timeout_s=RPC_TIMEOUT_S)
        for queue in topology.queues:
            await channel.queue_delete(queue.name, timeout=RPC_TIMEOUT_S)
        for exchange in topology.exchanges:
            await channel.exchange_delete(exchange.name, timeout=RPC_TIMEOUT_S)
        await channel.close()
