"""Reads the frequent frames (deliveries, confirms, returned messages) directly from the socket; aiormq reads the rest.

aiormq awaits three reads for a frame, decodes it into objects, passes it through a queue to the channel's task, and
starts a task for each message. That takes ten times as long as the code here. So aiormq gets a `FrameReader` as the
socket's reader, which passes the frequent frames to the channel's `Tap`, and all other frames, in order, to aiormq.
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
_HEARTBEAT_FRAME: Final = b"\x08\0\0\0\0\0\0\xce"
"""The bytes of an AMQP heartbeat frame. aiormq closes a connection on which it reads nothing for a while, and the
broker sends no heartbeats while it sends other frames. So `FrameReader` gives aiormq this frame from time to time while
it passes all received frames to a `Tap`."""
_HEARTBEAT_EVERY_S: Final = 1.0
"""While a `Tap` takes a connection's frames, aiormq gets a heartbeat frame at most once in this many seconds, so that
it does not close the connection as silent."""
_DELIVER, _RETURN, _ACK, _NACK = b"\0\x3c\0\x3c", b"\0\x3c\0\x32", b"\0\x3c\0\x50", b"\0\x3c\0\x78"
_TAG: Final = struct.Struct(">QB")
_SIZE: Final = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that the broker has delivered to a consumer."""

    message: Message
    tag: int
    """AMQP's delivery tag: the number by which the message is acknowledged."""
    redelivered: bool


class Tap:
    """Reads the frames of one channel before aiormq does, and calls a callback for each delivery, confirm and returned
    message. Frames for which the callback is None, and all other frames, go to aiormq."""

    def __init__(self) -> None:
        self.on_delivery: Callable[[Delivered], None] | None = None
        self.on_confirm: Callable[[int, bool, bool], None] | None = None
        """Called with three values: a delivery tag, whether the confirm is for all earlier tags too, and whether the
        broker accepted the messages (ack) or refused them (nack)."""
        self.on_return: Callable[[Message], None] | None = None
        self._method = b""
        """The method frame of the message that is arriving; empty if no message is arriving, or if aiormq reads the
        message that is arriving."""
        self._header = b""
        self._body_bytes_left = 0
        self._body: list[bytes] = []

    def takes(self, kind: int, payload: bytes) -> bool:
        """Process a frame and return True, or return False if aiormq must process it. `kind`: the AMQP frame type
        (method, header or body). Raises ValueError, IndexError or struct.error if the frame cannot be read."""
        if kind == _METHOD:
            return self._takes_method(payload)
        if not self._method:
            return False
        if kind == _HEADER:
            self._header, self._body_bytes_left = payload, _SIZE.unpack_from(payload, 4)[0]
        else:
            self._body.append(payload)
            self._body_bytes_left -= len(payload)
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
        # the position after the consumer's tag, or after the reason of a return
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
    """Does nothing. Pass it as the callback to `basic_consume` on a channel with a `Tap`: aiormq requires a callback,
    but the tap receives the deliveries."""


class FrameReader(asyncio.StreamReader):
    """The stream reader from which aiormq reads a connection. It splits the received bytes into AMQP frames and offers
    each to its channel's `Tap`. aiormq reads only the frames that the tap does not take. `taps`: the taps by channel
    number."""

    def __init__(self, taps: dict[int, Tap], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._taps = taps
        self._clock = loop.time
        self._rest = b""
        """The received bytes of a frame whose end has not arrived yet."""
        self._is_not_amqp = False
        self._next_beat_s = 0.0

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # what sockets give is bytes
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
            tap = self._taps.get(channel)
            try:
                is_taken = tap is not None and tap.takes(kind, data[at + _FRAME.size : past - 1])
            except (ValueError, IndexError, struct.error) as error:
                return self.set_exception(ConnectionError(f"a frame that cannot be read: {error}"))
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

    def feed_eof(self) -> None:
        if self._rest:
            super().feed_data(self._rest)
            self._rest = b""
        super().feed_eof()


class Tapped(TransportFactory):
    """Opens the socket of an aiormq connection, with or without TLS, so that a `FrameReader` reads it: deliveries and
    confirms then go to the `Tap` of their channel in `taps` (by channel number), and all other frames to aiormq."""

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
