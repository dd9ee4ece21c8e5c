"""An exclusive queue, which the broker names and deletes with its connection. It receives replies, and questions that
go to all workers.

async with Inbox(connection) as inbox:
    reply_to = inbox.name
    async for message in inbox: …                   ends with ChannelLost when the queue was deleted
"""

import asyncio
from contextlib import suppress
from typing import Self

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.frames import message_of
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable
from topology.broker.session import CLOSE_TIMEOUT_S, RPC_TIMEOUT_S, ChannelLost

WAITING = 1000
"""The prefetch of a queue for replies or questions: how many messages may wait in this process until they are read.
Further messages wait on the broker."""
TOGETHER = 50
"""One frame acknowledges at most this many messages. To acknowledge several at once saves a third of the CPU time under
load (docs/facts.md, section 12)."""


class Inbox:
    """Declares an exclusive queue with a name from the broker, and iterates over its messages; a message is
    acknowledged when it is read. `bindings`: the queue's bindings, as pairs of an exchange and a routing key."""

    def __init__(self, connection: Connection, *, bindings: tuple[tuple[str, str], ...] = ()) -> None:
        self._connection = connection
        self._bindings = bindings
        self._channel: Channel | None = None
        self._arrived: asyncio.Queue[DeliveredMessage | None] = asyncio.Queue()  # bounded by the prefetch
        self._unacknowledged = 0
        self.name = ""
        """The queue's name, as the broker gave it (`amq.gen-…`)."""

    async def __aenter__(self) -> Self:
        """Declare the queue, bind it, and begin to consume it. Raises BrokerUnreachable."""
        channel = self._channel = await self._connection.raw_channel(confirms=False)
        channel.closing.add_done_callback(lambda _: self._arrived.put_nowait(None))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._arrived.put_nowait(None))
        with border("no queue of one's own"):
            declared = await channel.queue_declare(exclusive=True, auto_delete=True, timeout=RPC_TIMEOUT_S)
            self.name = declared.queue or ""
            await self.bind()
            await channel.basic_qos(prefetch_count=WAITING, timeout=RPC_TIMEOUT_S)
            await channel.basic_consume(self.name, self._on_delivery, timeout=RPC_TIMEOUT_S)
        return self

    async def bind(self) -> None:
        """Make the bindings of the queue. Call it again if an exchange was deleted and declared again, because its
        bindings are lost then. Raises BrokerUnreachable."""
        assert self._channel is not None
        with border("cannot bind"):
            for exchange, routing_key in self._bindings:
                await self._channel.queue_bind(self.name, exchange, routing_key, timeout=RPC_TIMEOUT_S)

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            with suppress(BrokerUnreachable), border("closing"):
                await self._channel.close(timeout=CLOSE_TIMEOUT_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        delivered = await self._arrived.get()
        channel = self._channel
        if delivered is None or channel is None:
            self._arrived.put_nowait(None)  # so that another reader's wait ends too
            raise ChannelLost(f"{self.name}: the queue is gone with its connection")
        self._unacknowledged += 1
        if self._arrived.empty() or self._unacknowledged >= TOGETHER:
            self._unacknowledged = 0
            assert isinstance(delivered.delivery, Basic.Deliver)
            with suppress(BrokerUnreachable), border("acknowledging"):
                await channel.basic_ack(delivered.delivery.delivery_tag or 0, multiple=True, wait=False)
        return message_of(delivered)

    async def _on_delivery(self, delivered: DeliveredMessage) -> None:
        self._arrived.put_nowait(delivered)
