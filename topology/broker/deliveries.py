"""Deliveries of one queue as an async stream, over as many channels as it takes.

    async for session in deliveries.sessions():         one channel each
        async for delivery in session:                  until it is lost (ChannelLost) or stopped (ends)
            …
            await delivery.ack()

The broker delivers again what was delivered on a lost channel, so work on it must stop: `ChannelLost` ends a TaskGroup
around the inner loop, and with it the work.
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
"""How long to wait for a connection at a time; a `stop` waits no longer than this."""
BACKOFF_CAP_S = 5.0
SHORT_S = 10
"""A channel that is lost sooner counts as a failure: the pause before the next one grows."""
log = logs.logger()


class Deliveries:
    """Consumes a queue until stopped. If the channel is lost, it opens another, with backoff.

    `counted`: the queue counts deliveries (quorum queues do). `on_missing`: called if the queue does not exist, or the
    broker ended its consumer. `heads`: fetch the heads of these queues in place of consuming; `queue` then only names
    them in logs.
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
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._trouble: str | None = "not consuming yet"

    @property
    def trouble(self) -> str | None:
        """Why nothing is delivered at present; None while the queue is consumed."""
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
            if self._connection.is_open:  # after a reconnect the pause was long enough
                failures = failures + 1 if loop.time() < opened_s + SHORT_S else 1
                await self._back_off(failures)

    async def stop(self) -> None:
        """Take no more. The current session ends as soon as everything it delivered has been taken."""
        self._stopping.set()
        if self._session is not None:
            await self._session.stop()

    async def pause(self, reason: str) -> None:
        """Stop consuming until `resume`. What was delivered stays here and can be settled."""
        self._paused = reason
        self._wanted.clear()
        if self._session is not None:
            await self._session.pause()

    async def resume(self) -> None:
        self._paused = None
        self._wanted.set()
        if self._session is not None:
            await self._session.resume()

    async def _may_open(self) -> bool:
        """Wait until there is a connection and no pause. False as soon as `stop` was called."""
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
        """Wait for an awaitable, but no longer than until `stop`."""
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
        channel = await self._connection.raw_channel(confirms=False, timeout_s=OPEN_TIMEOUT_S)
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
