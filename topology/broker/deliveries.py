"""Deliveries of one queue as an async stream, over as many channels as it takes.

    async for session in deliveries.sessions():         one channel each
        async for delivery in session:                  until it is lost (ChannelLost) or stopped (ends)
            …
            await delivery.ack()

What was delivered on a channel that is lost will be delivered again: whoever works on it must stop (`ChannelLost` ends
a TaskGroup around the inner loop, and with it the work).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import ChannelNotFoundEntity
from pamqp.commands import Basic

from topology import logs, names, signals
from topology.broker.backoff import pause_s
from topology.broker.border import border
from topology.broker.connection import Connection
from topology.broker.frames import message_of
from topology.contract.messages import Message
from topology.contract.problems import BrokerError, BrokerUnreachable

RPC_TIMEOUT_S = 30
OPEN_TIMEOUT_S = 5
"""How long a connection is waited for at a time: whoever stops meanwhile waits no longer."""
BACKOFF_CAP_S = 5.0
SHORT_S = 10
"""A channel that is lost sooner was no success: the pause before the next one grows."""
log = logs.logger()


class ChannelLost(BrokerError):
    """The channel of a delivery is gone: the broker delivers again what was not acknowledged on it."""


class Delivery:
    """One message that the broker delivered and waits to hear of."""

    __slots__ = ("_channel", "_counted", "_tag", "message", "queue", "redelivered")

    def __init__(self, delivered: DeliveredMessage, *, queue: str, channel: Channel, counted: bool = True) -> None:
        assert isinstance(delivered.delivery, Basic.Deliver)
        self.message: Message = message_of(delivered)
        self.queue = queue
        self.redelivered = bool(delivered.delivery.redelivered)
        self._tag = delivered.delivery.delivery_tag
        self._channel = channel
        self._counted = counted

    @property
    def tag(self) -> int:
        return self._tag or 0

    @property
    def times_delivered(self) -> int | None:
        """How often it was delivered without being settled or given back, this time included; None where the broker
        does not count (classic queues).

        Believed only on a redelivered message of a queue that counts: elsewhere the header can be forged (facts.md,
        section 7). On 4.3 a message that was only given back has an acquired count and no delivery count.
        """
        if not self.redelivered:
            return 1
        headers = self.message.headers
        count = headers.get(names.DELIVERY_COUNT, 0 if names.ACQUIRED_COUNT in headers else None)
        return count + 1 if self._counted and isinstance(count, int) else None

    async def ack(self) -> None:
        """Tell the broker to forget it. Raises ChannelLost where that cannot be told: it comes again."""
        await self._settle(self._channel.basic_ack(self.tag, wait=False))

    async def reject(self) -> None:
        """Give it back and have the broker count that (facts.md: nack is not counted on 4.3)."""
        await self._settle(self._channel.basic_reject(self.tag, requeue=True, wait=False))

    async def give_back(self) -> None:
        """Give it back without fault of its own (stopping); not counted on 4.3."""
        await self._settle(self._channel.basic_nack(self.tag, requeue=True, wait=False))

    async def _settle(self, call: Awaitable[None]) -> None:
        with border(f"channel lost before {self.queue} delivery {self._tag} was settled", lost=ChannelLost):
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
        """The broker ended the consumer: its queue was deleted, or its leader moved, or it was idle for too long."""

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
        """Have nothing delivered; what was can still be settled."""
        async with self._turn:
            if self._lost is None and (tag := self._tag) is not None:
                self._tag = None
                with suppress(BrokerUnreachable), border("cancelling"):
                    await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT_S)

    async def resume(self) -> None:
        """After `pause`: consume again, under another tag; the one that was used the broker may not have forgotten."""
        async with self._turn:
            if self._lost is None and self._tag is None and not self._stopped:
                with suppress(BrokerUnreachable), border(f"cannot consume {self._queue!r}"):
                    await self._consume()  # where it cannot, the channel closes, and with it the session

    async def _consume(self) -> None:
        consuming = await self._channel.basic_consume(self._queue, self._on_delivery, timeout=RPC_TIMEOUT_S)
        self._tag = consuming.consumer_tag or ""

    async def close(self) -> None:
        with suppress(BrokerUnreachable), border("closing"):
            await self._channel.close(timeout=RPC_TIMEOUT_S)

    def __aiter__(self) -> "Session":
        return self

    async def __anext__(self) -> Delivery:
        delivery = await self._arrived.get()
        if self._lost is not None:  # what has arrived before is delivered again as well
            raise ChannelLost(f"{self._queue}: {self._lost}")
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    async def _on_delivery(self, delivered: DeliveredMessage) -> None:
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


class Deliveries:
    """A queue that is consumed for as long as it takes: over new channels, with backoff, whenever one is lost.

    `counted`: the queue counts deliveries (quorum queues do). `on_missing`: called when the queue is not there, or may
    be gone: the broker ended its consumer.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        queue: str,
        prefetch: int,
        counted: bool = True,
        on_missing: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self.queue = queue
        self.prefetch = prefetch
        self._counted = counted
        self._on_missing = on_missing
        self._session: Session | None = None
        self._stopping = asyncio.Event()
        self._paused: str | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._trouble: str | None = "not consuming yet"

    @property
    def trouble(self) -> str | None:
        """Why nothing is delivered at present; None while it is consumed."""
        return self._trouble if self._paused is None or self._stopping.is_set() else f"paused: {self._paused}"

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    async def sessions(self) -> AsyncGenerator[Session, None]:
        """One session after the other, until `stop`."""
        failures = 0
        loop = asyncio.get_running_loop()
        while await self._may_open():
            try:
                session = await self._open()
            except BrokerError as error:
                failures += 1
                self._failed(str(error))
                await self._back_off(failures)
                continue
            if self._stopping.is_set():  # while it was opened
                await session.close()
                return
            self._trouble = None
            self._session = session  # from here on `pause`, `resume` and `stop` reach it
            opened_s = loop.time()
            try:
                if self._paused is not None:  # while it was opened
                    await session.pause()
                yield session
            finally:
                self._trouble = "stopped" if self._stopping.is_set() else "channel lost"
                self._session = None
                await session.close()
            if session.cancelled:
                log.warning(signals.CONSUMER_CANCELLED, queue=self.queue)
                self._on_missing()
            if self._connection.is_open:  # one that comes back has waited already
                failures = failures + 1 if loop.time() < opened_s + SHORT_S else 1
                await self._back_off(failures)

    async def stop(self) -> None:
        """Take no more; the session that runs ends as soon as what it delivered has been taken."""
        self._stopping.set()
        if self._session is not None:
            await self._session.stop()

    async def pause(self, reason: str) -> None:
        """Have nothing delivered until `resume`; what was delivered stays here and can be settled."""
        self._paused = reason
        self._wanted.clear()
        if self._session is not None:
            await self._session.pause()

    async def resume(self) -> None:
        """Consume again."""
        self._paused = None
        self._wanted.set()
        if self._session is not None:
            await self._session.resume()

    async def _may_open(self) -> bool:
        """Wait until there is a connection, and nobody wants a pause. False as soon as it is to stop."""
        while not self._stopping.is_set():
            if self._paused is not None:
                await self._unless_stopped(self._wanted.wait())
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
        """Wait for it, or for `stop`."""
        tasks = (asyncio.create_task(waiting), asyncio.create_task(self._stopping.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _failed(self, why: str) -> None:
        if self._trouble != why:
            self._trouble = why
            log.warning(signals.CONSUME_FAILED, queue=self.queue, reason=why)

    async def _open(self) -> Session:
        channel = await self._connection.channel(confirms=False, timeout_s=OPEN_TIMEOUT_S)
        session = Session(channel, queue=self.queue, counted=self._counted)
        try:
            with border(f"cannot consume {self.queue!r}"):
                await session.start(prefetch=self.prefetch)
        except BrokerUnreachable as error:
            await session.close()
            if isinstance(error.__cause__, ChannelNotFoundEntity):
                self._on_missing()
                raise BrokerUnreachable(f"{error}; run: lanekeeper topology apply") from error
            raise
        return session
