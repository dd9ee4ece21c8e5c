"""Receives replies by RabbitMQ's direct reply-to: on the same channel on which the client publishes its requests.

    publisher = Publisher(connection, tracing=tracing, on_channel=replies.direct.consume)
    with replies.expecting(message) as arrived:
        …                                          publish it
        replies.published(arrived)
        reply = await next_of(arrived, end=None)

The broker's user needs no permission to declare or read any queue, and nobody else can read or guess the reply address.
If the channel closes, all replies still expected on it are lost.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from lanekeeper.amqp.direct import DirectReplies
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import DIRECT_REPLY_TO
from lanekeeper.contract.problems import BrokerError
from lanekeeper.errors import ReplyLost

UNREAD_BYTES = 1024 * 1024
"""How many bytes of one streamed answer may be received and not yet read by the caller. A model needs many seconds to
write as much."""


class Arrivals:
    """The replies to one message that have arrived and were not read yet, in order."""

    def __init__(self) -> None:
        self._came: asyncio.Queue[Message | BrokerError] = asyncio.Queue()  # bounded by UNREAD_BYTES and one more part
        self._unread_bytes = 0
        self._is_lost = False
        self.is_published = False
        """Whether the broker has confirmed the message. Before that, losing the channel loses no reply to it."""

    def add(self, reply: Message) -> None:
        """Add a reply. If more than `UNREAD_BYTES` are unread, this and all later replies are dropped, and the reader
        gets ReplyLost after the earlier ones."""
        if self._unread_bytes > UNREAD_BYTES:
            self.lose(ReplyLost("its parts came faster than they were read; fetch it whole: lanekeeper result"))
        elif not self._is_lost:
            self._unread_bytes += len(reply.body)
            self._came.put_nowait(reply)

    def lose(self, error: ReplyLost) -> None:
        """End these replies with `error`: `next` returns the replies that have arrived, and then raises it. Later
        replies are dropped."""
        if not self._is_lost:
            self._is_lost = True
            self._came.put_nowait(error)

    @property
    def has_next(self) -> bool:
        return not self._came.empty()

    async def next(self) -> Message:
        """Wait for the next reply and return it. Raises ReplyLost."""
        reply = await self._came.get()
        if isinstance(reply, BrokerError):
            raise reply
        self._unread_bytes -= len(reply.body)
        return reply


class ReplyQueue:
    """Passes each reply that arrives to the caller that waits for it, by the correlation id."""

    def __init__(self) -> None:
        self._expected: dict[str, Arrivals] = {}
        self.direct = DirectReplies(on_reply=self._on_reply, on_lost=self._on_lost)
        """The consumer of replies. Pass its `consume` as `on_channel` to the publisher of the requests."""

    @contextmanager
    def expecting(self, message: Message) -> Iterator[Arrivals]:
        """Collect the replies to a message, which is to be published inside the block. Sets the message's `reply_to`
        and `correlation_id`."""
        message.reply_to = DIRECT_REPLY_TO
        message.correlation_id = uuid.uuid4().hex
        arrived = self._expected[message.correlation_id] = Arrivals()
        try:
            yield arrived
        finally:
            del self._expected[message.correlation_id]

    def published(self, arrived: Arrivals) -> None:
        """Note that the broker has confirmed the message: from now on, the loss of the channel means that the reply is
        lost."""
        arrived.is_published = True
        if not self.direct.is_open:
            arrived.lose(_lost())

    def _on_reply(self, message: Message) -> None:
        if (arrived := self._expected.get(message.correlation_id or "")) is not None:
            arrived.add(message)

    def _on_lost(self) -> None:
        for arrived in self._expected.values():
            if arrived.is_published:
                arrived.lose(_lost())


async def next_of(arrived: Arrivals, *, end: float | None) -> Message:
    """Wait for the next reply. Raises ReplyLost, and TimeoutError at `end` (by the event loop's clock)."""
    if arrived.has_next:  # without a timeout, which costs time
        return await arrived.next()
    async with asyncio.timeout_at(end):
        return await arrived.next()


def _lost() -> ReplyLost:
    return ReplyLost(
        "the connection was lost before the answer came; ask again under the same id, or fetch it: lanekeeper result"
    )
