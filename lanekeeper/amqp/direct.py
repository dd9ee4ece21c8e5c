"""Direct reply-to: the broker delivers replies straight to the channel that published, without a queue.

    replies = DirectReplies()
    publisher = Publisher(connection, tracing=tracing, on_channel=replies.consume)
    with replies.expecting(message) as arrived:
        …                                          publish it
        replies.published(arrived)
        reply = await arrived.next(end=None)

The AMQP user needs no permission to declare or read any queue, and nobody else can read or guess the reply address.
Replies are not acknowledged, and each is delivered at most once. If the channel closes, all replies still expected on
it are lost.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused

from lanekeeper.amqp.driver.alarms import tap_of
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.incoming import Delivered, left_to_the_tap
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import DIRECT_REPLY_TO
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable, ReplyLost

RPC_TIMEOUT_S = 30
"""The time limit, in seconds, for beginning to consume direct replies."""
CLOSE_TIMEOUT_S = 3
"""The time limit, in seconds, for closing the channel of direct replies."""
UNREAD_BYTES = 1024 * 1024
"""How many bytes of one streamed answer may be received and not yet read by the caller. Only a caller that reads very
slowly exceeds this, because a model needs many seconds to write as much."""


class Arrivals:
    """The replies to one message that have arrived and were not read yet, in order."""

    def __init__(self) -> None:
        self._came: asyncio.Queue[Message | ReplyLost] = asyncio.Queue()  # bounded by UNREAD_BYTES and one more part
        self._unread_bytes = 0
        self._is_lost = False
        self.is_published = False
        """Whether the broker has confirmed the message to which these are the replies. If the channel is lost before
        this confirm, no reply is lost, because the message is then published again on another channel."""

    def add(self, reply: Message) -> None:
        """Add a reply. If more than `UNREAD_BYTES` are unread, this and all later replies are dropped, and the reader
        gets ReplyLost after the earlier replies."""
        if self._unread_bytes > UNREAD_BYTES:
            self.lose("its parts came faster than they were read; fetch it whole: lanekeeper result")
        elif not self._is_lost:
            self._unread_bytes += len(reply.body)
            self._came.put_nowait(reply)

    def lose(self, why: str) -> None:
        """End these replies: `next` returns those that have arrived, and then raises ReplyLost. Later replies are
        dropped."""
        if not self._is_lost:
            self._is_lost = True
            self._came.put_nowait(ReplyLost(why))

    async def next(self, *, end: float | None) -> Message:
        """Wait for the next reply. Raises ReplyLost, and TimeoutError at `end` (by the event loop's clock)."""
        if self._came.empty():
            async with asyncio.timeout_at(end):
                reply = await self._came.get()
        else:
            reply = self._came.get_nowait()  # without a timeout, which costs time
        if isinstance(reply, ReplyLost):
            raise reply
        self._unread_bytes -= len(reply.body)
        return reply


class DirectReplies:
    """Finds the caller that waits for a reply by the reply's `correlation_id`, and passes the reply to it. When the
    channel is lost, the publisher opens another, and calls `consume` with it."""

    def __init__(self) -> None:
        self._expected: dict[str, Arrivals] = {}
        self._channel: Channel | None = None

    async def consume(self, channel: Channel) -> None:
        """Start receiving replies on a channel. Pass this method to the publisher as `on_channel`, because the broker
        requires that a channel has this consumer before its first publish with a direct reply-to address.

        Raises BrokerUnreachable, AccessRefused.
        """
        tap_of(channel).on_delivery = self._on_delivery
        with border("no direct replies"):
            try:
                await channel.basic_consume(DIRECT_REPLY_TO, left_to_the_tap, no_ack=True, timeout=RPC_TIMEOUT_S)
            except ChannelAccessRefused as error:
                raise AccessRefused(str(error)) from error
        self._channel = channel
        channel.closing.add_done_callback(lambda _: self._on_lost())

    async def close(self) -> None:
        if self._channel is not None:
            with suppress(BrokerUnreachable), border("closing"):
                await self._channel.close(timeout=CLOSE_TIMEOUT_S)

    @contextmanager
    def expecting(self, message: Message) -> Iterator[Arrivals]:
        """Collect the replies to a message. Publish it inside the `with` block. Sets the message's `reply_to` and
        `correlation_id`."""
        message.reply_to = DIRECT_REPLY_TO
        message.correlation_id = uuid.uuid4().hex
        arrived = self._expected[message.correlation_id] = Arrivals()
        try:
            yield arrived
        finally:
            del self._expected[message.correlation_id]

    def published(self, arrived: Arrivals) -> None:
        """Record that the broker has confirmed the message: from now on, the loss of the channel means that the reply
        is lost."""
        arrived.is_published = True
        if self._channel is None or self._channel.is_closed:
            self._on_lost()

    def _on_delivery(self, delivered: Delivered) -> None:
        if (arrived := self._expected.get(delivered.message.correlation_id or "")) is not None:
            arrived.add(delivered.message)

    def _on_lost(self) -> None:
        for arrived in self._expected.values():
            if arrived.is_published:
                arrived.lose(
                    "the connection was lost before the answer came; ask again under the same id, or fetch it: "
                    "lanekeeper result"
                )
