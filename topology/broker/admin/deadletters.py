"""Fetches the oldest messages of a queue one by one. Each can be removed; the others return to their places in the
queue when the `async with` block ends.

async with OldestMessages(connection, queue) as oldest:
    while (letter := await oldest.take()) is not None: …
        await oldest.remove(letter)
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.frames import message_of
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable

RPC_TIMEOUT_S = 10
"""The time limit, in seconds, for one operation on the queue of dead letters, such as fetching one message."""


@dataclass(frozen=True, slots=True)
class FetchedMessage:
    """A message that was fetched with `basic.get` and not acknowledged yet. Until it is returned to the queue, the
    broker delivers it to no other client. `behind`: how many messages wait in the queue after it. `tag`: its delivery
    tag."""

    message: Message
    behind: int
    tag: int


class OldestMessages:
    """Fetches the messages of a queue with `basic.get`, the oldest first. Several processes may do this at the same
    time: each message goes to one of them."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self._queue = queue
        self._channel: Channel

    async def __aenter__(self) -> Self:
        self._channel = await self._connection.channel(confirms=False, timeout_s=RPC_TIMEOUT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel; the messages that were fetched and not removed return to the queue."""
        with suppress(BrokerUnreachable), border("closing"):
            await self._channel.close(timeout=RPC_TIMEOUT_S)

    async def take(self) -> FetchedMessage | None:
        """Fetch the oldest message that no process has fetched. Returns None if there is none. Raises AccessRefused,
        BrokerUnreachable."""
        try:
            with border(f"cannot read {self._queue!r}"):
                got = await self._channel.basic_get(self._queue, timeout=RPC_TIMEOUT_S)
        except BrokerUnreachable as error:
            if isinstance(error.__cause__, ChannelAccessRefused):
                raise AccessRefused(str(error)) from error
            raise
        found = got.delivery
        if not isinstance(found, Basic.GetOk):
            return None
        return FetchedMessage(message_of(got), behind=found.message_count or 0, tag=found.delivery_tag or 0)

    async def remove(self, letter: FetchedMessage) -> None:
        """Remove a message from the queue. Raises BrokerUnreachable; the message may then still be in the queue."""
        with border(f"channel lost before a message of {self._queue} was removed"):
            await self._channel.basic_ack(letter.tag, wait=True)
