"""Deliveries of one queue as an async stream, over as many channels as it takes.

    async for session in deliveries.sessions():         one channel each
        async for delivery in session:                  until it is lost (ChannelLost) or stopped (ends)
            …
            await delivery.ack()

What was delivered on a channel that is lost will be delivered again: whoever works on it must stop (`ChannelLost` ends
a TaskGroup around the inner loop, and with it the work).
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
"""How long a connection is waited for at a time: whoever stops meanwhile waits no longer."""
BACKOFF_CAP_S = 5.0
SHORT_S = 10
"""A channel that is lost sooner was no success: the pause before the next one grows."""
log = logs.logger()


class Deliveries:
    """A queue that is consumed for as long as it takes: over new channels, with backoff, whenever one is lost.

    `counted`: the queue counts deliveries (quorum queues do). `on_missing`: called when the queue is not there, or may
    be gone: the broker ended its consumer. `heads`: nothing is consumed, but the heads of these are fetched; `queue` is
    then their common name.
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
