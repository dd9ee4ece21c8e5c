"""How many messages are ready in the broker's queues."""

from collections.abc import Awaitable, Callable, Mapping

from consumers.capacity.slots import Depths
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from topology.broker.heads import Heads


def in_queues(connection: Connection) -> Depths:
    """A function that asks the broker how many messages are ready in each of some queues."""

    async def ready(queues: list[str]) -> Mapping[str, int]:
        return {queue: depth.ready for queue, depth in (await depths(connection, queues)).items()}

    return ready


def with_set_aside(connection: Connection, heads: Mapping[str, Heads]) -> Depths:
    """The same; for an intake, the messages set aside in its side queues are added. `heads`: by intake."""
    ready = in_queues(connection)

    async def both(queues: list[str]) -> Mapping[str, int]:
        return {
            queue: count + (heads[queue].ready if queue in heads else 0)
            for queue, count in (await ready(queues)).items()
        }

    return both


def in_queue(connection: Connection, queue: str) -> Callable[[], Awaitable[int]]:
    """The same for one queue."""
    ready = in_queues(connection)

    async def count() -> int:
        return (await ready([queue]))[queue]

    return count
