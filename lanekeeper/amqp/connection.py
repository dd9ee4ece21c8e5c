"""One supervised connection to the broker: it is opened, watched, and opened again when it is lost.

It uses aio-pika's plain connection, not its robust objects: these restore channels silently, so that a loss goes
unnoticed (docs/decisions/0001). With the plain connection, code that uses a channel sees that the channel has closed,
and opens another.
"""

import asyncio
import random
import ssl
from contextlib import suppress
from typing import Self
from urllib.parse import unquote

from aiormq.channel import Channel
from aiormq.exceptions import AuthenticationError, InvalidFrameError, ProbableAuthenticationError
from yarl import URL

from lanekeeper.amqp.driver.alarms import BrokerConnection
from lanekeeper.amqp.driver.backoff import pause_s
from lanekeeper.amqp.driver.border import border, is_bare, text_of
from lanekeeper.amqp.driver.frames import patch_pamqp
from lanekeeper.amqp.driver.quiet import drop_log_lines
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerError, BrokerUnreachable
from lanekeeper.telemetry import logs, signals

HEARTBEAT_S = 10
"""The interval, in seconds, of the heartbeats on a connection to the broker. A silent broker is noticed after
`3 * HEARTBEAT_S + 3` seconds (docs/facts.md, section 8)."""
CONNECT_TIMEOUT_S = 10
"""The time limit, in seconds, for opening a connection to the broker if its URL names only one node."""
NODE_TIMEOUT_S = 4
"""For how many seconds to try to open a connection to one node of a cluster before the next node is tried. There is a
limit because a frozen node accepts connections and never answers."""
CLOSE_TIMEOUT_S = 3
"""The time limit, in seconds, for closing a connection to the broker."""
BACKOFF_CAP_S = 2.5
"""The longest pause, in seconds, between two tries to connect to the broker. A worker is therefore connected again at
most about this long after the broker has started. With this limit, a hundred workers that have lost their connections
make about a hundred tries a second in total."""
log = logs.logger()


class Connection:
    """A connection to RabbitMQ. From `__aenter__` to `__aexit__` a background task opens it again whenever it is lost.

    `url`: one URL, or the URLs of a cluster's nodes, separated by commas. The connection starts with a random one of
    them, and tries the next URL when one fails.
    """

    def __init__(self, url: str, *, name: str, ssl_context: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._urls = [URL(node_url).update_query(heartbeat=HEARTBEAT_S, name=name) for node_url in urls_of(url)]
        self._url_index = random.randrange(len(self._urls))
        self._name = name
        self._ssl_context = ssl_context
        self._current: BrokerConnection | None = None
        self._opened = asyncio.Event()
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._blocked_since_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self.loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future that gets the reason when the connection is lost; a new future replaces it when the connection is
        opened again."""
        self.trouble: str | None = "not connected yet"
        """Why the connection is not open; None while it is open."""
        self.blocked: str | None = None
        """Why the broker accepts no publishes at present ("low on memory"); None if it accepts them. The broker reports
        this only to connections that have published."""
        self.openings = 0
        """How often the connection was opened. If this number has changed, what was learned about the broker earlier
        (such as its size limit for messages) may no longer be true."""

    def another(self, purpose: str) -> "Connection":
        """Create a second `Connection` to the same broker, without opening it. `purpose` becomes part of the
        connection's name in RabbitMQ's management pages."""
        return Connection(self._url, name=f"{self._name}: {purpose}", ssl_context=self._ssl_context)

    @property
    def is_open(self) -> bool:
        return self._current is not None and not self._current.is_closed

    @property
    def version(self) -> str:
        """The version that the broker reports ("4.3.6"). Raises BrokerUnreachable before the first connection."""
        if self._current is None:
            raise BrokerUnreachable(f"no connection to {self.address}: {self.trouble}")
        return str(self._current.underlay.server_properties["version"])

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the broker (or cluster node) to which this connection is open, or is being opened."""
        url = self._urls[self._url_index]
        return url.host or "localhost", url.port or (5671 if url.scheme == "amqps" else 5672)

    @property
    def address(self) -> str:
        """Host and port of the broker (see `endpoint`) as text for messages, without credentials."""
        host, port = self.endpoint
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def __aenter__(self) -> Self:
        """Connect, with one try. Raises AccessRefused if the broker refuses the credentials, else BrokerUnreachable."""
        patch_pamqp()
        drop_log_lines()
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

    async def underlying(self, *, timeout_s: float = 30) -> BrokerConnection:
        """Wait until the connection is open, and return aio-pika's connection. Raises BrokerUnreachable after
        `timeout_s`."""
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
        """Open a channel of aiormq, the library below aio-pika (docs/decisions/0001).

        Raises BrokerUnreachable if there is no connection to the broker, or if it is lost while the channel is opened.
        """
        connection = await self.underlying(timeout_s=timeout_s)
        with border(f"no channel on {self.address}"):
            async with asyncio.timeout(timeout_s):
                channel = await connection.underlay.channel(publisher_confirms=confirms, on_return_raises=True)
                assert isinstance(channel, Channel)
                return channel

    async def flowing(self, *, timeout_s: float) -> None:
        """Wait until the connection is open and the broker accepts publishes on it (no memory or disk alarm). Raises
        BrokerBlocked or BrokerUnreachable after `timeout_s`."""
        end = asyncio.get_running_loop().time() + timeout_s
        while self.blocked is not None:
            try:
                async with asyncio.timeout_at(end):
                    await self._unblocked.wait()
            except TimeoutError as error:
                raise self.blocked_error(f"not published within {timeout_s:g} s") from error
        await self.underlying(timeout_s=max(0.0, end - asyncio.get_running_loop().time()))

    def blocked_error(self, hint: str) -> BrokerBlocked:
        """Make the error to raise while the broker accepts no publishes. `hint` becomes the end of the error's text."""
        return BrokerBlocked(
            f"the broker at {self.address} takes nothing: {self.blocked} (a memory or disk alarm; `rabbitmqctl status` "
            f"says which); {hint}"
        )

    async def _open_any(self) -> None:
        """Open a connection to the first URL that works. If none works, the error names all URLs."""
        failed: list[BrokerError] = []
        for _ in self._urls:
            try:
                return await self._open()
            except BrokerError as error:
                failed.append(error)
                self._use_next_url()
        if len(failed) == 1:
            raise failed[0]
        kind = AccessRefused if any(isinstance(error, AccessRefused) for error in failed) else BrokerUnreachable
        raise kind("none of the broker URLs can be used: " + "; ".join(map(str, failed)))

    def _use_next_url(self) -> None:
        self._url_index = (self._url_index + 1) % len(self._urls)

    async def _open(self) -> None:
        url = self._urls[self._url_index]
        connection = BrokerConnection(url, ssl_context=self._ssl_context, on_alarm=self._on_alarm)
        try:
            with border(f"no broker at {self.address}", hint="; is it running, and is LANEKEEPER_AMQP_URL right?"):
                try:
                    async with asyncio.timeout(CONNECT_TIMEOUT_S if len(self._urls) == 1 else NODE_TIMEOUT_S):
                        await connection.connect()
                except (ProbableAuthenticationError, AuthenticationError) as error:
                    raise AccessRefused(
                        f"the broker at {self.address} refused user {url.user!r}: {str(error).rstrip('.')}; "
                        "check user, password and virtual host in LANEKEEPER_AMQP_URL"
                    ) from error
                except InvalidFrameError as error:  # the broker sent Close instead of OpenOk, unreadable for aiormq
                    raise AccessRefused(
                        f"the broker at {self.address} let user {url.user!r} in, but not into virtual host "
                        f"{unquote(url.raw_path[1:]) or '/'!r}: is it there, and has the user permissions in it?"
                    ) from error
                except Exception as error:
                    if not is_bare(error):
                        raise
                    why = f"the broker at {self.address} closed the connection as it was opened"
                    raise BrokerUnreachable(why) from error
        except asyncio.CancelledError:  # aiormq may have opened the connection all the same
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
            closing = self._current.underlay.closing
            await asyncio.wait([closing])
            error = None if closing.cancelled() else closing.exception()
            reason = text_of(error) if isinstance(error, Exception) else "closed"
            self._opened.clear()
            self.trouble = f"connection lost: {reason}"
            self.blocked = None
            self._unblocked.set()
            self.loss.set_result(reason)
            log.warning(signals.BROKER_LOST, connection=self._name, broker=self.address, reason=reason)
            self._use_next_url()
            await self._reopen()

    async def _reopen(self) -> None:
        """Try to connect until it succeeds, with random pauses, so that workers do not reconnect all at once."""
        attempt = 0
        while True:
            await asyncio.sleep(pause_s(attempt, first_s=0.25, cap_s=BACKOFF_CAP_S))
            try:
                await self._open_any()
            except Exception as error:
                self.trouble = reason = text_of(error)
                attempt += 1
                log.warning(signals.BROKER_UNREACHABLE, connection=self._name, reason=reason, attempt=attempt)
            else:
                return

    def _on_alarm(self, reason: str | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if reason is None:
            self.blocked = None
            self._unblocked.set()
            log.info(signals.BROKER_UNBLOCKED, connection=self._name, blocked_s=round(now_s - self._blocked_since_s, 1))
            return
        if self.blocked is None:
            self._blocked_since_s = now_s
            log.warning(signals.BROKER_BLOCKED, connection=self._name, broker=self.address, reason=reason)
        self.blocked = reason
        self._unblocked.clear()
