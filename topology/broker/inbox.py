"""An exclusive queue, which receives replies, or the control messages that go to all workers. The broker chooses the
queue's name, and deletes the queue when the connection closes.

async with Inbox(connection) as inbox:
    reply_to = inbox.name
    async for message in inbox: …                   raises ChannelLost when the queue is lost
"""

from contextlib import suppress
from typing import Self

from aiormq.channel import Channel

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import border
from lanekeeper.contract.messages import Message
from topology.broker.session import RPC_TIMEOUT_S, ChannelLost, Session

WAITING = 1000
"""The prefetch of a queue for replies or control messages: how many messages may wait in this process until they are
read. Further messages wait on the broker."""


class Inbox:
    """Declares an exclusive queue with a name from the broker, and iterates over its messages; a message is
    acknowledged when it is read. `bindings`: the queue's bindings, as pairs of an exchange and a routing key."""

    def __init__(self, connection: Connection, *, bindings: tuple[tuple[str, str], ...] = ()) -> None:
        self._connection = connection
        self._bindings = bindings
        self._channel: Channel
        self._session: Session
        self.name = ""
        """The queue's name, as the broker gave it (`amq.gen-…`)."""

    async def __aenter__(self) -> Self:
        """Declare the queue, bind it, and begin to consume it. Raises BrokerUnreachable."""
        self._channel = await self._connection.channel(confirms=False)
        with border("no queue of one's own"):
            declared = await self._channel.queue_declare(exclusive=True, auto_delete=True, timeout=RPC_TIMEOUT_S)
            self.name = declared.queue or ""
            await self.bind()
            self._session = Session(self._channel, queue=self.name, counted=False)
            await self._session.start(prefetch=WAITING)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def bind(self) -> None:
        """Make the bindings of the queue. Call it again if an exchange was deleted and declared again, because the
        exchange's bindings are lost then. Raises BrokerUnreachable."""
        with border("cannot bind"):
            for exchange, routing_key in self._bindings:
                await self._channel.queue_bind(self.name, exchange, routing_key, timeout=RPC_TIMEOUT_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        delivery = await anext(self._session)
        with suppress(ChannelLost):  # a message without an acknowledgement is lost with the queue
            await delivery.ack()
        return delivery.message
