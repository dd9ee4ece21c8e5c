"""A session is the stream of deliveries of one queue on one channel. A delivery is a message that was delivered and
must be settled (acknowledged, or returned to its queue)."""

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
"""The time limit, in seconds, for setting the prefetch of a channel, and for beginning and ending to consume."""
CLOSE_TIMEOUT_S = 3
"""The time limit, in seconds, for closing a channel, so that a broker that does not answer delays a stopping worker
only briefly."""


class ChannelLost(BrokerError):
    """The channel on which a message was delivered is lost. Messages that were not settled on it cannot be settled any
    more; the broker delivers them again."""


class Delivery:
    """A message that was delivered and must be settled by `ack`, `nack` or `reject`."""

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
        """How often the message was delivered without being acknowledged, including this time; None if the queue does
        not count deliveries (classic queues).

        The broker's header (`x-delivery-count`) is used only if the message is redelivered and the queue counts
        deliveries; otherwise a requester can forge the header (docs/facts.md, section 7). From RabbitMQ 4.3 on, a
        message that was only returned by nack does not have this header, so it counts as delivered once.
        """
        if not self.redelivered:
            return 1
        headers = self.message.headers
        count = headers.get(names.DELIVERY_COUNT, 0 if names.ACQUIRED_COUNT in headers else None)
        return count + 1 if self._counted and isinstance(count, int) else None

    async def ack(self) -> None:
        """Acknowledge the message. Raises ChannelLost if the channel is lost; the broker then delivers it again."""
        await self._settle(self._channel.basic_ack(self.tag, wait=False))

    async def reject(self) -> None:
        """Return the message to its queue, and let the broker count this as a failed delivery (towards the queue's
        delivery limit; docs/facts.md, section 7)."""
        await self._settle(self._channel.basic_reject(self.tag, requeue=True, wait=False))

    async def nack(self) -> None:
        """Return the message to its queue. RabbitMQ 4.3 does not count this towards the queue's delivery limit, so use
        it if the message is not the cause of the failure."""
        await self._settle(self._channel.basic_nack(self.tag, requeue=True, wait=False))

    async def _settle(self, call: Awaitable[None]) -> None:
        with border(f"channel lost before {self.queue} delivery {self.tag} was settled", lost=ChannelLost):
            await call


class Session:
    """Consumes one queue on one channel: an iterator over the deliveries. Iterating ends after `stop`, and raises
    ChannelLost if the channel is lost."""

    def __init__(self, channel: Channel, *, queue: str, counted: bool) -> None:
        self._channel = channel
        self._queue = queue
        self._counted = counted
        self._tag: str | None = None
        self._consume_lock = asyncio.Lock()
        self._arrived: asyncio.Queue[Delivery | None] = asyncio.Queue()  # bounded by the prefetch
        self._lost: str | None = None
        self._stopped = False
        self.cancelled = False
        """Whether the broker has ended this consumer, because the queue was deleted, its leader moved, or the consumer
        timeout was reached."""

    async def start(self, *, prefetch: int) -> None:
        self._channel.closing.add_done_callback(self._on_closed)
        self._channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        await self._channel.basic_qos(prefetch_count=prefetch, timeout=RPC_TIMEOUT_S)
        await self._consume()

    async def stop(self) -> None:
        """Stop consuming for good. Messages that were delivered can still be settled."""
        if self._stopped or self._lost is not None:
            return
        self._stopped = True
        await self.pause()
        self._arrived.put_nowait(None)

    async def pause(self) -> None:
        """Stop consuming until `resume`. Messages that were delivered can still be settled."""
        async with self._consume_lock:
            if self._lost is None and (tag := self._tag) is not None:
                self._tag = None
                with suppress(BrokerUnreachable), border("cancelling"):
                    await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT_S)

    async def resume(self) -> None:
        """Consume again after `pause`, under a new consumer tag, because the broker may still use the old one."""
        async with self._consume_lock:
            if self._lost is None and self._tag is None and not self._stopped:
                with suppress(BrokerUnreachable), border(f"cannot consume {self._queue!r}"):
                    await self._consume()  # if this fails, the channel closes, and the session with it

    async def _consume(self) -> None:
        tap_of(self._channel).on_delivery = self._on_delivery
        consuming = await self._channel.basic_consume(self._queue, left_to_the_tap, timeout=RPC_TIMEOUT_S)
        self._tag = consuming.consumer_tag or ""

    async def ack(self, deliveries: Sequence[Delivery], *, in_hand: Collection[int] = ()) -> None:
        """Acknowledge several deliveries in one write, because separate writes take most of the CPU time under high
        load. `in_hand`: the delivery tags of other messages on this channel, which must not be acknowledged yet. The
        deliveries whose tags are lower than all tags of `in_hand` are acknowledged by a single frame (AMQP's flag
        `multiple`). Raises ChannelLost."""
        if self._lost is not None:
            raise ChannelLost(f"{self._queue}: {self._lost}")
        tags = sorted(delivery.tag for delivery in deliveries)
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
        """How many deliveries have arrived and were not yet returned by the iterator."""
        return self._arrived.qsize()

    def __aiter__(self) -> "Session":
        return self

    async def __anext__(self) -> Delivery:
        delivery = await self._arrived.get()
        if self._lost is not None:  # the broker delivers the unsettled messages again, also those in `_arrived`
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
