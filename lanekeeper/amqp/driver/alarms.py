"""aio-pika's connection, extended: it reports when the broker blocks it (a memory or disk alarm), and it logs nothing.

aiormq, the library below aio-pika, receives `Connection.Blocked` but does not report it to its caller. So this file,
and no other, overrides private methods of aiormq; `tests/broker/test_alarms.py` fails if these methods disappear.
RabbitMQ blocks a connection at its first publish during an alarm, and then reads nothing from it, not even
acknowledgements.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import aio_pika
from aio_pika.abc import TimeoutType, UnderlayConnection
from aio_pika.tools import OneShotCallback
from aiormq.abc import AbstractChannel
from aiormq.channel import Channel as UnderlyingChannel
from aiormq.connection import Connection as Underlying
from pamqp.commands import Connection as Frames
from yarl import URL

from lanekeeper.amqp.driver.incoming import Tap, Tapped
from lanekeeper.amqp.driver.quiet import QuietConnection, quietly

OnAlarm = Callable[[str | None], None]
"""A function that is called with the broker's reason ("low on memory") when the broker blocks the connection, and with
None when it unblocks it."""


class UnderlyingConnection(QuietConnection, Underlying):
    """aiormq's connection with two additions. When the broker blocks the connection because of a memory or disk alarm,
    the connection calls `on_alarm` with the reason; when the alarm ends, it calls `on_alarm` with None. Each channel's
    deliveries, confirms and returned messages go to a `Tap` (`incoming.py`), which reads them ten times as fast as
    aiormq."""

    @property
    def closing(self) -> "asyncio.Future[Any]":
        """The future that is done when the connection closes. All callers get the same future, so it must not be
        cancelled: wait for it with `asyncio.wait`. (aiormq's own property makes a new future on each access, so that
        aio-pika cannot remove the callback that it adds for each channel; see `Channel`.)"""
        return self._closing

    def __init__(self, url: URL, *, context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        reading = Tapped()
        super().__init__(url, context=context, transport_factory=reading)
        self.taps = reading.taps
        """The `Tap` (the object that reads a channel's frames before aiormq does) of each channel that has one, by the
        channel's number."""
        self._on_alarm = on_alarm

    async def connect(self, *args: Any, **kwargs: Any) -> bool:
        with quietly():
            return bool(await super().connect(*args, **kwargs))

    async def channel(self, *args: Any, **kwargs: Any) -> AbstractChannel:
        with quietly():
            channel = await super().channel(*args, **kwargs)
        self.taps.pop(channel.number, None)  # an earlier channel may have had the same number
        return channel

    async def _Connection__handle_connection_blocked(self, frame: Frames.Blocked) -> None:
        self._on_alarm(frame.reason or "alarm")

    async def _Connection__handle_connection_unblocked(self, frame: Frames.Unblocked) -> None:
        self._on_alarm(None)


def tap_of(channel: UnderlyingChannel) -> Tap:
    """The `Tap` of a channel: the object that reads the channel's frames before aiormq does. Set its callbacks to
    receive the channel's deliveries, confirms and returned messages in place of aiormq (`incoming.py`)."""
    assert isinstance(channel.connection, UnderlyingConnection)
    return channel.connection.taps.setdefault(channel.number, Tap())


class Channel(aio_pika.Channel):
    """aio-pika's channel without a memory leak: when it has closed, it removes its callback from the connection.

    aio-pika never removes this callback, which leaks 4 KB for each channel. A worker runs for months, and opens a
    channel for each check of the topology."""

    async def _on_close(self, closing: "asyncio.Future[Any]") -> BaseException | None:
        if self._channel is not None:
            self._channel.channel.connection.closing.remove_done_callback(self._channel.close_callback)
        return await super()._on_close(closing)


class BrokerConnection(aio_pika.Connection):
    """aio-pika's connection over an `UnderlyingConnection`. It does not open itself again when it is lost: `Connection`
    (amqp/connection.py) creates another `BrokerConnection` then."""

    CHANNEL_CLASS = Channel

    def __init__(self, url: URL, *, ssl_context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        super().__init__(url, ssl_context=ssl_context)
        self.underlay = UnderlyingConnection(url, context=ssl_context, on_alarm=on_alarm)
        """aiormq's connection, on which this connection of aio-pika is built."""

    async def connect(self, timeout: TimeoutType = None) -> None:
        async with asyncio.timeout(timeout):
            await self.underlay.connect()
        on_close = OneShotCallback(self._on_connection_close)
        self.underlay.closing.add_done_callback(on_close)
        self.transport = UnderlayConnection(connection=self.underlay, close_callback=on_close)

    @property
    def is_closed(self) -> bool:
        """Whether the connection was closed or lost, or not opened yet. (aio-pika's own property is true only after
        `close`.)"""
        return self.transport is None or self.underlay.is_closed
