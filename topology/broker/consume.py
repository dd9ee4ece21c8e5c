"""Takes messages from queues: consumes one queue (`Deliveries`), chooses among several (`SideQueuePoller`), receives in
a queue of one's own (`Inbox`).

    async for session in deliveries.sessions():         each session has one channel
        async for delivery in session:                  raises ChannelLost if the channel is lost; ends after `stop`
            …
            await delivery.ack()

The broker delivers the unsettled messages of a lost channel again, so work on them must stop. If the inner loop is in a
TaskGroup, `ChannelLost` ends the group, and with it the tasks that work on these messages.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic

from lanekeeper.amqp.connection import Connection, depth
from lanekeeper.amqp.driver import RPC_TIMEOUT_S, Delivered, close, delivered, fetch, translate_errors
from lanekeeper.backoff import pause_s
from lanekeeper.contract import names
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, TopologyMismatch
from lanekeeper.telemetry import logs, signals
from topology.broker.memory import HELD_BYTES, HeldBytes, Waiting, size_of

OPEN_TIMEOUT_S = 5
"""If `stop` is called while a channel is opened, it takes effect only when the channel is open or this time is over."""
BACKOFF_CAP_S = 5.0
SHORT_S = 10
"""If a channel is lost so soon after it was opened, the pause before the next one gets longer."""
READ_LENGTHS_EVERY_S: Final = 1.0
READ_IDLE_EVERY_S: Final = 10.0
"""While the lane is idle: sixteen idle lanes are to cost at most 1.5 times three (docs/lanes.md)."""
WAITING = 1000
log = logs.logger()


class ChannelLost(BrokerError):
    """What was not settled on the channel cannot be settled any more; the broker delivers it again."""


class Delivery:
    """A message that was delivered and must be settled by `ack`, `nack` or `reject`. `cut_bytes`: the size of a body
    that was larger than its queue allows, and was dropped."""

    __slots__ = (
        "_channel", "_counted", "_is_settled", "_on_settled", "cut_bytes", "message", "queue", "redelivered", "tag",
    )  # fmt: skip

    def __init__(
        self,
        delivered: Delivered,
        *,
        queue: str,
        channel: Channel,
        counted: bool = True,
        cut_bytes: int = 0,
        on_settled: Callable[[int], None] = lambda tag: None,
    ) -> None:
        self.message: Message = delivered.message
        self.cut_bytes = cut_bytes
        self._on_settled = on_settled
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
        self._on_settled(self.tag)
        with translate_errors(f"channel lost before {self.queue} delivery {self.tag} was settled", lost=ChannelLost):
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

    def size(self, message: Message) -> int:
        """Never so large that there could be no room for it."""
        return min(self.weight(message) + size_of(message.headers), self.held.at_most // 2)


class Session:
    """Consumes one queue on one channel: an iterator over the deliveries, which ends after `stop`, and raises
    ChannelLost if the channel is lost."""

    def __init__(self, channel: Channel, *, queue: str, counted: bool, share: Share) -> None:
        self._channel = channel
        self._queue = queue
        self._counted = counted
        self._share = share
        self._held: dict[int, int] = {}
        """The size of each message that is not settled, by its tag."""
        self._without_room: dict[int, Waiting] = {}
        self._tag: str | None = None
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
        await self._channel.basic_qos(prefetch_count=prefetch, timeout=RPC_TIMEOUT_S)
        await self._consume()

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
                with suppress(BrokerError), translate_errors("cancelling"):
                    await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT_S)
                for delivered, waiting in list(self._without_room.items()):
                    if self._without_room.pop(delivered, None) is not None:
                        self._share.held.forget(waiting)
                        await self._nack(delivered)

    async def resume(self) -> None:
        """Consume again, under a new consumer tag, because the broker may still use the old one."""
        async with self._consume_lock:
            if self._lost is None and self._tag is None and not self._stopped:
                with suppress(BrokerError), translate_errors(f"cannot consume {self._queue!r}"):
                    await self._consume()  # if this fails, the channel closes, and the session with it

    async def _consume(self) -> None:
        consuming = await self._channel.basic_consume(self._queue, self._on_delivery, timeout=RPC_TIMEOUT_S)
        self._tag = consuming.consumer_tag or ""

    async def close(self) -> None:
        await close(self._channel)

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
        if (delivery := self._taken(found, self._queue)) is not None:
            self._arrived.put_nowait(delivery)
        else:
            tag, share, size = found.tag, self._share, self._share.size(found.message)
            self._without_room[tag] = share.held.wait(
                share.holder, size, partial(self._give_back, tag, size), after_long=partial(self._return, tag)
            )

    def _taken(self, found: Delivered, queue: str) -> Delivery | None:
        """The delivery, without its body if this is too large. None: there is no room for it."""
        message, share, cut_bytes = found.message, self._share, 0
        if len(message.body) > share.most_bytes:
            cut_bytes, message.body = len(message.body), b""
        size = share.size(message)
        if not share.held.take(share.holder, queue, size, redelivered=found.redelivered):
            return None
        self._held[found.tag] = size
        return Delivery(
            found,
            queue=queue,
            channel=self._channel,
            counted=self._counted,
            cut_bytes=cut_bytes,
            on_settled=self._settled,
        )

    def _settled(self, tag: int) -> None:
        if (size := self._held.pop(tag, None)) is not None:
            self._share.held.release(self._share.holder, size)

    def _give_back(self, tag: int, size: int) -> None:
        self._share.held.expect(self._share.holder, self._queue, size)
        self._return(tag)

    def _return(self, tag: int) -> None:
        self._without_room.pop(tag, None)
        self._channel.create_task(self._nack(tag))

    async def _nack(self, tag: int) -> None:
        with (
            suppress(ChannelLost),
            translate_errors(f"channel lost before {self._queue} delivery {tag}", lost=ChannelLost),
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
                self._settled(next(iter(self._held)))
            self._arrived.put_nowait(None)


class SideQueuePoller:
    """Decides from which of several queues to fetch next. A queue's head is its first message; this process holds a
    fetched head until `pass_on`, and at most one of each queue. The queues are not consumed, because a consumer
    prefetches messages: no other process could work on these, and messages with a higher priority could not overtake
    them. The same `SideQueuePoller` is used with the next channel, so that the lengths stay known."""

    def __init__(self, queues: Iterable[str]) -> None:
        self._ready = dict.fromkeys(queues, 0)
        self._held: set[str] = set()
        self.empty_ms = 0
        self.changed = asyncio.Event()
        self.begun: Callable[[], int] = lambda: 0
        """How many requests of the lane have begun in this process; set by whoever knows."""

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._ready)

    @property
    def ready(self) -> int:
        return sum(self._ready.values())

    def ready_in(self, queue: str) -> int:
        return self._ready[queue]

    def publish_seen(self, queue: str) -> None:
        self._ready[queue] += 1
        self.changed.set()

    def pass_on(self, queue: str) -> None:
        """Allow the next fetch from a queue: work on its fetched message has begun, or the message was settled."""
        self._held.discard(queue)
        self.changed.set()

    def next(self) -> str | None:
        for queue, ready in self._ready.items():
            if ready > 0 and queue not in self._held:
                return queue
        return None

    def fetched(self, queue: str, *, left: int) -> None:
        del self._ready[queue]
        self._ready[queue] = left  # moves the queue to the end of the order
        self._held.add(queue)

    def found(self, queue: str, ready: int) -> None:
        self._ready[queue] = ready

    def lost(self) -> None:
        self._held.clear()


async def _head(channel: Channel, queue: str) -> tuple[Delivered, int] | None:
    with translate_errors(f"cannot fetch from {queue!r}", lost=ChannelLost):
        return await fetch(channel, queue)


class HeadsSession(Session):
    """Fetches with `basic.get` the head of the queue that `heads` chooses. Once a second, more seldom while the lane is
    idle, passive declarations find out which queues have messages; the answer to a fetch says how many are left."""

    def __init__(self, channel: Channel, heads: SideQueuePoller, *, queue: str, counted: bool, share: Share) -> None:
        super().__init__(channel, queue=queue, counted=counted, share=share)
        self._heads = heads
        self._fetching = False
        self._next_reading_s = 0.0

    async def start(self, *, prefetch: int) -> None:
        self._channel.closing.add_done_callback(self._on_closed)
        self._heads.lost()
        self._fetching = True

    async def stop(self) -> None:
        self._stopped = True
        self._heads.changed.set()

    async def pause(self) -> None:
        self._fetching = False

    async def resume(self) -> None:
        self._fetching = True
        self._heads.changed.set()

    async def __anext__(self) -> Delivery:
        loop, pause_s, begun, last_s = asyncio.get_running_loop(), READ_LENGTHS_EVERY_S, 0, 0.0
        while True:
            self._heads.changed.clear()
            if self._lost is not None:
                raise ChannelLost(f"{self._queue}: {self._lost}")
            if self._stopped:
                raise StopAsyncIteration
            if self._fetching and not self._without_room and (queue := self._heads.next()) is not None:
                if (delivery := await self._fetch(queue)) is not None:
                    return delivery
            elif self._fetching and loop.time() >= self._next_reading_s:
                await self._read_lengths()
                last_s = loop.time()
                is_idle, begun = not self._heads.ready and self._heads.begun() == begun, self._heads.begun()
                pause_s = min(2 * pause_s, READ_IDLE_EVERY_S) if is_idle else READ_LENGTHS_EVERY_S
                self._next_reading_s = last_s + pause_s
            else:
                with suppress(TimeoutError):
                    end_s = min(self._next_reading_s, loop.time() + READ_LENGTHS_EVERY_S)
                    async with asyncio.timeout_at(end_s if self._fetching else None):
                        await self._heads.changed.wait()
                if self._heads.begun() != begun:  # the lane is no longer idle
                    self._next_reading_s = min(self._next_reading_s, last_s + READ_LENGTHS_EVERY_S)

    async def _fetch(self, queue: str) -> Delivery | None:
        found = await _head(self._channel, queue)
        if self._lost is not None:  # meanwhile
            raise ChannelLost(f"{self._queue}: {self._lost}")
        if found is None:
            self._heads.found(queue, 0)
            return None
        if (delivery := self._taken(found[0], queue)) is None:
            self._wait_for_room(found[0], queue)
            await self._nack(found[0].tag)
            return None
        self._heads.fetched(queue, left=found[1])
        return delivery

    def _wait_for_room(self, delivered: Delivered, queue: str) -> None:
        """Fetch nothing until there is room for this message; it is at the front of its queue again."""
        tag, share, size = delivered.tag, self._share, self._share.size(delivered.message)

        def fetch() -> None:
            self._without_room.pop(tag, None)
            share.held.expect(share.holder, queue, size)
            self._heads.changed.set()

        self._without_room[tag] = share.held.wait(share.holder, size, fetch)

    async def _read_lengths(self) -> None:
        asked_ms = time.time_ns() // 1_000_000
        for queue in self._heads.queues:
            with translate_errors(f"cannot look at {queue!r}", lost=ChannelLost):
                self._heads.found(queue, (await depth(self._channel, queue)).ready)
        if not self._heads.ready:
            self._heads.empty_ms = asked_ms

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._heads.changed.set()


class Deliveries:
    """Consumes a queue until `stop` is called. When the channel is lost, it opens another, with growing pauses between
    the tries.

    `counted`: whether the queue counts how often each message is delivered (quorum queues do). `on_missing` is called
    if the queue does not exist, or if the broker ended the consumer. `heads`: fetch from its queues instead of
    consuming; `queue` is then only a name for logs. `held`: what this process holds, and in it `holder` (None: the
    queue). `most_bytes`: the body of a larger message is dropped. `weight`: how many bytes a body takes, also unpacked.
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
        heads: SideQueuePoller | None = None,
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
        self._heads = heads
        self._session: Session | None = None
        self._at_front: Channel | None = None
        self._stopping = asyncio.Event()
        self._paused: str | None = None
        self._unpaused = asyncio.Event()
        self._unpaused.set()
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
        if self._session is not None:
            await self._session.resume()

    @property
    def queues(self) -> tuple[str, ...]:
        return (self.queue,) if self._heads is None else self._heads.queues

    async def front(self, queue: str) -> AsyncGenerator[Delivery, None]:
        """The messages of a queue from its front, one by one, although this consumer is paused. They come on a channel
        that stays open, so each must be settled. Raises BrokerError."""
        if self._at_front is None or self._at_front.is_closed:
            self._at_front = await self._connection.channel(confirms=False, timeout_s=OPEN_TIMEOUT_S)
        channel = self._at_front
        while (found := await _head(channel, queue)) is not None:
            yield Delivery(found[0], queue=queue, channel=channel, counted=self._counted)

    async def consume_again(self, *, keeps_channel: bool) -> None:
        if (session := self._session) is None:
            return
        if not keeps_channel:
            await session.close()
        elif self._paused is None:
            await session.pause()
            if self._paused is None:  # unless `pause` was called meanwhile
                await session.resume()

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
        if self._heads is not None:
            session: Session = HeadsSession(
                channel, self._heads, queue=self.queue, counted=self._counted, share=self._share
            )
        else:
            session = Session(channel, queue=self.queue, counted=self._counted, share=self._share)
        try:
            with translate_errors(f"cannot consume {self.queue!r}"):
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
        with translate_errors("no queue of one's own"):
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
        with translate_errors("cannot bind"):
            for exchange, routing_key in self._bindings:
                await self._channel.queue_bind(self.name, exchange, routing_key, timeout=RPC_TIMEOUT_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        delivery = await anext(self._session)
        with suppress(ChannelLost):  # a message without an acknowledgement is lost with the queue
            await delivery.ack()
        return delivery.message
