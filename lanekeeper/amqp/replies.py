"""Direct reply-to: the broker delivers replies straight to the channel that published, without a queue. The user needs
no permission for any queue, and nobody else can read or guess the address. Replies are not acknowledged; if the channel
closes, all that are still expected are lost."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from lanekeeper.amqp.driver import RPC_TIMEOUT_S, close, translate_errors
from lanekeeper.amqp.tolerant import message_of
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import DIRECT_REPLY_TO
from lanekeeper.contract.problems import ReplyLost

UNREAD_BYTES = 1024 * 1024
"""Of one streamed answer. Only a very slow caller exceeds this: a model needs many seconds to write as much."""


class Arrivals:
    """The replies to one message that have arrived and were not read yet."""

    def __init__(self) -> None:
        self._came: asyncio.Queue[Message | ReplyLost] = asyncio.Queue()  # bounded by UNREAD_BYTES and one more part
        self._unread_bytes = 0
        self._is_lost = False
        self.is_published = False

    def add(self, reply: Message) -> None:
        """If more than `UNREAD_BYTES` are unread, later replies are dropped, and the reader gets ReplyLost. One reply
        counts at most half of it, so that a single event of any size fits."""
        if self._unread_bytes > UNREAD_BYTES:
            self.lose("its parts came faster than they were read; fetch it whole: lanekeeper result")
        elif not self._is_lost:
            self._unread_bytes += _counted(reply)
            self._came.put_nowait(reply)

    def lose(self, why: str) -> None:
        """`next` returns those that have arrived, and then raises ReplyLost."""
        if not self._is_lost:
            self._is_lost = True
            self._came.put_nowait(ReplyLost(why))

    async def next(self, *, end: float | None) -> Message:
        if self._came.empty():
            async with asyncio.timeout_at(end):
                reply = await self._came.get()
        else:
            reply = self._came.get_nowait()  # without a timeout, which costs time
        if isinstance(reply, ReplyLost):
            raise reply
        self._unread_bytes -= _counted(reply)
        return reply


def _counted(reply: Message) -> int:
    return min(len(reply.body), UNREAD_BYTES // 2)


class DirectReplies:
    """Passes each reply to the caller that waits for its `correlation_id`."""

    def __init__(self) -> None:
        self._expected: dict[str, Arrivals] = {}
        self._channel: Channel | None = None

    async def consume(self, channel: Channel) -> None:
        """The publisher's `on_channel`: a channel must have this consumer before its first publish with a direct reply-
        to address. Raises BrokerUnreachable, AccessRefused."""
        with translate_errors("no direct replies"):
            await channel.basic_consume(DIRECT_REPLY_TO, self._on_delivery, no_ack=True, timeout=RPC_TIMEOUT_S)
        self._channel = channel
        channel.closing.add_done_callback(lambda _: self._on_lost())

    async def close(self) -> None:
        if self._channel is not None:
            await close(self._channel)

    @contextmanager
    def expecting(self, message: Message) -> Iterator[Arrivals]:
        message.reply_to = DIRECT_REPLY_TO
        message.correlation_id = uuid.uuid4().hex
        arrived = self._expected[message.correlation_id] = Arrivals()
        try:
            yield arrived
        finally:
            del self._expected[message.correlation_id]

    def published(self, arrived: Arrivals) -> None:
        arrived.is_published = True
        if self._channel is None or self._channel.is_closed:
            self._on_lost()

    async def _on_delivery(self, found: DeliveredMessage) -> None:
        reply = message_of(found)
        if (arrived := self._expected.get(reply.correlation_id or "")) is not None:
            arrived.add(reply)

    def _on_lost(self) -> None:
        for arrived in self._expected.values():
            if arrived.is_published:
                arrived.lose(
                    "the connection was lost before the answer came; ask again under the same id, or fetch it: "
                    "lanekeeper result"
                )
