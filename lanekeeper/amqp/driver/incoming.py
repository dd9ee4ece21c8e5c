"""Reads what comes often (deliveries, confirms, returned messages) as soon as the socket has it; aiormq reads the rest.

aiormq reads a frame in three awaited reads, decodes it into objects, passes it through a queue to the channel's task,
and starts a task for each message: ten times the time of this. `FrameReader` stands where aiormq expects the socket's
reader. It takes the frames that a channel's `Tap` wants, and leaves all others to aiormq, in their order.
"""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from lanekeeper.amqp.driver.frames import message_from, read_short_str
from lanekeeper.contract.messages import Message

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_KINDS: Final = frozenset({_METHOD, _HEADER, _BODY, _HEARTBEAT})
_FRAME: Final = struct.Struct(">BHI")
_BEAT: Final = b"\x08\0\0\0\0\0\0\xce"
"""A heartbeat. aiormq gives up a connection on which it reads nothing; the broker sends none while it sends others."""
_BEAT_EVERY_S: Final = 1.0
_DELIVER, _RETURN, _ACK, _NACK = b"\0\x3c\0\x3c", b"\0\x3c\0\x32", b"\0\x3c\0\x50", b"\0\x3c\0\x78"
_TAG: Final = struct.Struct(">QB")
_SIZE: Final = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that a consumer got."""

    message: Message
    tag: int
    redelivered: bool


class Tap:
    """What one channel gets without aiormq. What is None is left to aiormq."""

    def __init__(self) -> None:
        self.on_delivery: Callable[[Delivered], None] | None = None
        self.on_confirm: Callable[[int, bool, bool], None] | None = None
        """Delivery tag; whether all before it are meant as well; whether the broker took them."""
        self.on_return: Callable[[Message], None] | None = None
        self._method = b""
        """The method of the message whose frames are arriving; empty: they are not for this tap."""
        self._header = b""
        self._left = 0
        self._body: list[bytes] = []

    def takes(self, kind: int, payload: bytes) -> bool:
        """Take a frame, or leave it to aiormq. Raises ValueError, IndexError or struct.error if it cannot be read."""
        if kind == _METHOD:
            return self._takes_method(payload)
        if not self._method:
            return False
        if kind == _HEADER:
            self._header, self._left = payload, _SIZE.unpack_from(payload, 4)[0]
        else:
            self._body.append(payload)
            self._left -= len(payload)
        if self._left <= 0:
            self._whole()
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

    def _whole(self) -> None:
        method, body = self._method, self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._method, self._body = b"", []
        at = 5 + method[4] if method[:4] == _DELIVER else 7 + method[6]  # after the consumer's tag, or the reason
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
    """The callback of a consumer whose channel has a tap: aiormq asks for one, and never calls it."""


class FrameReader(asyncio.StreamReader):
    """The socket's reader for aiormq. `taps`: by number of their channel."""

    def __init__(self, taps: dict[int, Tap], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._taps = taps
        self._clock = loop.time
        self._rest = b""
        """The beginning of a frame whose end has not come."""
        self._no_frames = False
        self._beat_s = 0.0

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # what sockets give is bytes
        if self._no_frames:  # a server that does not speak AMQP 0-9-1 answers with something else
            return super().feed_data(data)
        data = self._rest + data if self._rest else data
        at, end, taken, left = 0, len(data), False, []
        while at + _FRAME.size < end:
            kind, channel, size = _FRAME.unpack_from(data, at)
            if kind not in _KINDS:
                self._no_frames = True
                left.append(data[at:])
                at = end
                break
            past = at + _FRAME.size + size + 1
            if past > end:
                break
            tap = self._taps.get(channel)
            try:
                is_taken = tap is not None and tap.takes(kind, data[at + _FRAME.size : past - 1])
            except (ValueError, IndexError, struct.error) as error:
                return self.set_exception(ConnectionError(f"a frame that cannot be read: {error}"))
            if is_taken:
                taken = True
            else:
                left.append(data[at:past])
            at = past
        self._rest = data[at:]
        if taken and (now_s := self._clock()) >= self._beat_s:
            self._beat_s = now_s + _BEAT_EVERY_S
            left.append(_BEAT)
        if left:
            super().feed_data(b"".join(left))
        return None

    def feed_eof(self) -> None:
        if self._rest:
            super().feed_data(self._rest)
            self._rest = b""
        super().feed_eof()


class Tapped(TransportFactory):
    """Opens a connection's socket, with or without TLS, and reads it with a `FrameReader`."""

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
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
