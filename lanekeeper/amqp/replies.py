"""Direct reply-to: the broker delivers replies straight to the channel that published, without a queue. The user needs
no permission for any queue, and nobody else can read or guess the address. Replies are not acknowledged; if the channel
closes, all that are still expected are lost."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from lanekeeper.amqp.driver import RPC_TIMEOUT_S, close, translate_broker_errors
from lanekeeper.amqp.tolerant import message_of
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import DIRECT_REPLY_TO
from lanekeeper.contract.problems import ReplyLost
from lanekeeper.replies import Part, part_of

UNREAD_BYTES = 1024 * 1024
"""Of one streamed answer. Only a very slow caller exceeds this: a model needs many seconds to write as much."""


class Arrivals:
    """The replies to one message that have arrived and were not read yet."""

    def __init__(self) -> None:
        self._came: list[Message | Part] = []  # bounded by UNREAD_BYTES and one more part
        self._unread_bytes = 0
        self._loss: str | None = None
        self._reader: asyncio.Future[None] | None = None
        self._end: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_published = False

    def add(self, reply: Message | Part) -> None:
        """If more than `UNREAD_BYTES` are unread, later replies are dropped, and the reader gets ReplyLost. One reply
        counts at most half of it, so that a single event of any size fits."""
        if self._unread_bytes > UNREAD_BYTES:
            self.lose("its parts came faster than they were read; fetch it whole: lanekeeper result")
        elif self._loss is None:
            self._unread_bytes += _counted(reply)
            self._came.append(reply)
            self._wake()

    def lose(self, why: str) -> None:
        """The reader gets those that have arrived, and then ReplyLost."""
        if self._loss is None:
            self._loss = why
            self._wake()

    async def next(self, *, end: float | None) -> Message:
        """The next whole reply. Raises ReplyLost, and TimeoutError at `end`."""
        while True:
            await self._some(end)
            reply = self._came.pop(0)
            self._unread_bytes -= _counted(reply)
            if isinstance(reply, Message):
                return reply

    async def all(self, *, end: float | None) -> Sequence[Message | Part]:
        """All that have arrived, or else the next. Raises as `next`."""
        if not self._came:
            await self._some(end)
        came, self._came, self._unread_bytes = self._came, [], 0
        return came

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _some(self, end: float | None) -> None:
        while not self._came:
            if self._loss is not None:
                raise ReplyLost(self._loss)
            await self._wait(end)

    async def _wait(self, end: float | None) -> None:
        """One timer serves all waits: it is set again only when it has run out before the end."""
        loop = asyncio.get_running_loop()
        self._end, self._reader = end, loop.create_future()
        if end is not None and (self._timer is None or self._timer.when() > end):
            self.close()
            self._timer = loop.call_at(end, self._on_timer)
        try:
            await self._reader
        finally:
            self._reader = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._reader is None or self._reader.done() or self._end is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._end:
            self._timer = loop.call_at(self._end, self._on_timer)
        else:
            self._reader.set_exception(TimeoutError())


def _counted(reply: Message | Part) -> int:
    return min(len(reply.body), UNREAD_BYTES // 2)


class DirectReplies:
    """Passes each reply to the caller that waits for its `correlation_id`."""

    def __init__(self) -> None:
        self._expected: dict[str, Arrivals] = {}
        self._channel: Channel | None = None

    async def consume(self, channel: Channel) -> None:
        """The publisher's `on_channel`: a channel must have this consumer before its first publish with a direct reply-
        to address. Raises BrokerUnreachable, AccessRefused."""
        with translate_broker_errors("no direct replies"):
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
            arrived.close()

    def add(self, correlation_id: str | None, reply: Message | Part) -> bool:
        """False if nobody waits for it here."""
        if (arrived := self._expected.get(correlation_id or "")) is None:
            return False
        arrived.add(reply)
        return True

    def published(self, arrived: Arrivals) -> None:
        arrived.is_published = True
        if self._channel is None or self._channel.is_closed:
            self._on_lost()

    async def _on_delivery(self, found: DeliveredMessage) -> None:
        reply = message_of(found)
        kind = reply.headers.get(n.PART)
        if kind == n.SEVERAL:
            with suppress(ValueError):  # no worker's: the readers notice that parts are missing
                for line in reply.body.split(b"\n"):
                    self.add(*_part_in(line))
        else:
            self.add(reply.correlation_id, reply if kind is None else part_of(reply))

    def _on_lost(self) -> None:
        for arrived in self._expected.values():
            if arrived.is_published:
                arrived.lose(
                    "the connection was lost before the answer came; ask again under the same id, or fetch it: "
                    "lanekeeper result"
                )


def _part_in(line: bytes) -> tuple[str, Part]:
    """A line `["<correlation id>","<kind>",<seq>,<event>]`, whose event is not parsed."""
    correlation_id, kind, seq, event = line[1:-1].split(b",", 3)
    return correlation_id[1:-1].decode(), Part(
        kind="restart" if kind == b'"restart"' else "event", seq=int(seq), body=event
    )
