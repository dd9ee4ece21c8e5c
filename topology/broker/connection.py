"""One supervised connection to the broker: it is opened, watched, and opened again when it is lost.

Plain `aiormq.connect`, never a client's restoring objects: what is restored behind one's back has been lost behind it
(design.md, section 3). Whoever holds a channel sees it close, and asks for another.
"""

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import aiormq
import structlog
from aiormq.channel import Channel
from aiormq.connection import Connection as Underlying
from aiormq.exceptions import AMQPError, AuthenticationError, InvalidFrameError, ProbableAuthenticationError
from yarl import URL

from topology import signals
from topology.broker.frames import tolerate
from topology.contract.problems import AccessRefused, BrokerError, BrokerUnreachable

CONNECT_TIMEOUT_S = 10
BACKOFF_CAP_S = 5.0
log: structlog.stdlib.BoundLogger = structlog.get_logger()

OnOpen = Callable[[Underlying], Awaitable[None]]
"""Called with each new connection before anybody else gets it; raising closes it again."""


class Connection:
    """A connection that its own task keeps open from `__aenter__` to `__aexit__`.

    `heartbeat_s` 10: aiormq notices a silent broker after three times that and three seconds (facts.md, section 8).
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        heartbeat_s: int = 10,
        ssl_context: ssl.SSLContext | None = None,
        on_open: OnOpen | None = None,
    ) -> None:
        self._url = URL(url).update_query(heartbeat=str(heartbeat_s), name=name)
        self._name = name
        self._ssl_context = ssl_context
        self._on_open = on_open
        self._current: Underlying | None = None
        self._opened = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self.loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the connection that is open now is lost; a new one has a new future."""
        self.trouble: str | None = "not connected yet"
        """Why it is not open; None while it is."""

    @property
    def is_open(self) -> bool:
        return self._current is not None and not self._current.is_closed

    @property
    def version(self) -> str:
        """The broker's version, as it reports it ("4.3.6"). Raises BrokerUnreachable when it was never connected."""
        if self._current is None:
            raise BrokerUnreachable(f"no connection to {self.address}: {self.trouble}")
        return str(self._current.server_properties["version"])

    @property
    def address(self) -> str:
        """Where the broker is, without credentials."""
        return f"{self._url.host}:{self._url.port or (5671 if self._url.scheme == 'amqps' else 5672)}"

    async def __aenter__(self) -> Self:
        """Connect, and fail at once if that cannot be done: AccessRefused for credentials, else BrokerUnreachable."""
        tolerate()
        await self._open()
        self._supervisor = asyncio.create_task(self._supervise(), name=f"connection {self._name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._current is not None:
            with suppress(BrokerUnreachable), border("closing"):
                await self._current.close(timeout=3)

    async def underlying(self, *, timeout_s: float = 30) -> Underlying:
        """aiormq's connection, as soon as there is an open one. Raises BrokerUnreachable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._opened.wait()
                    if self._current is not None and not self._current.is_closed:
                        return self._current
                    self._opened.clear()
        except TimeoutError as error:
            raise BrokerUnreachable(
                f"no connection to {self.address} within {timeout_s:g} s: {self.trouble}"
            ) from error

    async def channel(self, *, confirms: bool, timeout_s: float = 30) -> Channel:
        """Open a channel. Raises BrokerUnreachable where there is no connection, or it is lost meanwhile."""
        connection = await self.underlying(timeout_s=timeout_s)
        with border(f"no channel on {self.address}"):
            async with asyncio.timeout(timeout_s):
                channel = await connection.channel(publisher_confirms=confirms, on_return_raises=True)
                assert isinstance(channel, Channel)
                return channel

    async def _open(self) -> None:
        before = cancellations()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await aiormq.connect(self._url, context=self._ssl_context)
        except (ProbableAuthenticationError, AuthenticationError) as error:
            raise AccessRefused(
                f"the broker at {self.address} refused user {self._url.user!r}: {error}; "
                "check user, password and virtual host in LANEKEEPER_AMQP_URL"
            ) from error
        except InvalidFrameError as error:  # aiormq does not read the Close that comes for OpenOk, nor what it says
            raise AccessRefused(
                f"the broker at {self.address} let user {self._url.user!r} in, but not into virtual host "
                f"{unquote(self._url.raw_path[1:]) or '/'!r}: is it there, and has the user permissions in it?"
            ) from error
        except (AMQPError, OSError, TimeoutError, RuntimeError) as error:
            raise BrokerUnreachable(
                f"no broker at {self.address}: {said(error)}; is it running, and is LANEKEEPER_AMQP_URL right?"
            ) from error
        try:
            if cancellations() > before:
                raise asyncio.CancelledError
            if self._on_open is not None:
                await self._on_open(connection)
        except BaseException:
            with suppress(Exception):
                await connection.close(timeout=3)
            raise
        self._current = connection
        if self.loss.done():
            self.loss = asyncio.get_running_loop().create_future()
        self.trouble = None
        self._opened.set()
        log.info(signals.BROKER_CONNECTED, connection=self._name, broker=self.address, version=self.version)

    async def _supervise(self) -> None:
        while True:
            assert self._current is not None
            reason = await _closed(self._current)
            self._opened.clear()
            self.trouble = f"connection lost: {reason}"
            self.loss.set_result(reason)
            log.warning(signals.BROKER_LOST, connection=self._name, broker=self.address, reason=reason)
            await self._reopen()

    async def _reopen(self) -> None:
        """Try until it is open again; full jitter, so that a hundred workers do not come back in one instant."""
        attempt = 0
        while True:
            await asyncio.sleep(random.uniform(0.05, min(BACKOFF_CAP_S, 0.25 * 2**attempt)))
            try:
                await self._open()
            except Exception as error:
                self.trouble = str(error)
                attempt += 1
                log.warning(signals.BROKER_UNREACHABLE, connection=self._name, reason=str(error), attempt=attempt)
            else:
                return


async def _closed(connection: Underlying) -> str:
    """Wait until a connection has closed, and say why."""
    try:
        await asyncio.shield(connection.closing)
    except asyncio.CancelledError:
        if asks_to_stop():
            raise
        return "closed"
    except Exception as error:
        return said(error)
    return "closed"


@contextmanager
def border(what: str, *, lost: type[BrokerError] = BrokerUnreachable) -> Iterator[None]:
    """Translate what aiormq raises inside when a channel or connection is lost, or does not answer, into `lost`."""
    before = cancellations()
    try:
        yield
    except (AMQPError, RuntimeError, OSError, TimeoutError) as error:
        if cancellations() == before:
            raise lost(f"{what}: {said(error)}") from error
    except asyncio.CancelledError:
        if asks_to_stop():
            raise
        raise lost(f"{what}: the connection was lost") from None
    if cancellations() > before:
        raise asyncio.CancelledError


def said(error: BaseException) -> str:
    """What an exception says, or, where that is nothing, what it is."""
    return str(error) or type(error).__name__


def asks_to_stop() -> bool:
    """Whether a CancelledError was asked for: aiormq also raises it where a channel or connection closed."""
    return cancellations() > 0


def cancellations() -> int:
    """How often this task was told to stop. Grown over a call of aiormq's, it says that the call lost one of them.

    aiormq waits with `asyncio.wait_for`, and that forgets, before Python 3.12, a cancellation that comes in the same
    moment as the answer: 20 of 400 that came while a queue was being declared, and whoever consumed it never ended.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
