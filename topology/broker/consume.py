"""Takes messages from queues: consumes a queue (`Deliveries`), receives in a queue of one's own (`Inbox`).

    async for session in deliveries.sessions():         each session has one channel
        async for delivery in session:                  raises ChannelLost if the channel is lost; ends after `stop`
            …
            await delivery.ack()

The broker delivers the unsettled messages of a lost channel again, so work on them must stop. If the inner loop is in a
TaskGroup, `ChannelLost` ends the group, and with it the tasks that work on these messages.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import structlog
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver import RPC_TIMEOUT_S, Delivered, close, delivered, fetch, translate_broker_errors
from lanekeeper.backoff import pause_s
from lanekeeper.contract import names
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, TopologyMismatch
from lanekeeper.telemetry import signals
from topology.broker.memory import HELD_BYTES, HeldBytes, WaitingForRoom, size_of

OPEN_TIMEOUT_S = 5
"""If `stop` is called while a channel is opened, it takes effect only when the channel is open or this time is over."""
BACKOFF_CAP_S = 5.0
SHORT_S = 10
"""If a channel is lost so soon after it was opened, the pause before the next one gets longer."""
WAITING = 1000
log = structlog.get_logger()


class ChannelLost(BrokerError):
    """What was not settled on the channel cannot be settled any more; the broker delivers it again."""


class Delivery:
    """A message that was delivered and must be settled by `ack`, `nack` or `reject`. `cut_bytes`: the size of a body
    that was larger than its queue allows, and was dropped. `session`: counts its bytes; None: nobody does."""

    __slots__ = (
        "_channel", "_counted", "_is_settled", "_session", "cut_bytes", "message", "queue", "redelivered", "tag",
    )  # fmt: skip

    def __init__(
        self,
        delivered: Delivered,
        *,
        queue: str,
        channel: Channel,
        counted: bool = True,
        cut_bytes: int = 0,
        session: "Session | None" = None,
    ) -> None:
        self.message: Message = delivered.message
        self.cut_bytes = cut_bytes
        self._session = session
        self.queue = queue
        self.redelivered = delivered.redelivered
        self.tag = delivered.tag
        self._channel = channel
        self._counted = counted
        self._is_settled = False

    @property
    def times_delivered(self) -> int | None:
        """How often the message was delivered without being acknowledged, including this time; None if the queue does
        not count deliveries (classic queues).

        The header `x-delivery-count` is used only if the message is redelivered and the queue counts; otherwise a
        requester can forge it (docs/facts.md, section 7). From RabbitMQ 4.3 on, a message that was only returned by
        nack does not have this header, so it counts as delivered once.
        """
        if not self.redelivered:
            return 1
        headers = self.message.headers
        count = headers.get(names.DELIVERY_COUNT, 0 if names.ACQUIRED_COUNT in headers else None)
        return count + 1 if self._counted and isinstance(count, int) else None

    async def room(self, size: int) -> None:
        """Before so many bytes are loaded for this delivery: wait until this process may hold them. Call it at most
        once, because what two deliveries hold could be what both wait for. Until it is settled they count."""
        if self._session is not None:
            await self._session.room(self.tag, size)

    def count(self, size: int) -> None:
        """Count bytes that are in memory for this delivery already, until it is settled."""
        if self._session is not None:
            self._session.count(self.tag, size)

    async def ack(self) -> None:
        await self._settle(lambda: self._channel.basic_ack(self.tag, wait=False))

    async def reject(self) -> None:
        """Return the message to its queue, and let the broker count a failed delivery."""
        await self._settle(lambda: self._channel.basic_reject(self.tag, requeue=True, wait=False))

    async def nack(self) -> None:
        """Return the message to its queue. RabbitMQ 4.3 does not count this: use it if the message is not the cause of
        the failure."""
        await self._settle(lambda: self._channel.basic_nack(self.tag, requeue=True, wait=False))

    async def _settle(self, call: Callable[[], Awaitable[None]]) -> None:
        if self._is_settled:  # as after an error that comes later: the broker would close the channel, with all others
            return
        self._is_settled = True
        if self._session is not None:
            self._session.on_settled(self.tag)
        with translate_broker_errors(
            f"channel lost before {self.queue} delivery {self.tag} was settled", lost=ChannelLost
        ):
            await call()


Take = Callable[[Delivery], Coroutine[object, object, None]]


async def supervised(take: Take, delivery: Delivery, *, on_fault: Take) -> None:
    """Take a delivery so that nothing in it can end the process: `on_fault` settles it after an error that nobody
    foresaw. Every loop that consumes a queue takes its deliveries so."""
    try:
        await take(delivery)
    except Exception:
        log.exception(signals.HANDLER_FAILED, where=delivery.queue)
        try:
            await on_fault(delivery)
        except Exception:  # it is delivered again when the channel closes
            log.exception(signals.HANDLER_FAILED, where=delivery.queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of the bytes that this process may hold, those of one holder. `most_bytes`: the body of a larger message is
    dropped when it is delivered. `weight`: how many bytes a message's body takes, also unpacked."""

    held: HeldBytes
    holder: str
    most_bytes: int
    weight: Callable[[Message], int] = lambda message: len(message.body)

    @property
    def holder_of_loaded(self) -> str:
        return f"{self.holder}, loaded"

    def size(self, message: Message) -> int:
        return self.most(self.weight(message) + size_of(message.headers))

    def most(self, size: int) -> int:
        """Never so large that there could be no room for it."""
        return min(size, self.held.at_most // 2)


class Session:
    """Consumes one queue on one channel: an iterator over the deliveries, which ends after `stop`, and raises
    ChannelLost if the channel is lost."""

    def __init__(self, channel: Channel, *, queue: str, counted: bool, share: Share) -> None:
        self._channel = channel
        self._queue = queue
        self._counted = counted
        self._share = share
        self._held: dict[int, int] = {}
        """How many bytes are held for each message that is not settled, by its tag."""
        self._loaded: dict[int, int] = {}
        """For how many bytes more it got room, to load them from elsewhere. They are another holder's: a lane whose
        messages all wait for such room does not hold what they wait for."""
        self._without_room: dict[int, WaitingForRoom] = {}
        self._tag: str | None = None
        self.prefetch = 0
        """That of its consumer, or of the last one."""
        self._consume_lock = asyncio.Lock()
        self._arrived: asyncio.Queue[Delivery | None] = asyncio.Queue()  # bounded by the prefetch
        self._lost: str | None = None
        self._stopped = False
        self.cancelled = False
        """The broker has ended this consumer: the queue was deleted, its leader moved, or the consumer timeout was
        reached."""

    async def start(self, *, prefetch: int) -> None:
        self._channel.closing.add_done_callback(self._on_closed)
        self._channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        await self._consume(prefetch)

    async def stop(self) -> None:
        if self._stopped or self._lost is not None:
            return
        self._stopped = True
        await self.pause()
        self._arrived.put_nowait(None)

    async def pause(self) -> None:
        async with self._consume_lock:
            if self._lost is None and (tag := self._tag) is not None:
                self._tag = None
                with suppress(BrokerError), translate_broker_errors("cancelling"):
                    await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT_S)
                for delivered, waiting in list(self._without_room.items()):
                    if self._without_room.pop(delivered, None) is not None:
                        self._share.held.forget(waiting)
                        await self._nack(delivered)

    async def resume(self, *, prefetch: int) -> None:
        """Consume again, under a new consumer tag, because the broker may still use the old one."""
        async with self._consume_lock:
            if self._lost is None and self._tag is None and not self._stopped:
                with suppress(BrokerError), translate_broker_errors(f"cannot consume {self._queue!r}"):
                    await self._consume(prefetch)  # if this fails, the channel closes, and the session with it

    async def _consume(self, prefetch: int) -> None:
        if prefetch != self.prefetch:
            await self._channel.basic_qos(prefetch_count=prefetch, timeout=RPC_TIMEOUT_S)
            self.prefetch = prefetch
        consuming = await self._channel.basic_consume(self._queue, self._on_delivery, timeout=RPC_TIMEOUT_S)
        self._tag = consuming.consumer_tag or ""

    async def close(self) -> None:
        await close(self._channel)

    async def room(self, tag: int, size: int) -> None:
        held, holder, size = self._share.held, self._share.holder_of_loaded, self._share.most(size)
        has_room = asyncio.get_running_loop().create_future()

        def on_room() -> None:
            if tag in self._held:
                self._loaded[tag] = size
            else:  # it was settled, or the channel was lost, meanwhile
                held.release(holder, size)
            if not has_room.done():
                has_room.set_result(None)

        if held.take(holder, self._queue, size, redelivered=False):
            on_room()
            return
        waiting = held.wait(holder, size, on_room)
        try:
            await has_room
        finally:
            held.forget(waiting)

    def count(self, tag: int, size: int) -> None:
        if tag in self._held:
            self._held[tag] += size
            self._share.held.add(self._share.holder, size)

    @property
    def waiting(self) -> int:
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

    @property
    def is_short_of_room(self) -> bool:
        return bool(self._without_room)

    async def _on_delivery(self, message: DeliveredMessage) -> None:
        if self._lost is not None:  # what is counted now, nobody would release
            return
        found = delivered(message)
        if (delivery := self._taken(found)) is not None:
            self._arrived.put_nowait(delivery)
        else:
            tag, share, size = found.tag, self._share, self._share.size(found.message)
            self._without_room[tag] = share.held.wait(
                share.holder, size, partial(self._give_back, tag, size), after_long=partial(self._return, tag)
            )

    def _taken(self, found: Delivered) -> Delivery | None:
        """The delivery, without its body if this is too large. None: there is no room for it."""
        message, share, cut_bytes = found.message, self._share, 0
        if len(message.body) > share.most_bytes:
            cut_bytes, message.body = len(message.body), b""
        size = share.size(message)
        if not share.held.take(share.holder, self._queue, size, redelivered=found.redelivered):
            return None
        self._held[found.tag] = size
        return Delivery(
            found,
            queue=self._queue,
            channel=self._channel,
            counted=self._counted,
            cut_bytes=cut_bytes,
            session=self,
        )

    def on_settled(self, tag: int) -> None:
        share = self._share
        if (size := self._held.pop(tag, None)) is not None:
            share.held.release(share.holder, size)
        if (loaded := self._loaded.pop(tag, None)) is not None:
            share.held.release(share.holder_of_loaded, loaded)

    def _give_back(self, tag: int, size: int) -> None:
        self._share.held.expect(self._share.holder, self._queue, size)
        self._return(tag)

    def _return(self, tag: int) -> None:
        self._without_room.pop(tag, None)
        self._channel.create_task(self._nack(tag))

    async def _nack(self, tag: int) -> None:
        with (
            suppress(ChannelLost),
            translate_broker_errors(f"channel lost before {self._queue} delivery {tag}", lost=ChannelLost),
        ):
            await self._channel.basic_nack(tag, requeue=True, wait=False)

    def _on_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self._end(f"channel closed: {error or 'connection lost'}")

    def _on_cancelled(self, frame: Basic.Cancel) -> None:
        self.cancelled = True
        self._end("the broker cancelled the consumer (queue deleted, or its leader moved)")

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            while self._without_room:
                self._share.held.forget(self._without_room.popitem()[1])
            while self._held:
                self.on_settled(next(iter(self._held)))
            self._arrived.put_nowait(None)


class Deliveries:
    """Consumes a queue until `stop` is called. When the channel is lost, it opens another, with growing pauses between
    the tries.

    `counted`: whether the queue counts how often each message is delivered (quorum queues do). `on_missing` is called
    if the queue does not exist, or if the broker ended the consumer. `held`: what this process holds, and in it
    `holder` (None: the queue). `most_bytes`: the body of a larger message is dropped. `weight`: how many bytes a body
    takes, also unpacked.
    """

    brake: str | None = None
    """Why it is paused by an operator: never, where it is used without a pool."""

    def __init__(
        self,
        connection: Connection,
        *,
        queue: str,
        prefetch: int,
        counted: bool = True,
        on_missing: Callable[[], None] = lambda: None,
        held: HeldBytes | None = None,
        holder: str | None = None,
        most_bytes: int | None = None,
        weight: Callable[[Message], int] = lambda message: len(message.body),
    ) -> None:
        held = HeldBytes() if held is None else held
        most_bytes = held.at_most if most_bytes is None else min(most_bytes, held.at_most)
        self._share = Share(held=held, holder=holder or queue, most_bytes=most_bytes, weight=weight)
        self._connection = connection
        self.queue = queue
        self.prefetch = prefetch
        self._counted = counted
        self._on_missing = on_missing
        self._session: Session | None = None
        self._at_front: Channel | None = None
        self._stopping = asyncio.Event()
        self._paused: str | None = None
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self.is_resizing = False
        """Whether nothing is consumed until `resized` is called."""
        self._trouble: str | None = "not consuming yet"

    @property
    def trouble(self) -> str | None:
        return self._trouble if self._paused is None or self._stopping.is_set() else f"paused: {self._paused}"

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    @property
    def is_short_of_room(self) -> bool:
        """Whether it has deliveries that must wait until this process holds less."""
        return self._session is not None and self._session.is_short_of_room

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def take_each(self, take: Take, *, on_fault: Take) -> None:
        """Take each delivery in a task of its own, until `stop` is called; at a time as many as the prefetch.
        `on_fault`: see `supervised`."""
        async with aclosing(self.sessions()) as sessions:
            async for session in sessions:
                try:
                    async with asyncio.TaskGroup() as taking:
                        async for delivery in session:
                            taking.create_task(
                                supervised(take, delivery, on_fault=on_fault), name=f"{self.queue} {delivery.tag}"
                            )
                except* ChannelLost as lost:
                    log.warning(signals.DELIVERY_LOST, queue=self.queue, error=str(lost.exceptions[0]))

    async def sessions(self) -> AsyncGenerator[Session, None]:
        failures = 0
        loop = asyncio.get_running_loop()
        while await self._may_open():
            try:
                session = await self._open()
            except BrokerError as error:
                failures += 1
                if self._trouble != str(error):  # otherwise it is logged already
                    self._trouble = str(error)
                    log.warning(signals.CONSUME_FAILED, queue=self.queue, reason=str(error))
                await self._back_off(failures)
                continue
            if self._stopping.is_set():  # `stop` was called while the channel was opened
                await session.close()
                return
            self._trouble = None
            self._session = session  # from here on `pause`, `resume` and `stop` reach it
            opened_s = loop.time()
            try:
                if self._paused is not None:  # `pause` was called while the channel was opened
                    await session.pause()
                yield session
            finally:
                self._trouble = "stopped" if self._stopping.is_set() else "channel lost"
                self._session = None
                await session.close()
            if session.cancelled:
                log.warning(signals.CONSUMER_CANCELLED, queue=self.queue)
                self._on_missing()
            if self._connection.is_open:  # otherwise the connection makes pauses while it reconnects
                failures = failures + 1 if loop.time() < opened_s + SHORT_S else 1
                await self._back_off(failures)

    async def stop(self) -> None:
        self._stopping.set()
        if self._session is not None:
            await self._session.stop()

    async def stopped(self) -> None:
        await self._stopping.wait()

    async def pause(self, reason: str) -> None:
        self._paused = reason
        self._unpaused.clear()
        if self._session is not None:
            await self._session.pause()

    async def resume(self) -> None:
        self._paused = None
        self._unpaused.set()
        await self._consume()

    async def resize(self, prefetch: int) -> None:
        """Let the broker send so many messages that are not settled. The prefetch of a running consumer cannot be
        changed (docs/facts.md, section 2), so it is cancelled here, and another one begins with `resized`. What was
        delivered is still worked on; the broker does not count it for the other consumer."""
        self.prefetch = prefetch
        if (session := self._session) is not None and session.prefetch != prefetch and not self.is_resizing:
            self.is_resizing = True
            await session.pause()

    async def resized(self) -> None:
        self.is_resizing = False
        await self._consume()

    async def _consume(self) -> None:
        if self._session is not None and self._paused is None and not self.is_resizing:
            await self._session.resume(prefetch=self.prefetch)

    async def front(self) -> AsyncGenerator[Delivery, None]:
        """The messages of the queue from its front, one by one, although this consumer is paused. They come on a
        channel that stays open, so each must be settled. Raises BrokerError."""
        if self._at_front is None or self._at_front.is_closed:
            self._at_front = await self._connection.channel(confirms=False, timeout_s=OPEN_TIMEOUT_S)
        channel = self._at_front
        while True:
            with translate_broker_errors(f"cannot fetch from {self.queue!r}", lost=ChannelLost):
                found = await fetch(channel, self.queue)
            if found is None:
                return
            yield Delivery(found[0], queue=self.queue, channel=channel, counted=self._counted)

    async def consume_again(self, *, keeps_channel: bool) -> None:
        if (session := self._session) is None:
            return
        if not keeps_channel:
            await session.close()
        elif self._paused is None:
            await session.pause()
            await self._consume()  # unless `pause` was called meanwhile

    async def _may_open(self) -> bool:
        while not self._stopping.is_set():
            if self._paused is not None:
                await self._unless_stopped(self._unpaused.wait())
            elif not self._connection.is_open:
                self._trouble = self._connection.trouble or "no connection"
                await self._unless_stopped(self._connected())
            else:
                return True
        return False

    async def _connected(self) -> None:
        with suppress(BrokerUnreachable):
            await self._connection.underlying()

    async def _back_off(self, failures: int) -> None:
        await self._unless_stopped(asyncio.sleep(pause_s(failures, first_s=0.1, cap_s=BACKOFF_CAP_S)))

    async def _unless_stopped(self, waiting: Coroutine[object, object, object]) -> None:
        tasks = (asyncio.create_task(waiting), asyncio.create_task(self._stopping.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _open(self) -> Session:
        channel = await self._connection.channel(confirms=False, timeout_s=OPEN_TIMEOUT_S)
        session = Session(channel, queue=self.queue, counted=self._counted, share=self._share)
        self.is_resizing = False  # nothing of this channel is in hand yet
        try:
            with translate_broker_errors(f"cannot consume {self.queue!r}"):
                await session.start(prefetch=self.prefetch)
        except BrokerError as error:
            await session.close()
            if isinstance(error, TopologyMismatch):
                self._on_missing()
            raise
        return session


class Inbox:
    """An exclusive queue for replies or control messages. The broker names it, and deletes it when the connection
    closes. Iterating acknowledges each message as it is read, and raises ChannelLost when the queue is lost.
    `bindings`: pairs of an exchange and a routing key. `most_bytes`: the body of a larger message is dropped."""

    def __init__(
        self, connection: Connection, *, bindings: tuple[tuple[str, str], ...] = (), most_bytes: int = HELD_BYTES
    ) -> None:
        self._connection = connection
        self._bindings = bindings
        self._most_bytes = most_bytes
        self._channel: Channel
        self._session: Session
        self.name = ""

    async def __aenter__(self) -> Self:
        self._channel = await self._connection.channel(confirms=False)
        with translate_broker_errors("no queue of one's own"):
            declared = await self._channel.queue_declare(exclusive=True, auto_delete=True, timeout=RPC_TIMEOUT_S)
            self.name = declared.queue or ""
            await self.bind()
            share = Share(held=HeldBytes(), holder=self.name, most_bytes=self._most_bytes)
            self._session = Session(self._channel, queue=self.name, counted=False, share=share)
            await self._session.start(prefetch=WAITING)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def bind(self) -> None:
        """Call it again if an exchange was deleted and declared again: its bindings are lost then. Raises the same."""
        with translate_broker_errors("cannot bind"):
            for exchange, routing_key in self._bindings:
                await self._channel.queue_bind(self.name, exchange, routing_key, timeout=RPC_TIMEOUT_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        delivery = await anext(self._session)
        with suppress(ChannelLost):  # a message without an acknowledgement is lost with the queue
            await delivery.ack()
        return delivery.message
