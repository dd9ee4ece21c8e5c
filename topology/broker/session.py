"""A session is the stream of deliveries on one channel of a queue. A delivery is one delivered message, until it is
settled."""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress

from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp.commands import Basic

from lanekeeper.amqp.driver.alarms import tap_of
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.incoming import Delivered, left_to_the_tap
from lanekeeper.contract import names
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable

RPC_TIMEOUT_S = 30
CLOSE_TIMEOUT_S = 3
"""A broker that hangs delays a `stop` by no more than this."""


class ChannelLost(BrokerError):
    """The channel of a delivery is gone. The broker delivers again what was not acknowledged on it."""


class Delivery:
    """One message that was delivered and has to be settled: ack, nack or reject."""

    __slots__ = ("_channel", "_counted", "message", "queue", "redelivered", "tag")

    def __init__(self, delivered: Delivered, *, queue: str, channel: Channel, counted: bool = True) -> None:
        self.message: Message = delivered.message
        self.queue = queue
        self.redelivered = delivered.redelivered
        self.tag = delivered.tag
        self._channel = channel
        self._counted = counted

    @property
    def times_delivered(self) -> int | None:
        """How often it was delivered without being settled, this time included; None if the queue does not count
        (classic queues).

        Believed only on a redelivered message of a queue that counts: elsewhere the header can be forged
        (docs/facts.md, section 7). On 4.3 a message that was only returned by nack has no delivery count.
        """
        if not self.redelivered:
            return 1
        headers = self.message.headers
        count = headers.get(names.DELIVERY_COUNT, 0 if names.ACQUIRED_COUNT in headers else None)
        return count + 1 if self._counted and isinstance(count, int) else None

    async def ack(self) -> None:
        """Acknowledge it. Raises ChannelLost if the channel is gone; the broker then delivers it again."""
        await self._settle(self._channel.basic_ack(self.tag, wait=False))

    async def reject(self) -> None:
        """Return the message to its queue; the broker counts this as a delivery (docs/facts.md, section 7)."""
        await self._settle(self._channel.basic_reject(self.tag, requeue=True, wait=False))

    async def nack(self) -> None:
        """Return the message to its queue. RabbitMQ 4.3 does not count this as a delivery; use it if the message is not
        at fault."""
        await self._settle(self._channel.basic_nack(self.tag, requeue=True, wait=False))

    async def _settle(self, call: Awaitable[None]) -> None:
        with border(f"channel lost before {self.queue} delivery {self.tag} was settled", lost=ChannelLost):
            await call


class Session:
    """The deliveries of one channel. Iterating ends when it is stopped, and raises ChannelLost when it is lost."""

    def __init__(self, channel: Channel, *, queue: str, counted: bool) -> None:
        self._channel = channel
        self._queue = queue
        self._counted = counted
        self._tag: str | None = None
        self._turn = asyncio.Lock()
        self._arrived: asyncio.Queue[Delivery | None] = asyncio.Queue()  # bounded by the prefetch
        self._lost: str | None = None
        self._stopped = False
        self.cancelled = False
        """The broker ended the consumer: the queue was deleted, its leader moved, or the consumer timeout was
        reached."""

    async def start(self, *, prefetch: int) -> None:
        self._channel.closing.add_done_callback(self._on_closed)
        self._channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        await self._channel.basic_qos(prefetch_count=prefetch, timeout=RPC_TIMEOUT_S)
        await self._consume()

    async def stop(self) -> None:
        """Take no more; what was delivered can still be settled."""
        if self._stopped or self._lost is not None:
            return
        self._stopped = True
        await self.pause()
        self._arrived.put_nowait(None)

    async def pause(self) -> None:
        """Stop consuming. What was delivered can still be settled."""
        async with self._turn:
            if self._lost is None and (tag := self._tag) is not None:
                self._tag = None
                with suppress(BrokerUnreachable), border("cancelling"):
                    await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT_S)

    async def resume(self) -> None:
        """After `pause`: consume again under a new tag, because the broker may still know the old one."""
        async with self._turn:
            if self._lost is None and self._tag is None and not self._stopped:
                with suppress(BrokerUnreachable), border(f"cannot consume {self._queue!r}"):
                    await self._consume()  # if this fails, the channel closes, and the session with it

    async def _consume(self) -> None:
        tap_of(self._channel).on_delivery = self._on_delivery
        consuming = await self._channel.basic_consume(self._queue, left_to_the_tap, timeout=RPC_TIMEOUT_S)
        self._tag = consuming.consumer_tag or ""

    async def ack(self, deliveries: Sequence[Delivery], *, in_hand: Collection[int] = ()) -> None:
        """Acknowledge several in one write: a write for each takes most of the time under a flood. All tags before the
        first one that is still `in_hand` are acknowledged together. Raises ChannelLost."""
        if self._lost is not None:
            raise ChannelLost(f"{self._queue}: {self._lost}")
        tags = sorted(each.tag for each in deliveries)
        before = bisect_left(tags, min(in_hand, default=tags[-1] + 1))
        frames = [Basic.Ack(delivery_tag=tag) for tag in tags[before:]]
        if before:
            frames.append(Basic.Ack(delivery_tag=tags[before - 1], multiple=True))
        written = ChannelFrame.marshall(channel_number=self._channel.number, frames=frames)
        with border(f"channel lost before {self._queue} deliveries were settled", lost=ChannelLost):
            await self._channel.write_queue.put(written)

    async def close(self) -> None:
        with suppress(BrokerUnreachable), border("closing"):
            await self._channel.close(timeout=CLOSE_TIMEOUT_S)

    @property
    def waiting(self) -> int:
        """How many deliveries have arrived and not been taken yet."""
        return self._arrived.qsize()

    def __aiter__(self) -> "Session":
        return self

    async def __anext__(self) -> Delivery:
        delivery = await self._arrived.get()
        if self._lost is not None:  # the broker delivers messages again even if they have arrived here
            raise ChannelLost(f"{self._queue}: {self._lost}")
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    def _on_delivery(self, delivered: Delivered) -> None:
        self._arrived.put_nowait(Delivery(delivered, queue=self._queue, channel=self._channel, counted=self._counted))

    def _on_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self._end(f"channel closed: {error or 'connection lost'}")

    def _on_cancelled(self, frame: Basic.Cancel) -> None:
        self.cancelled = True
        self._end("the broker cancelled the consumer (queue deleted, or its leader moved)")

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._arrived.put_nowait(None)
