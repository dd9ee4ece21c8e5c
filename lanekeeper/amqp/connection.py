"""One supervised connection to the broker: it is opened, watched, and opened again when it is lost.

It uses aio-pika's plain connection, not its robust objects: they restore channels silently, so that a loss goes
unnoticed (docs/decisions/0001). Here the user of a channel sees it close and asks for another.
"""

import asyncio
import random
import ssl
from contextlib import suppress
from typing import Self
from urllib.parse import unquote

from aio_pika.abc import AbstractChannel
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, AuthenticationError, InvalidFrameError, ProbableAuthenticationError
from yarl import URL

from lanekeeper.amqp.driver.alarms import Plain
from lanekeeper.amqp.driver.backoff import pause_s
from lanekeeper.amqp.driver.border import asks_to_stop, border, cancellations, is_nameless, said
from lanekeeper.amqp.driver.frames import tolerate
from lanekeeper.amqp.driver.quiet import hush
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerError, BrokerUnreachable
from lanekeeper.telemetry import logs, signals

CONNECT_TIMEOUT_S = 10
NEXT_TIMEOUT_S = 4
"""Timeout for each node if there are several: a frozen node accepts connections but never answers."""
CLOSE_TIMEOUT_S = 3
BACKOFF_CAP_S = 2.5
"""Longest pause between two tries: a broker that starts is found this soon. Until then, a hundred workers try about a
hundred times a second."""
log = logs.logger()


class Connection:
    """A connection that its own task keeps open from `__aenter__` to `__aexit__`.

    `url`: one, or several separated by commas (`urls.py`). It starts with a random one and goes to the next one when
    one fails. `heartbeat_s`: aiormq notices a silent broker after three times that and three seconds
    (docs/facts.md, section 8).
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        heartbeat_s: int = 10,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._url = url
        self._heartbeat_s = heartbeat_s
        self._urls = [URL(each).update_query(heartbeat=str(heartbeat_s), name=name) for each in urls_of(url)]
        self._at = random.randrange(len(self._urls))
        self._name = name
        self._ssl_context = ssl_context
        self._current: Plain | None = None
        self._opened = asyncio.Event()
        self._flows = asyncio.Event()
        self._flows.set()
        self._blocked_since_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self.loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future that gets the reason when the current connection is lost; the next connection has a new one."""
        self.trouble: str | None = "not connected yet"
        """Why it is not open; None while it is open."""
        self.blocked: str | None = None
        """Why the broker accepts nothing from it at present ("low on memory"). The broker reports this only to
        connections that publish."""
        self.openings = 0
        """How often it was opened. What was learnt about the broker on an earlier one may have changed."""

    def another(self, purpose: str) -> "Connection":
        """Another connection to the same broker, not opened yet."""
        name = f"{self._name}: {purpose}"
        return Connection(self._url, name=name, heartbeat_s=self._heartbeat_s, ssl_context=self._ssl_context)

    @property
    def is_open(self) -> bool:
        return self._current is not None and not self._current.is_closed

    @property
    def version(self) -> str:
        """The broker's version, as it reports it ("4.3.6"). Raises BrokerUnreachable if it was never connected."""
        if self._current is None:
            raise BrokerUnreachable(f"no connection to {self.address}: {self.trouble}")
        return str(self._current.underlay.server_properties["version"])

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the broker, or cluster node, that it is connected to or tries to reach."""
        url = self._urls[self._at]
        return url.host or "localhost", url.port or (5671 if url.scheme == "amqps" else 5672)

    @property
    def address(self) -> str:
        """Host and port as text, without credentials."""
        host, port = self.endpoint
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def __aenter__(self) -> Self:
        """Connect; on failure, raise at once: AccessRefused for wrong credentials, else BrokerUnreachable."""
        tolerate()
        hush()
        await self._open_any()
        self._supervisor = asyncio.create_task(self._supervise(), name=f"connection {self._name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._current is not None:
            with suppress(BrokerUnreachable), border("closing"):
                await self._current.underlay.close(timeout=CLOSE_TIMEOUT_S)

    async def underlying(self, *, timeout_s: float = 30) -> Plain:
        """Wait for an open connection and return it (aio-pika's). Raises BrokerUnreachable after `timeout_s`."""
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

    async def channel(self, *, confirms: bool, timeout_s: float = 30) -> AbstractChannel:
        """Open an aio-pika channel, for occasional operations such as declaring a topology.

        Raises BrokerUnreachable if there is no connection, or it is lost meanwhile.
        """
        connection = await self.underlying(timeout_s=timeout_s)
        with border(f"no channel on {self.address}"):
            async with asyncio.timeout(timeout_s):
                return await connection.channel(publisher_confirms=confirms, on_return_raises=confirms)

    async def raw_channel(self, *, confirms: bool, timeout_s: float = 30) -> Channel:
        """Open a channel of aiormq, the library below aio-pika, for operations on every message (docs/decisions/0001).

        Raises what `channel` raises.
        """
        connection = await self.underlying(timeout_s=timeout_s)
        with border(f"no channel on {self.address}"):
            async with asyncio.timeout(timeout_s):
                channel = await connection.underlay.channel(publisher_confirms=confirms, on_return_raises=True)
                assert isinstance(channel, Channel)
                return channel

    async def flowing(self, *, timeout_s: float) -> None:
        """Wait until it is open and the broker accepts messages. Raises BrokerBlocked, BrokerUnreachable."""
        end = asyncio.get_running_loop().time() + timeout_s
        while self.blocked is not None:
            try:
                async with asyncio.timeout_at(end):
                    await self._flows.wait()
            except TimeoutError as error:
                raise BrokerBlocked(
                    f"the broker at {self.address} takes nothing: {self.blocked} (a memory or disk alarm; "
                    f"`rabbitmqctl status` says which); not published within {timeout_s:g} s"
                ) from error
        await self.underlying(timeout_s=max(0.0, end - asyncio.get_running_loop().time()))

    async def _open_any(self) -> None:
        """Open a connection to the first URL that works; the error names all URLs that were tried."""
        failed: list[BrokerError] = []
        for _ in self._urls:
            try:
                return await self._open()
            except BrokerError as error:
                failed.append(error)
                self._next()
        if len(failed) == 1:
            raise failed[0]
        kind = AccessRefused if any(isinstance(each, AccessRefused) for each in failed) else BrokerUnreachable
        raise kind("none of the broker URLs can be used: " + "; ".join(map(str, failed)))

    def _next(self) -> None:
        self._at = (self._at + 1) % len(self._urls)

    async def _open(self) -> None:
        url = self._urls[self._at]
        before = cancellations()
        connection = Plain(url, ssl_context=self._ssl_context, on_alarm=self._on_alarm)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S if len(self._urls) == 1 else NEXT_TIMEOUT_S):
                await connection.connect()
        except (ProbableAuthenticationError, AuthenticationError) as error:
            raise AccessRefused(
                f"the broker at {self.address} refused user {url.user!r}: {str(error).rstrip('.')}; "
                "check user, password and virtual host in LANEKEEPER_AMQP_URL"
            ) from error
        except InvalidFrameError as error:  # aiormq expects OpenOk and cannot read the Close that comes instead
            raise AccessRefused(
                f"the broker at {self.address} let user {url.user!r} in, but not into virtual host "
                f"{unquote(url.raw_path[1:]) or '/'!r}: is it there, and has the user permissions in it?"
            ) from error
        except (AMQPError, OSError, TimeoutError, RuntimeError) as error:
            raise BrokerUnreachable(
                f"no broker at {self.address}: {said(error)}; is it running, and is LANEKEEPER_AMQP_URL right?"
            ) from error
        except Exception as error:
            if not is_nameless(error):
                raise
            raise BrokerUnreachable(f"the broker at {self.address} closed the connection as it was opened") from error
        try:
            if cancellations() > before:
                raise asyncio.CancelledError
        except BaseException:
            with suppress(Exception):
                await connection.underlay.close(timeout=CLOSE_TIMEOUT_S)
            raise
        self._current = connection
        if self.loss.done():
            self.loss = asyncio.get_running_loop().create_future()
        self.openings += 1
        self.trouble = None
        self._opened.set()
        log.info(signals.BROKER_CONNECTED, connection=self._name, broker=self.address, version=self.version)

    async def _supervise(self) -> None:
        while True:
            assert self._current is not None
            reason = await _closed(self._current)
            self._opened.clear()
            self.trouble = f"connection lost: {reason}"
            self.blocked = None
            self._flows.set()
            self.loss.set_result(reason)
            log.warning(signals.BROKER_LOST, connection=self._name, broker=self.address, reason=reason)
            self._next()
            await self._reopen()

    async def _reopen(self) -> None:
        """Try until it is open again, with full jitter so that a hundred workers do not reconnect all at once."""
        attempt = 0
        while True:
            await asyncio.sleep(pause_s(attempt, first_s=0.25, cap_s=BACKOFF_CAP_S))
            try:
                await self._open_any()
            except Exception as error:
                self.trouble = reason = said(error)
                attempt += 1
                log.warning(signals.BROKER_UNREACHABLE, connection=self._name, reason=reason, attempt=attempt)
            else:
                return

    def _on_alarm(self, reason: str | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if reason is None:
            self.blocked = None
            self._flows.set()
            log.info(signals.BROKER_UNBLOCKED, connection=self._name, blocked_s=round(now_s - self._blocked_since_s, 1))
            return
        if self.blocked is None:
            self._blocked_since_s = now_s
            log.warning(signals.BROKER_BLOCKED, connection=self._name, broker=self.address, reason=reason)
        self.blocked = reason
        self._flows.clear()


async def _closed(connection: Plain) -> str:
    """Wait until a connection has closed, and return the reason."""
    try:
        await asyncio.shield(connection.underlay.closing)
    except asyncio.CancelledError:
        if asks_to_stop():
            raise
        return "closed"
    except Exception as error:
        return said(error)
    return "closed"
