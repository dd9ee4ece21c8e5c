"""One supervised connection to the broker: it is opened, watched, and opened again when it is lost. aio-pika's plain
connection, not its robust objects, which restore channels silently (docs/decisions/0001): code that uses a channel sees
that it has closed, and opens another."""

import asyncio
import random
import ssl
from contextlib import suppress
from typing import Self
from urllib.parse import unquote

from aiormq.channel import Channel
from aiormq.exceptions import AuthenticationError, InvalidFrameError, ProbableAuthenticationError
from yarl import URL

from lanekeeper.amqp.driver import (
    CLOSE_TIMEOUT_S,
    RPC_TIMEOUT_S,
    BrokerConnection,
    close,
    is_bare,
    open_channel,
    text_of,
    translate_broker_errors,
)
from lanekeeper.backoff import pause_s
from lanekeeper.contract.identity import is_host, urls_of
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerError,
    BrokerUnreachable,
    ClientMisused,
    InvalidUrl,
)
from lanekeeper.telemetry import logs, signals

HEARTBEAT_S = 10
"""A silent broker is noticed after `3 * HEARTBEAT_S + 3` seconds (docs/facts.md, section 8)."""
CONNECT_TIMEOUT_S = 10
NODE_TIMEOUT_S = 4
"""For one node of several: a frozen node accepts connections and never answers."""
BACKOFF_CAP_S = 2.5
"""So a worker is connected at most about this long after the broker has started, and a hundred workers make about a
hundred tries a second."""
DEPTH_TIMEOUT_S = 5


class Connection:
    """A connection to RabbitMQ, opened again whenever it is lost. `url`: one URL, or those of a cluster's nodes,
    separated by commas; it starts with a random one."""

    def __init__(self, url: str, *, name: str, ssl_context: ssl.SSLContext | None = None) -> None:
        self._url = url
        try:
            self._urls = [URL(node_url).update_query(heartbeat=HEARTBEAT_S, name=name) for node_url in urls_of(url)]
        except ValueError:  # its text may have the password
            raise InvalidUrl("a broker's URL is amqp(s)://user:password@host:port/vhost, with %-escapes") from None
        if any(node_url.scheme not in ("amqp", "amqps") for node_url in self._urls):
            raise InvalidUrl("a broker's URL begins with amqp:// or amqps://")
        if not all(is_host(node_url.host or "") for node_url in self._urls):
            raise InvalidUrl("a broker's URL has a host: amqp(s)://user:password@host:port/vhost")
        self._url_index = random.randrange(len(self._urls))
        self._name = name
        self._ssl_context = ssl_context
        self._current: BrokerConnection | None = None
        self._opened = asyncio.Event()
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._blocked_since_s = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self.loss: asyncio.Future[str]
        self.trouble: str | None = "not connected yet"
        self.blocked: str | None = None
        """Why the broker accepts no publishes ("low on memory"). It tells only connections that have published."""
        self.blocks = 0
        self.openings = 0
        """If it has changed, what was learned about the broker (its size limit) may no longer be true."""

    def another(self, purpose: str) -> "Connection":
        return Connection(self._url, name=f"{self._name}: {purpose}", ssl_context=self._ssl_context)

    @property
    def is_open(self) -> bool:
        return self._current is not None and not self._current.is_closed

    @property
    def version(self) -> str:
        if self._current is None:
            raise BrokerUnreachable(f"no connection to {self.address}: {self.trouble}")
        return str(self._current.underlay.server_properties["version"])

    @property
    def endpoint(self) -> tuple[str, int]:
        url = self._urls[self._url_index]
        return str(url.host), url.port or (5671 if url.scheme == "amqps" else 5672)

    @property
    def address(self) -> str:
        host, port = self.endpoint
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def __aenter__(self) -> Self:
        self.loss = asyncio.get_running_loop().create_future()
        await self._open_any()
        self._supervisor = asyncio.create_task(self._supervise(), name=f"connection {self._name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            self._opened.set()  # so that those who wait in `underlying` get ClientMisused
            while not supervisor.done():  # a cancellation that arrives while aiormq waits can be lost
                supervisor.cancel()
                await asyncio.wait([supervisor], timeout=CLOSE_TIMEOUT_S)
        if self._current is not None:
            with suppress(BrokerUnreachable), translate_broker_errors("closing"):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._current.close()

    async def underlying(self, *, timeout_s: float = 30) -> BrokerConnection:
        """Wait until the connection is open. Raises BrokerUnreachable after `timeout_s`, and ClientMisused."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._supervisor is None:
                        raise ClientMisused(f"the connection to {self.address} is not open: use it inside `async with`")
                    await self._opened.wait()
                    if self._current is not None and not self._current.is_closed:
                        return self._current
                    self._opened.clear()
        except TimeoutError as error:
            raise BrokerUnreachable(
                f"no connection to {self.address} within {timeout_s:g} s: {self.trouble}"
            ) from error

    async def channel(self, *, confirms: bool, timeout_s: float = 30) -> Channel:
        """Open a channel of aiormq, the library below aio-pika (docs/decisions/0001). Raises BrokerUnreachable."""
        connection = await self.underlying(timeout_s=timeout_s)
        with translate_broker_errors(f"no channel on {self.address}"):
            async with asyncio.timeout(timeout_s):
                return await open_channel(connection, confirms=confirms)

    async def flowing(self, *, timeout_s: float) -> None:
        end = asyncio.get_running_loop().time() + timeout_s
        while self.blocked is not None:
            try:
                async with asyncio.timeout_at(end):
                    await self._unblocked.wait()
            except TimeoutError as error:
                raise self.blocked_error(f"not published within {timeout_s:g} s") from error
        await self.underlying(timeout_s=max(0.0, end - asyncio.get_running_loop().time()))

    def blocked_error(self, hint: str) -> BrokerBlocked:
        return BrokerBlocked(
            f"the broker at {self.address} takes nothing: {self.blocked} (a memory or disk alarm; `rabbitmqctl status` "
            f"says which); {hint}"
        )

    async def _open_any(self) -> None:
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
            with translate_broker_errors(
                f"no broker at {self.address}", hint="; is it running, and is LANEKEEPER_AMQP_URL right?"
            ):
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
        except BaseException:  # aiormq may have opened the connection, although this was cancelled
            connection.abort()
            raise
        self._current = connection
        if self.loss.done():
            self.loss = asyncio.get_running_loop().create_future()
        self.openings += 1
        self.trouble = None
        self._opened.set()
        logs.info(signals.BROKER_CONNECTED, connection=self._name, broker=self.address, version=self.version)

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
            logs.warning(signals.BROKER_LOST, connection=self._name, broker=self.address, reason=reason)
            self._use_next_url()
            await self._reopen()

    async def _reopen(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(pause_s(attempt, first_s=0.25, cap_s=BACKOFF_CAP_S))
            try:
                await self._open_any()
            except Exception as error:
                self.trouble = reason = text_of(error)
                attempt += 1
                logs.warning(signals.BROKER_UNREACHABLE, connection=self._name, reason=reason, attempt=attempt)
            else:
                return

    def _on_alarm(self, reason: str | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if reason is None:
            self.blocked = None
            self._unblocked.set()
            logs.info(
                signals.BROKER_UNBLOCKED, connection=self._name, blocked_s=round(now_s - self._blocked_since_s, 1)
            )
            return
        if self.blocked is None:
            self._blocked_since_s = now_s
            self.blocks += 1
            logs.warning(signals.BROKER_BLOCKED, connection=self._name, broker=self.address, reason=reason)
        self.blocked = reason
        self._unblocked.clear()


async def depths(connection: Connection, queues: list[str]) -> dict[str, Depth]:
    """Raises AccessRefused (from 4.3 on, a user needs some right to a queue to see it), BrokerUnreachable,
    TopologyMismatch (no such queue)."""
    channel = await connection.channel(confirms=False, timeout_s=DEPTH_TIMEOUT_S)
    with translate_broker_errors("cannot look at the queues"):
        found = {queue: await depth(channel, queue, timeout_s=DEPTH_TIMEOUT_S) for queue in queues}
    await close(channel)
    return found


async def depth(channel: Channel, queue: str, *, timeout_s: float = RPC_TIMEOUT_S) -> Depth:
    """A passive declaration returns both exactly and without delay (docs/facts.md, section 9). Raises aiormq's
    errors."""
    declared = await channel.queue_declare(queue, passive=True, timeout=timeout_s)
    return Depth(declared.message_count or 0, declared.consumer_count or 0)
