"""Turns AMQP frames into our `Message`, whatever a client put into them.

pamqp raises on bytes that are not UTF-8, on timestamps past the year 9999 and on deeply nested tables, in the task that
reads the connection. So one such message would end the connection, be delivered again, and end the next connection.
pamqp also reads values that it cannot write (a double of 1e300), so that a worker could never publish such a request
again, as a retry or as a dead letter. `patch_pamqp()` corrects both: every value that can be read can be written
(`fields.py`), and properties that cannot be read are named in a header (`UNREADABLE`), so that the worker's decoder
(topology/codec) refuses the message.
"""

import struct
from collections.abc import Callable
from datetime import datetime
from typing import Any

from aiormq.abc import DeliveredMessage
from pamqp import decode, encode
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from lanekeeper.amqp.driver import fields
from lanekeeper.contract.messages import UNREADABLE, Headers, Message

HEADERS_BYTES = 64 * 1024
"""The largest field table of message headers, in bytes, that is read. The limit leaves room for the headers that a
worker adds when it publishes the message again: all properties must fit into one frame of 128 KiB, because the broker
closes a connection that sends a larger frame (501 FRAME_ERROR), which also ends all other publishes on it."""
NESTED_LEVELS = 16
"""How deep the tables and arrays in a message's headers may be nested."""
_MORE_FLAGS = 1
_READ_ERRORS = (ValueError, OverflowError, OSError, RecursionError, KeyError, IndexError, TypeError, struct.error)


def patch_pamqp() -> None:
    """Replace the functions of pamqp (aiormq's AMQP codec) that raise an error for a message with malformed properties,
    so that one such message cannot end the connection. Safe to call more than once."""
    decode.METHODS["shortstr"] = read_short_str
    encode.METHODS["table"] = fields.write
    Basic.Properties.unmarshal = _unmarshal_properties  # type: ignore[method-assign]
    ContentHeader._get_flags = staticmethod(_read_flags)  # type: ignore[method-assign]


def message_of(delivered: DeliveredMessage) -> Message:
    """Convert a message that aiormq has fetched with `basic.get` into our `Message`."""
    found = delivered.delivery
    return _message(
        delivered.header.properties,
        delivered.body,
        exchange=found.exchange or "",  # type: ignore[union-attr]
        routing_key=found.routing_key or "",  # type: ignore[union-attr]
    )


def message_from(header: bytes, body: bytes, *, exchange: str, routing_key: str) -> Message:
    """Build our `Message` from the frames of a received message. `header`: the payload of its content header frame,
    which contains the properties."""
    properties = Basic.Properties()
    _unmarshal_properties(properties, int.from_bytes(header[12:14], "big"), header[14:])
    return _message(properties, body, exchange=exchange, routing_key=routing_key)


def _message(properties: Basic.Properties, body: bytes, *, exchange: str, routing_key: str) -> Message:
    timestamp = properties.timestamp
    return Message(
        body=body,
        exchange=exchange,
        routing_key=routing_key,
        headers=properties.headers or {},
        content_type=properties.content_type,
        content_encoding=properties.content_encoding,
        message_id=properties.message_id,
        correlation_id=properties.correlation_id,
        reply_to=properties.reply_to,
        priority=properties.priority,
        type=properties.message_type,
        expiration=properties.expiration,
        timestamp_s=timestamp.timestamp() if isinstance(timestamp, datetime) else None,
        user_id=properties.user_id,
        app_id=properties.app_id,
        persistent=properties.delivery_mode != 1,
    )


def _unmarshal_properties(self: Any, flags: int, data: bytes) -> None:
    """Read a message's properties; replaces `Basic.Properties.unmarshal` of pamqp. A property that cannot be read is
    skipped, and named in the header `UNREADABLE`."""
    unreadable = ["flags (more than there are properties)"] if flags & _MORE_FLAGS else []
    for name in self.__slots__:
        if not flags & self.flags[name]:
            continue
        read, length = _KINDS[getattr(self.__class__, f"_{name}")]
        try:
            consumed, value = read(data)
        except _READ_ERRORS as error:
            reason = str(error) if isinstance(error, fields.TableTooLarge) else type(error).__name__
            unreadable.append(f"{name} ({reason})")
            try:
                consumed, value = length(data), None
            except _READ_ERRORS:
                break
        setattr(self, name, value)
        data = data[consumed:]
    if unreadable:
        self.headers = self.headers or Headers()
        self.headers[UNREADABLE] = ", ".join(unreadable)


def _read_flags(data: bytes) -> tuple[int, int]:
    """Read the flags that say which properties a message has; replaces `ContentHeader._get_flags` of pamqp. Returns the
    number of bytes read, and the flags.

    Only one word of flags is read, because no client sends more. RabbitMQ 3.x passes on the bit that announces a second
    word even if none follows, and pamqp would raise then.
    """
    return 2, int.from_bytes(data[:2], "big")


def _read_headers(data: bytes) -> tuple[int, Headers]:
    size = int(struct.unpack_from(">I", data)[0])
    if size > HEADERS_BYTES:  # checked before reading, because reading 100,000 headers would block the event loop
        raise fields.TableTooLarge(f"{size} bytes, allowed are {HEADERS_BYTES}")
    return fields.read(data, levels=NESTED_LEVELS)


def read_short_str(value: bytes) -> tuple[int, str]:
    """Read an AMQP short string, such as a routing key. Returns the number of bytes read, and the text. If the bytes
    are not UTF-8, each byte that is not ASCII becomes `?`, so that the text has as many bytes as before."""
    length = value[0]
    text = value[1 : length + 1]
    try:
        return length + 1, text.decode()
    except UnicodeDecodeError:
        return length + 1, text.decode("ascii", errors="replace").replace("\ufffd", "?")


_KINDS: dict[str, tuple[Callable[[bytes], tuple[int, Any]], Callable[[bytes], int]]] = {
    "shortstr": (decode.short_str, lambda data: 1 + data[0]),  # strict: a property that is not UTF-8 is unreadable
    "octet": (decode.octet, lambda data: 1),
    "timestamp": (decode.timestamp, lambda data: 8),
    "table": (_read_headers, lambda data: 4 + int(struct.unpack_from(">I", data)[0])),
}
"""Two functions for each AMQP type that a property may have. The first function reads a property, and returns its
number of bytes and its value. The second function computes the number of bytes of a property that cannot be read, so
that it can be skipped."""
