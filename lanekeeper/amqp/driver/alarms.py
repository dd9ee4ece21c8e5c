"""aio-pika's connection, extended: it reports when the broker blocks it (a memory or disk alarm), and it logs nothing.

aiormq, the library below, receives `Connection.Blocked` but does not report it: it only logs, and delays its writer if
that has not started yet. Only this file overrides private methods of aiormq; `tests/broker/test_alarms.py` fails if
they disappear. RabbitMQ blocks a connection only once it publishes, and then reads nothing from it, not even
acknowledgements.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import aio_pika
from aio_pika.abc import TimeoutType, UnderlayConnection
from aiormq.abc import AbstractChannel
from aiormq.channel import Channel as UnderlyingChannel
from aiormq.connection import Connection as Underlying
from pamqp.commands import Connection as Frames
from yarl import URL

from lanekeeper.amqp.driver.incoming import Tap, Tapped
from lanekeeper.amqp.driver.quiet import Ours, quietly

OVERRIDDEN = ("_Connection__handle_connection_blocked", "_Connection__handle_connection_unblocked")

OnAlarm = Callable[[str | None], None]
"""Called with the broker's reason ("low on memory") when it blocks the connection, with None when it unblocks it."""


class Alarmed(Ours, Underlying):
    """aiormq's connection, which calls `on_alarm`."""

    @property
    def closing(self) -> "asyncio.Future[Any]":
        """The same future for every caller: only read it, or await it under `shield`. aiormq makes a new one on each
        access, so that aio-pika could not remove the callback it adds for each channel (see `Channel`)."""
        return self._closing

    def __init__(self, url: URL, *, context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        reading = Tapped()
        super().__init__(url, context=context, transport_factory=reading)
        self._taps = reading.taps
        self._on_alarm = on_alarm

    def tap(self, number: int) -> Tap:
        """The tap of an open channel."""
        return self._taps.setdefault(number, Tap())

    async def connect(self, *args: Any, **kwargs: Any) -> bool:
        with quietly():
            return bool(await super().connect(*args, **kwargs))

    async def channel(self, *args: Any, **kwargs: Any) -> AbstractChannel:
        with quietly():
            channel = await super().channel(*args, **kwargs)
        self._taps.pop(channel.number, None)  # of a channel before it that had the same number
        return channel

    async def _Connection__handle_connection_blocked(self, frame: Frames.Blocked) -> None:
        self._on_alarm(frame.reason or "alarm")

    async def _Connection__handle_connection_unblocked(self, frame: Frames.Unblocked) -> None:
        self._on_alarm(None)


def tap_of(channel: UnderlyingChannel) -> Tap:
    """The object that takes a channel's deliveries and confirms before aiormq does."""
    assert isinstance(channel.connection, Alarmed)
    return channel.connection.tap(channel.number)


class Transport(UnderlayConnection):
    """aio-pika's transport, which opens an `Alarmed` connection."""

    connection: Alarmed

    @classmethod
    async def make_connection(cls, url: URL, timeout: TimeoutType = None, **kwargs: Any) -> Alarmed:
        connection = Alarmed(url, **kwargs)
        async with asyncio.timeout(timeout):
            await connection.connect()
        return connection


class Channel(aio_pika.Channel):
    """aio-pika's channel, which removes its callback from the connection when it has closed.

    aio-pika leaves the callback there: 4 KB for each channel, and a worker opens channels for months to check its
    topology."""

    async def _on_close(self, closing: "asyncio.Future[Any]") -> BaseException | None:
        if self._channel is not None:
            self._channel.channel.connection.closing.remove_done_callback(self._channel.close_callback)
        return await super()._on_close(closing)


class Plain(aio_pika.Connection):
    """aio-pika's plain connection, on `Transport`: opened once, never restored."""

    CHANNEL_CLASS = Channel

    def __init__(self, url: URL, *, ssl_context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        super().__init__(url, ssl_context=ssl_context)
        self.kwargs["on_alarm"] = on_alarm
        self._underlay: Alarmed | None = None

    async def connect(self, timeout: TimeoutType = None) -> None:
        transport = await Transport.connect(self.url, self._on_connection_close, timeout=timeout, **self.kwargs)
        assert isinstance(transport.connection, Alarmed)
        self.transport, self._underlay = transport, transport.connection
        await self._on_connected()

    @property
    def underlay(self) -> Alarmed:
        """aiormq's connection. Raises RuntimeError before `connect`."""
        if self._underlay is None:
            raise RuntimeError("not connected")
        return self._underlay

    @property
    def is_closed(self) -> bool:
        """True also when the connection was lost; aio-pika's own property notices only `close`."""
        return self._underlay is None or self._underlay.is_closed
