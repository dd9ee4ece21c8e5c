"""aio-pika's connection and aiormq's channels, as we use them: through their public interface, over a socket of ours.

aiormq lets its user open the socket (`transport_factory`). Ours passes every frame on, and corrects in between what
would harm others (docs/decisions/0017): what aiormq's codec cannot read is made readable (tolerant.py), an alarm of the
broker is reported, and after a channel was closed nothing more is written to it.
"""

import asyncio
import logging
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import aio_pika
import aiormq
from aio_pika.abc import TimeoutType, UnderlayConnection
from aio_pika.tools import OneShotCallback
from aiormq.abc import AbstractConnection, DeliveredMessage
from aiormq.channel import Channel
from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelAccessRefused, ChannelNotFoundEntity
from pamqp.commands import Basic
from yarl import URL

from lanekeeper.amqp.tolerant import QUOTING, message_of, readable_header, readable_method
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, TopologyMismatch

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_KINDS: Final = frozenset({_METHOD, _HEADER, _BODY, _HEARTBEAT})
_FRAME: Final = struct.Struct(">BHI")
_FRAME_END: Final = b"\xce"
_BLOCKED, _UNBLOCKED = b"\0\x0a\0\x3c", b"\0\x0a\0\x3d"
_OPEN, _CLOSE, _CLOSE_OK = b"\0\x14\0\x0a", b"\0\x14\0\x28", b"\0\x14\0\x29"
_RETURN: Final = b"\0\x3c\0\x32"
_WATCHED: Final = frozenset({*QUOTING, _BLOCKED, _UNBLOCKED})
RPC_TIMEOUT_S: Final = 30
CLOSE_TIMEOUT_S: Final = 3
"""So short that a broker that does not answer delays a stopping worker only briefly."""
MOST_CHANNELS: Final = 65535
OnAlarm = Callable[[str | None], None]


# ---- the socket ------------------------------------------------------------------------------------------------------


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, channel, len(payload)) + payload + _FRAME_END


class Incoming:
    """The broker's frames on their way to aiormq. `on_alarm` is called with the broker's reason ("low on memory") when
    it blocks the connection, and with None when it unblocks it; `on_close` with the number of a channel that the broker
    closes."""

    def __init__(self, *, on_alarm: OnAlarm, on_close: Callable[[int], None]) -> None:
        self._on_alarm = on_alarm
        self._on_close = on_close
        self._rest = b""
        self._method: dict[int, bytes] = {}
        self._is_amqp = True

    def passed(self, data: bytes) -> bytes:
        if not self._is_amqp:  # a server that does not speak AMQP 0-9-1 answers with something else
            return data
        data = self._rest + data if self._rest else data
        at = unchanged = 0
        parts = []
        while at + _FRAME.size < len(data):
            kind, channel, size = _FRAME.unpack_from(data, at)
            if kind not in _KINDS:
                self._is_amqp = False
                at = len(data)
                break
            begin, end = at + _FRAME.size, at + _FRAME.size + size
            if end >= len(data):
                break
            if kind == _HEADER or (kind == _METHOD and data[begin : begin + 4] in _WATCHED):
                parts += [data[unchanged:at], self._readable(kind, channel, data[begin:end])]
                unchanged = end + 1
            at = end + 1
        self._rest = data[at:]
        parts.append(data[unchanged:at])
        return b"".join(parts)

    def _readable(self, kind: int, channel: int, payload: bytes) -> bytes:
        method = payload[:4] if kind == _METHOD else b""
        if method in (_BLOCKED, _UNBLOCKED):  # aiormq would only log it
            self._on_alarm(None if method == _UNBLOCKED else payload[5:].decode(errors="replace") or "alarm")
            return b""
        if method == _CLOSE:
            self._on_close(channel)
        try:
            if kind == _METHOD:
                payload = readable_method(payload)
            else:
                payload = readable_header(payload, of_return=self._method.get(channel) == _RETURN)
        except (IndexError, ValueError, struct.error):
            pass  # no frame of a broker: aiormq closes the connection
        if kind == _METHOD:
            self._method[channel] = method
        return _frame(kind, channel, payload)


class Outgoing(asyncio.StreamWriter):
    """Writes what aiormq sends. Frames of one turn of the event loop reach the socket together: a write to a socket
    takes longer than the encoding of a frame.

    Nothing is written to a channel after its Close or Close-Ok, until it is opened again: the broker would close the
    connection (504), and with it all other channels. aiormq may still send what waited to be sent, or a second Close.
    It also omits Close-Ok if it has much to send, so Close-Ok is sent here."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gathered: list[bytes] = []
        self._closed: set[int] = set()

    def write(self, data: bytes) -> None:  # type: ignore[override]  # aiormq writes bytes, one channel's frames
        if data[0] == _METHOD:
            channel, method = int.from_bytes(data[1:3], "big"), data[7:11]
            if method == _OPEN:
                self._closed.discard(channel)
            elif channel in self._closed:
                return
            elif method == _CLOSE:
                self._closed.add(channel)
        self._gather(data)

    def on_close(self, channel: int) -> None:
        self._closed.add(channel)
        self._gather(_frame(_METHOD, channel, _CLOSE_OK))

    def _gather(self, data: bytes) -> None:
        if not self._gathered:
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
        if not self.is_closing():  # aiormq closes twice, and a closed TLS transport of Python 3.11.2 breaks by that
            super().close()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self.is_closing():  # uvloop raises if a closed socket is written to
            super().write(b"".join(gathered))


class _Protocol(asyncio.StreamReaderProtocol):
    def __init__(self, reader: asyncio.StreamReader, incoming: Incoming, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._incoming = incoming

    def data_received(self, data: bytes) -> None:
        super().data_received(self._incoming.passed(data))


class Socket(TransportFactory):
    """Opens the socket of one connection."""

    def __init__(self, on_alarm: OnAlarm) -> None:
        self._on_alarm = on_alarm
        self._writer: Outgoing | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        contexts = kwargs.pop("ssl_context_provider")
        context = await contexts.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        incoming = Incoming(on_alarm=self._on_alarm, on_close=self._on_close)
        protocol = _Protocol(reader, incoming, loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, str(url.host), int(url.port or 0), ssl=context, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self._writer = Outgoing(transport, protocol, reader, loop)
        return reader, self._writer

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _on_close(self, channel: int) -> None:
        if self._writer is not None:
            self._writer.on_close(channel)


# ---- the connection --------------------------------------------------------------------------------------------------


class Underlay(aiormq.Connection):
    """aiormq's connection, with queues of frames that are never full: if a publish waits for room, those behind it wait
    in line, and take a turn of the event loop each. What is on its way is bounded by who waits for its confirm."""

    FRAME_BUFFER_SIZE = 0


class BrokerConnection(aio_pika.Connection):
    """aio-pika's connection over our socket. It does not open itself again."""

    def __init__(self, url: URL, *, ssl_context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        super().__init__(url, ssl_context=ssl_context)
        self._socket = Socket(on_alarm)
        self._opened: AbstractConnection | None = None

    async def connect(self, timeout: TimeoutType = None) -> None:
        opened = Underlay(self.url, transport_factory=self._socket, **self.kwargs)
        async with asyncio.timeout(timeout):
            await opened.connect()
        on_close = OneShotCallback(self._on_lost)
        opened.closing.add_done_callback(on_close)
        self.transport = UnderlayConnection(connection=opened, close_callback=on_close)
        self._opened = opened
        self.connected.set()

    async def _on_lost(self, _: "asyncio.Future[Any]") -> None:
        self.connected.clear()

    def abort(self) -> None:
        self._socket.abort()

    @property
    def underlay(self) -> AbstractConnection:
        if self._opened is None:
            raise RuntimeError("the connection was not opened")
        return self._opened

    @property
    def is_closed(self) -> bool:
        return self._opened is None or self._opened.is_closed


async def open_channel(connection: aio_pika.abc.AbstractConnection, *, confirms: bool) -> Channel:
    """Open a channel of aiormq: aio-pika's own keep 4 KB each until the connection closes. A number is used again only
    after all others: aiormq may still send what was meant for an earlier channel of the same number."""
    if connection.transport is None:
        raise RuntimeError("the connection is closed")
    underlay: Any = connection.transport.connection
    most, number = underlay.connection_tune.channel_max or MOST_CHANNELS, underlay.last_channel
    for _ in range(most):
        number = number % most + 1
        if number not in underlay.channels:
            break
    underlay.last_channel = number
    channel: Channel = await underlay.channel(
        number, publisher_confirms=confirms, on_return_raises=True, frame_buffer_size=Underlay.FRAME_BUFFER_SIZE
    )
    return channel


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that the broker has delivered to a consumer."""

    message: Message
    tag: int
    redelivered: bool


def delivered(found: DeliveredMessage) -> Delivered:
    """What aiormq gives to a consumer, on a connection of ours, as a value."""
    return Delivered(message_of(found), found.delivery_tag or 0, bool(found.redelivered))


async def fetch(channel: Channel, queue: str) -> tuple[Delivered, int] | None:
    """The head of a queue, and how many messages wait behind it; None if it is empty. Raises aiormq's errors."""
    got = await channel.basic_get(queue, timeout=RPC_TIMEOUT_S)
    return (delivered(got), got.message_count or 0) if isinstance(got.delivery, Basic.GetOk) else None


_closing: Final[set[asyncio.Task[None]]] = set()
"""asyncio keeps only weak references to tasks."""


async def close(channel: Channel) -> None:
    """Without errors: whatever was not settled returns to its queue; later, if the broker does not answer in time."""
    task = asyncio.create_task(_close(channel), name="close a channel")  # Close is sent also if this is cancelled
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)


async def _close(channel: Channel) -> None:
    try:
        with translate_broker_errors("closing a channel"):
            await channel.close()
    except BrokerError:
        pass


# ---- errors ----------------------------------------------------------------------------------------------------------


_is_ours: Final[ContextVar[bool]] = ContextVar("is_ours", default=False)


class _OnlyOthers(logging.Filter):
    """Drops aiormq's log lines about our connections, because we log the same events ourselves. aiormq logs in tasks,
    and each has the context of the call that began it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _is_ours.get()


for _name in ("aiormq.connection", "aiormq.channel"):
    logging.getLogger(_name).addFilter(_OnlyOthers())


@contextmanager
def translate_broker_errors(
    what: str, *, lost: type[BrokerError] = BrokerUnreachable, hint: str = ""
) -> Iterator[None]:
    """Around each call of aiormq. Translate its exceptions for a lost channel or connection, or for a silent broker,
    into `lost`; unless it is given, a refusal becomes AccessRefused, and a missing exchange or queue TopologyMismatch.
    If aiormq has swallowed a cancellation of the task, raise CancelledError."""
    before = cancellations()
    was_ours = _is_ours.set(True)
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
    finally:
        _is_ours.reset(was_ours)
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
