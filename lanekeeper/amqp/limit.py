"""Finds out the broker's limit for a message's size, before a larger message is published on a shared connection.

RabbitMQ checks the size once the whole message has arrived (`max_message_size`: 16 MiB on 4.x, 128 MiB on 3.x, or what
the operator set) and closes the channel if it is too large; publishes still under way to that channel then end the
connection. The limit is named only in that error, and the size is checked before any permission. So a message of the
size in question is published once, to a queue that does not exist, on a separate connection. Small messages need no
check.
"""

import asyncio
import re

import aio_pika
from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelPreconditionFailed

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerUnreachable, MessageTooLarge

SMALL_BYTES = 1024 * 1024
"""Sizes up to this are not checked: requests may be this large, so every broker in use must accept them."""
ASKED_BYTES = 16 * 1024 * 1024
"""The smallest size that is tried, so that one try is enough: the default limit of RabbitMQ 4."""
WITHIN_S = 20.0
NOBODY = "lanekeeper.nobody"
"""A queue that does not exist: the broker drops what is published to it."""
_TOLD = re.compile(r"larger than configured max size (\d+)")


class MessageLimit:
    """The size limit of one connection's broker; forgotten when the connection is reopened."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._asking = asyncio.Lock()
        self._taken = SMALL_BYTES
        self._limit: int | None = None
        self._opening = connection.openings

    async def check(self, size: int) -> None:
        """Raises MessageTooLarge, or BrokerUnreachable if the limit could not be found out."""
        if size <= SMALL_BYTES:
            return
        async with self._asking:
            if self._opening != self._connection.openings:
                self._taken, self._limit, self._opening = SMALL_BYTES, None, self._connection.openings
            if self._limit is None and size > self._taken:
                await self._ask(max(size, ASKED_BYTES))
        if self._limit is not None and size > self._limit:
            raise MessageTooLarge(size, self._limit)

    async def _ask(self, size: int) -> None:
        try:
            async with asyncio.timeout(WITHIN_S), self._connection.another("size") as connection:
                channel = await connection.channel(confirms=True)
                try:
                    await channel.default_exchange.publish(aio_pika.Message(bytes(size)), NOBODY, mandatory=False)
                except ChannelPreconditionFailed as error:
                    if (told := _TOLD.search(str(error))) is None:
                        raise
                    self._limit = int(told[1])
                    return
                except ChannelAccessRefused:
                    pass  # the size was checked first, so it is allowed
                self._taken = size
        except (AMQPError, OSError, RuntimeError, TimeoutError) as error:
            raise BrokerUnreachable(f"how large a message the broker takes is not known: {error}") from error
