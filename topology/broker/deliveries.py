"""Consumes one queue and yields its deliveries. When the channel is lost, another is opened.

    async for session in deliveries.sessions():         each session has one channel
        async for delivery in session:                  raises ChannelLost if the channel is lost; ends after `stop`
            …
            await delivery.ack()

The broker delivers the unsettled (not acknowledged) messages of a lost channel again, so work on them must stop. If the
inner loop is in a TaskGroup, `ChannelLost` ends the group, and with it the tasks that work on these messages.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress

from aiormq.exceptions import ChannelNotFoundEntity

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.backoff import pause_s
from lanekeeper.amqp.driver.border import border
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable
from lanekeeper.telemetry import logs, signals
from topology.broker.heads import Heads, HeadsSession
from topology.broker.session import Session

OPEN_TIMEOUT_S = 5
"""The time limit, in seconds, for opening a channel. If `stop` is called meanwhile, it takes effect only when the
channel is open or this time is over."""
BACKOFF_CAP_S = 5.0
"""The longest pause, in seconds, before a new channel is opened in place of a lost one."""
SHORT_S = 10
"""If a channel is lost within this many seconds after it was opened, the pause before the next channel is opened gets
longer."""
log = logs.logger()


class Deliveries:
    """Consumes a queue until `stop` is called. When the channel is lost, it opens another, with growing pauses between
    the tries.

    `counted`: whether the queue counts how often each message is delivered (quorum queues do). `on_missing` is called
    if the queue does not exist, or if the broker ended the consumer. `heads`: if it is given, messages are fetched from
    several queues with `basic.get`, at most one at a time from each (`heads.py`), instead of consuming one queue;
    `queue` is then only a name for logs.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        queue: str,
        prefetch: int,
        counted: bool = True,
        on_missing: Callable[[], None] = lambda: None,
        heads: Heads | None = None,
    ) -> None:
        self._connection = connection
        self.queue = queue
        self.prefetch = prefetch
        self._counted = counted
        self._on_missing = on_missing
        self._heads = heads
        self._session: Session | None = None
        self._stopping = asyncio.Event()
        self._paused: str | None = None
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._trouble: str | None = "not consuming yet"

    @property
    def trouble(self) -> str | None:
        """The reason why nothing is delivered at present; None while the queue is consumed."""
        return self._trouble if self._paused is None or self._stopping.is_set() else f"paused: {self._paused}"

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    async def sessions(self) -> AsyncGenerator[Session, None]:
        """Open a channel, and yield its `Session`, from which the deliveries are read. When the channel is lost, open
        another and yield its session, until `stop` is called."""
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
        """Stop consuming for good. The current session ends when its remaining deliveries have been iterated over."""
        self._stopping.set()
        if self._session is not None:
            await self._session.stop()

    async def pause(self, reason: str) -> None:
        """Stop consuming until `resume`. Messages that were delivered stay valid and can be settled."""
        self._paused = reason
        self._unpaused.clear()
        if self._session is not None:
            await self._session.pause()

    async def resume(self) -> None:
        self._paused = None
        self._unpaused.set()
        if self._session is not None:
            await self._session.resume()

    async def _may_open(self) -> bool:
        """Wait until the connection is open and consuming is not paused, so that a channel may be opened. Returns False
        after `stop`."""
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
        """Await a coroutine to its end, but cancel it as soon as `stop` is called."""
        tasks = (asyncio.create_task(waiting), asyncio.create_task(self._stopping.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _open(self) -> Session:
        channel = await self._connection.channel(confirms=False, timeout_s=OPEN_TIMEOUT_S)
        if self._heads is not None:
            session: Session = HeadsSession(channel, self._heads, queue=self.queue, counted=self._counted)
        else:
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
