"""How large a message the broker takes, found out before a larger one is published on a connection that others share.

RabbitMQ looks at the size of a message that has come whole (`max_message_size`: 16 MiB on 4.x, 128 MiB on 3.x, or what
the operator set) and closes the channel over a larger one; publishes that are on their way to that channel then end the
connection. It tells the limit nowhere but in that error, and before it looks at any right. So a message of the size in
question is published once, to nobody, on a connection of its own. Nothing is asked about small ones.
"""

import asyncio
import re

import aio_pika
from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelPreconditionFailed

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerUnreachable, MessageTooLarge

SMALL_BYTES = 1024 * 1024
"""Is taken by every broker that takes requests: they may be that large."""
ASKED_BYTES = 16 * 1024 * 1024
"""Asked for at once, so that one question does for all answers: the most that RabbitMQ 4 takes by default."""
WITHIN_S = 20.0
NOBODY = "lanekeeper.nobody"
"""A queue that is nowhere: what is published to it is dropped."""
_TOLD = re.compile(r"larger than configured max size (\d+)")


class MessageLimit:
    """What one connection's broker takes; forgotten when the connection is opened anew."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._asking = asyncio.Lock()
        self._taken = SMALL_BYTES
        self._limit: int | None = None
        self._opening = connection.openings

    async def check(self, size: int) -> None:
        """Raises MessageTooLarge; BrokerUnreachable where it could not be found out."""
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
                    pass  # the size was looked at before
                self._taken = size
        except (AMQPError, OSError, RuntimeError, TimeoutError) as error:
            raise BrokerUnreachable(f"how large a message the broker takes is not known: {error}") from error
