"""Finds out the broker's size limit for messages, before a large message is published on a shared connection.

The limit is `max_message_size`: 16 MiB on RabbitMQ 4.x and 128 MiB on 3.x, unless the operator set another value.
RabbitMQ checks the size when the whole message has arrived, and closes the channel if the message is too large. If
further publishes on that channel are already on their way, RabbitMQ closes the whole connection. The limit is named
only in the error with which the channel is closed. So Lanekeeper first publishes a test message of at least the same
size, on a separate connection, to a queue that does not exist. This needs no permissions, because RabbitMQ checks the
size before the permissions. For messages of at most 1 MiB, no test message is sent.
"""

import asyncio
import re

from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelPreconditionFailed

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerUnreachable, MessageTooLarge

SMALL_BYTES = 1024 * 1024
"""Messages up to this many bytes are published without a check of the broker's size limit. A request may always be this
large, so a broker for Lanekeeper must accept such messages anyway."""
PROBE_BYTES = 16 * 1024 * 1024
"""The smallest size, in bytes, of a test message that finds out the broker's size limit for messages. It is the default
limit of RabbitMQ 4, so that one test message is enough in most cases."""
PROBE_WITHIN_S = 20.0
"""The time limit, in seconds, for finding out how large a message the broker accepts."""
NO_QUEUE = "lanekeeper.nobody"
"""The name of a queue that does not exist, so that the broker drops the test messages that are published to it."""
_LIMIT_IN_ERROR = re.compile(r"larger than configured max size (\d+)")


class MessageLimit:
    """Knows the largest message that the broker accepts (`max_message_size`). It determines the limit with a test
    message on a separate connection, and again when `connection` has been reopened."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._probing = asyncio.Lock()
        self._accepted_bytes = SMALL_BYTES
        self._limit: int | None = None
        self._opening = connection.openings

    async def check(self, size: int) -> None:
        """Check whether the broker accepts a message of `size` bytes. Raises MessageTooLarge if it does not, and
        BrokerUnreachable if the limit could not be found out."""
        if size <= SMALL_BYTES:
            return
        async with self._probing:
            if self._opening != self._connection.openings:
                self._accepted_bytes, self._limit, self._opening = SMALL_BYTES, None, self._connection.openings
            if self._limit is None and size > self._accepted_bytes:
                await self._probe(max(size, PROBE_BYTES))
        if self._limit is not None and size > self._limit:
            raise MessageTooLarge(size, self._limit)

    async def _probe(self, size: int) -> None:
        try:
            async with asyncio.timeout(PROBE_WITHIN_S), self._connection.another("size") as connection:
                channel = await connection.channel(confirms=True)
                try:
                    await channel.basic_publish(bytes(size), routing_key=NO_QUEUE)
                except ChannelPreconditionFailed as error:
                    if (named := _LIMIT_IN_ERROR.search(str(error))) is None:
                        raise
                    self._limit = int(named[1])
                    return
                except ChannelAccessRefused:
                    pass  # the size is checked before permissions, so it is within the limit
                self._accepted_bytes = size
        except (AMQPError, OSError, RuntimeError, TimeoutError) as error:
            raise BrokerUnreachable(f"how large a message the broker takes is not known: {error}") from error
