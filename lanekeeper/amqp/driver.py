"""aiormq's connection and aio-pika's over it, as we use them: fast, silent, and with a report of alarms.

Decision 0017: the frequent frames (deliveries, confirms, returned messages) are read from the socket before aiormq, by
the `Tap` of their channel; aiormq reads the rest. It takes ten times as long.

What aiormq lacks is not patched into it, because an application may use it as well: `_own_copy` executes two of its
modules a second time, for our connections alone.
"""

import asyncio
import importlib.util
import logging
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import aio_pika
import pamqp.frame
from aio_pika.abc import TimeoutType, UnderlayConnection
from aio_pika.tools import OneShotCallback
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel as UnderlyingChannel
from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelAccessRefused, ChannelNotFoundEntity
from pamqp.commands import Basic
from pamqp.commands import Channel as ChannelFrames
from pamqp.commands import Connection as Frames
from pamqp.header import ContentHeader
from yarl import URL

from lanekeeper.amqp.wire import message_from, message_of, properties_in, read_short_str
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, TopologyMismatch

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_KINDS: Final = frozenset({_METHOD, _HEADER, _BODY, _HEARTBEAT})
_FRAME: Final = struct.Struct(">BHI")
_FRAME_END: Final = 0xCE
_OF_BASIC: Final = b"\0<\0\0"
_HEARTBEAT_FRAME: Final = b"\x08\0\0\0\0\0\0\xce"
"""aiormq closes a connection on which it reads nothing for a while, and the broker sends no heartbeats while it sends
other frames. So `FrameReader` gives aiormq this frame while it passes all others to a `Tap`."""
_HEARTBEAT_EVERY_S: Final = 1.0
RPC_TIMEOUT_S: Final = 30
CLOSE_TIMEOUT_S: Final = 3
"""So short that a broker that does not answer delays a stopping worker only briefly."""
_DELIVER, _RETURN, _ACK, _NACK = b"\0\x3c\0\x3c", b"\0\x3c\0\x32", b"\0\x3c\0\x50", b"\0\x3c\0\x78"
_TAG: Final = struct.Struct(">QB")
_SIZE: Final = struct.Struct(">Q")
OnAlarm = Callable[[str | None], None]


# ---- frames ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that the broker has delivered to a consumer."""

    message: Message
    tag: int
    redelivered: bool


class Tap:
    """Reads the frames of one channel before aiormq does. Frames for which the callback is None, and all others, go to
    aiormq."""

    def __init__(self) -> None:
        self.on_delivery: Callable[[Delivered], None] | None = None
        self.on_confirm: Callable[[int, bool, bool], None] | None = None
        self.on_return: Callable[[Message], None] | None = None
        self._method = b""
        self._header = b""
        self._body_bytes_left = 0
        self._body: list[bytes] = []

    def takes(self, kind: int, payload: bytes) -> bool:
        if kind == _METHOD:
            return self._takes_method(payload)
        if not self._method:
            return False
        if kind == _HEADER:
            if payload[:4] != _OF_BASIC:
                raise ValueError("a header of another class")
            self._header, self._body_bytes_left = payload, _SIZE.unpack_from(payload, 4)[0]
        else:
            self._body.append(payload)
            self._body_bytes_left -= len(payload)
            if self._body_bytes_left < 0:
                raise ValueError("a body is longer than its header tells")
        if self._body_bytes_left <= 0:
            self._complete()
        return True

    def _takes_method(self, payload: bytes) -> bool:
        method = payload[:4]
        self._method = b""
        if (method == _DELIVER and self.on_delivery) or (method == _RETURN and self.on_return):
            self._method = payload
            return True
        if method in (_ACK, _NACK) and self.on_confirm:
            tag, bits = _TAG.unpack_from(payload, 4)
            self.on_confirm(tag, bool(bits & 1), method == _ACK)
            return True
        return False

    def _complete(self) -> None:
        method, body = self._method, self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._method, self._body = b"", []
        at = 5 + method[4] if method[:4] == _DELIVER else 7 + method[6]
        tag = bits = 0
        if method[:4] == _DELIVER:
            tag, bits = _TAG.unpack_from(method, at)
            at += _TAG.size
        past, exchange = read_short_str(method[at:])
        _, routing_key = read_short_str(method[at + past :])
        message = message_from(self._header, body, exchange=exchange, routing_key=routing_key)
        if method[:4] == _RETURN:
            if self.on_return is not None:
                self.on_return(message)
        elif self.on_delivery is not None:
            self.on_delivery(Delivered(message, tag, bool(bits & 1)))


async def left_to_the_tap(_: object) -> None:
    """Does nothing: `basic_consume` requires a callback, but the tap receives the deliveries."""


class FrameReader(asyncio.StreamReader):
    """The reader from which aiormq reads a connection: it offers each frame to its channel's `Tap` first."""

    def __init__(self, taps: dict[int, Tap], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._taps = taps
        self._clock = loop.time
        self._rest = b""
        self._is_not_amqp = False
        self._is_broken = False
        self._next_beat_s = 0.0

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # what sockets give is bytes
        if self._is_broken:
            return None
        if self._is_not_amqp:  # a server that does not speak AMQP 0-9-1 answers with something else
            return super().feed_data(data)
        data = self._rest + data if self._rest else data
        at, end, any_taken, left = 0, len(data), False, []
        while at + _FRAME.size < end:
            kind, channel, size = _FRAME.unpack_from(data, at)
            if kind not in _KINDS:
                self._is_not_amqp = True
                left.append(data[at:])
                at = end
                break
            past = at + _FRAME.size + size + 1
            if past > end:
                break
            if data[past - 1] != _FRAME_END:
                return self._break("a frame has not the length that it tells")
            tap = self._taps.get(channel)
            try:
                is_taken = tap is not None and tap.takes(kind, data[at + _FRAME.size : past - 1])
            except (ValueError, IndexError, struct.error) as error:
                return self._break(f"a frame that cannot be read: {error}")
            if is_taken:
                any_taken = True
            else:
                left.append(data[at:past])
            at = past
        self._rest = data[at:]
        if any_taken and (now_s := self._clock()) >= self._next_beat_s:
            self._next_beat_s = now_s + _HEARTBEAT_EVERY_S
            left.append(_HEARTBEAT_FRAME)
        if left:
            super().feed_data(b"".join(left))
        return None

    def _break(self, why: str) -> None:
        self._is_broken, self._rest = True, b""
        self.set_exception(ConnectionError(why))

    def feed_eof(self) -> None:
        if self._rest:
            super().feed_data(self._rest)
            self._rest = b""
        super().feed_eof()


class GatheringWriter(asyncio.StreamWriter):
    """Hands the frames of one turn of the event loop to the socket together: a write to a socket takes longer than the
    encoding of a frame."""

    _gathered: list[bytes] | None = None

    def write(self, data: bytes) -> None:  # type: ignore[override]  # aiormq writes bytes
        if self._gathered is None:
            self._gathered = []
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append(data)

    async def drain(self) -> None:
        self._flush()
        await super().drain()

    def write_eof(self) -> None:
        self._flush()
        super().write_eof()

    def close(self) -> None:
        self._flush()
        super().close()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None and not self.is_closing():  # uvloop raises if a closed socket is written to
            super().write(b"".join(gathered))


class Tapped(TransportFactory):
    """Opens the socket of an aiormq connection, so that a `FrameReader` reads it."""

    def __init__(self) -> None:
        self.taps: dict[int, Tap] = {}

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        contexts = kwargs.pop("ssl_context_provider")
        context = await contexts.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = FrameReader(self.taps, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, str(url.host), int(url.port or 0), ssl=context, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        return reader, GatheringWriter(transport, protocol, reader, loop)


# ---- aiormq, for our connections alone -------------------------------------------------------------------------------


_TEXTS: Final[dict[bytes, tuple[int, ...]]] = {
    b"\0\x0a\0\x32": (2, 0, 4),
    b"\0\x14\0\x28": (2, 0, 4),
    _RETURN: (2, 0, 0, 0),
    _DELIVER: (0, 9, 0, 0),
    b"\0\x3c\0\x47": (9, 0, 0, 4),
}
"""The methods in which the broker quotes what others chose (close of a connection or channel, return, deliver, get-ok),
with the layout of their arguments: 0 is a short string, other numbers are bytes of fixed size."""


def unmarshal(data: bytes) -> tuple[int, int, Any]:
    """Like `pamqp.frame.unmarshal`, but no bytes that a client may choose raise an error (wire.py)."""
    kind, channel, size = _FRAME.unpack_from(data)
    payload = data[_FRAME.size : _FRAME.size + size]
    if kind == _HEADER and len(data) > _FRAME.size + size:
        found = ContentHeader(body_size=_SIZE.unpack_from(payload, 4)[0])
        for name, value in properties_in(payload).items():
            setattr(found.properties, name, value)
        return len(data), channel, found
    if kind == _METHOD and not payload.isascii() and (layout := _TEXTS.get(payload[:4])) is not None:
        parts, at = [payload[:4]], 4
        for fixed in layout:
            past, text = (fixed, "") if fixed else read_short_str(payload[at:])
            parts.append(payload[at : at + past] if fixed else payload[at : at + 1] + text.encode())
            at += past
        data = data[: _FRAME.size] + b"".join(parts) + data[-1:]
    return pamqp.frame.unmarshal(data)


def _own_copy(name: str) -> ModuleType:
    """A second copy of a module of aiormq, in which log lines go nowhere, because we log the same events ourselves."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.log = logging.Logger(name, logging.CRITICAL + 1)  # type: ignore[attr-defined]
    return module


own_aiormq: Final[Any] = _own_copy("aiormq.connection")
own_aiormq.Channel = _own_copy("aiormq.channel").Channel
own_aiormq.pamqp = SimpleNamespace(
    frame=SimpleNamespace(unmarshal=unmarshal, marshal=pamqp.frame.marshal, frame_parts=pamqp.frame.frame_parts)
)
if TYPE_CHECKING:
    from aiormq.connection import Connection as Underlying
else:
    Underlying = own_aiormq.Connection


class UnderlyingConnection(Underlying):
    """aiormq's connection, with taps, and with a callback for alarms: the broker's reason ("low on memory") when it
    blocks the connection at its first publish, None when it unblocks it. Until then it reads nothing, not even
    acknowledgements. aiormq does not report this, so private methods are overridden here;
    `tests/broker/test_connection.py` fails if they disappear."""

    FRAME_BUFFER_SIZE = 64

    @property
    def closing(self) -> "asyncio.Future[Any]":
        """All callers get the same future: wait for it with `asyncio.wait`. (aiormq makes a new one on each access, so
        that aio-pika could not remove its callback; see `Channel`.)"""
        return self._closing

    @closing.setter
    def closing(self, future: "asyncio.Future[Any]") -> None:  # aiormq before 7.2 has an attribute, and sets it
        self._closing = future

    def __init__(self, url: URL, *, context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        reading = Tapped()
        super().__init__(url, context=context, transport_factory=reading)
        self.taps = reading.taps
        self._on_alarm = on_alarm

    async def channel(self, *args: Any, **kwargs: Any) -> UnderlyingChannel:
        channel: Any = await super().channel(*args, **kwargs)
        self.taps.pop(channel.number, None)  # an earlier channel may have had the same number
        return channel  # type: ignore[no-any-return]

    async def _Connection__handle_connection_blocked(self, frame: Frames.Blocked) -> None:
        self._on_alarm(frame.reason or "alarm")

    async def _Connection__handle_connection_unblocked(self, frame: Frames.Unblocked) -> None:
        self._on_alarm(None)


def tap_of(channel: UnderlyingChannel) -> Tap:
    """Set its callbacks to receive the channel's deliveries, confirms and returned messages in place of aiormq."""
    assert isinstance(channel.connection, UnderlyingConnection)
    return channel.connection.taps.setdefault(channel.number, Tap())


class Channel(aio_pika.Channel):
    """aio-pika's channel, which removes its callback from the connection when it has closed: else each leaks 4 KB, and
    a worker opens one for each check of the topology."""

    async def _on_close(self, closing: "asyncio.Future[Any]") -> BaseException | None:
        if self._channel is not None:
            self._channel.channel.connection.closing.remove_done_callback(self._channel.close_callback)
        return await super()._on_close(closing)


class BrokerConnection(aio_pika.Connection):
    """aio-pika's connection over an `UnderlyingConnection`. It does not open itself again."""

    CHANNEL_CLASS = Channel

    def __init__(self, url: URL, *, ssl_context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        super().__init__(url, ssl_context=ssl_context)
        self.underlay = UnderlyingConnection(url, context=ssl_context, on_alarm=on_alarm)

    async def connect(self, timeout: TimeoutType = None) -> None:
        async with asyncio.timeout(timeout):
            await self.underlay.connect()
        on_close = OneShotCallback(self._on_connection_close)
        self.underlay.closing.add_done_callback(on_close)
        self.transport = UnderlayConnection(connection=self.underlay, close_callback=on_close)

    @property
    def is_closed(self) -> bool:
        return self.transport is None or self.underlay.is_closed


async def fetch(channel: UnderlyingChannel, queue: str) -> tuple[Delivered, int] | None:
    """The head of a queue, and how many messages wait behind it; None if it is empty. Raises aiormq's errors."""
    got = await channel.basic_get(queue, timeout=RPC_TIMEOUT_S)
    found: Any = got.delivery
    if not isinstance(found, Basic.GetOk):
        return None
    return Delivered(message_of(got), found.delivery_tag or 0, bool(found.redelivered)), found.message_count or 0


async def close(channel: UnderlyingChannel) -> None:
    """Without errors: whatever was not settled returns to its queue; later, if the broker does not answer in time."""
    # Not by aiormq's `close`: when its time is over it sends Channel.Close again, for which RabbitMQ closes the
    # connection.
    is_sent: asyncio.Event = cast("Any", channel)._Channel__close_event
    if channel.is_closed or is_sent.is_set() or not channel.connection.is_opened:
        return
    asks = ChannelFrames.Close(reply_code=200, reply_text="", class_id=0, method_id=0)
    is_sent.set()
    # in a task of the channel: it is sent also if this is cancelled, or the broker reads nothing for longer
    channel.create_task(channel.write_queue.put(ChannelFrame.marshall(channel_number=channel.number, frames=[asks])))
    await asyncio.wait({channel.closing}, timeout=CLOSE_TIMEOUT_S)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def border(what: str, *, lost: type[BrokerError] = BrokerUnreachable, hint: str = "") -> Iterator[None]:
    """Translate aiormq's exceptions for a lost channel or connection, or for a silent broker, into `lost`; unless it is
    given, a refusal becomes AccessRefused, and a missing exchange or queue TopologyMismatch. If aiormq has swallowed a
    cancellation of the task, raise CancelledError."""
    before = cancellations()
    try:
        yield
    except asyncio.CancelledError:
        if asks_to_stop():
            raise
        raise lost(f"{what}: the connection was lost{hint}") from None
    except Exception as error:
        if not (is_bare(error) or isinstance(error, AMQPError | RuntimeError | OSError)):  # TimeoutError is an OSError
            raise
        if cancellations() == before:
            why = "the connection was lost" if is_bare(error) else text_of(error)
            if lost is BrokerUnreachable and isinstance(error, ChannelAccessRefused):
                raise AccessRefused(f"{what}: {why}{hint}") from error
            if lost is BrokerUnreachable and isinstance(error, ChannelNotFoundEntity):
                raise TopologyMismatch(f"{what}: {why}; run: lanekeeper topology apply") from error
            raise lost(f"{what}: {why}{hint}") from error
    if cancellations() > before:
        raise asyncio.CancelledError


def is_bare(error: Exception) -> bool:
    """Whether aiormq means that the connection closed: it raises a bare Exception just afterwards, and
    StopAsyncIteration (which async generators turn into RuntimeError) if a broker that starts closes a connection as it
    is opened."""
    return type(error) in (Exception, StopAsyncIteration)


def text_of(error: BaseException) -> str:
    """Its text, or the name of its class."""
    return str(error) or type(error).__name__


def asks_to_stop() -> bool:
    """Whether a caught CancelledError is ours. aiormq raises it also if a channel or connection closed."""
    return cancellations() > 0


def cancellations() -> int:
    """How often this task was cancelled. If the count has grown during a call that returns normally, aiormq has lost a
    cancellation: before Python 3.12, `wait_for` loses one that comes together with the result (20 of 400 in a test that
    cancelled declarations of a queue)."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
