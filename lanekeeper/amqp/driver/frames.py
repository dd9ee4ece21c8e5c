"""Turns AMQP frames into our `Message`, whatever a client put into them.

pamqp raises on bytes that are not UTF-8, on timestamps past the year 9999 and on deeply nested tables. It does so in
the task that reads the connection: one such message would end the connection, be delivered again, and end the next one.
It also reads values that it cannot write (a double of 1e300), so that a retry or a dead letter would always fail.
`tolerate()` corrects both: every value that can be read can be written (`fields.py`), and the properties that cannot be
read are named in a header, so that the codec refuses the message.
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
"""The largest headers that are read. All properties, with those that a hop adds, must fit into one frame of 128 KiB:
the broker closes the connection over a larger frame (501 FRAME_ERROR), which also ends all other publishes on it."""
NESTED_LEVELS = 16
_MORE_FLAGS = 1
_SKIP: dict[str, Callable[[bytes], int]] = {
    "shortstr": lambda data: 1 + data[0],
    "octet": lambda data: 1,
    "timestamp": lambda data: 8,
    "table": lambda data: 4 + int(struct.unpack(">I", data[:4])[0]),
}
_BROKEN = (ValueError, OverflowError, OSError, RecursionError, KeyError, IndexError, TypeError, struct.error)


def tolerate() -> None:
    """Patch pamqp so that it does not raise on such messages. Safe to call more than once."""
    decode.METHODS["shortstr"] = read_short_str
    encode.METHODS["table"] = fields.write
    Basic.Properties.unmarshal = _unmarshal_properties  # type: ignore[method-assign]
    ContentHeader._get_flags = staticmethod(_read_flags)  # type: ignore[method-assign]


def message_of(delivered: DeliveredMessage) -> Message:
    """The message of a `Basic.GetOk` or `Basic.Return`."""
    found = delivered.delivery
    return _message(
        delivered.header.properties,
        delivered.body,
        exchange=found.exchange or "",  # type: ignore[union-attr]
        routing_key=found.routing_key or "",  # type: ignore[union-attr]
    )


def message_from(header: bytes, body: bytes, *, exchange: str, routing_key: str) -> Message:
    """The message of a content header, as it came, and a body."""
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
    """Replaces pamqp's function. A property that cannot be read is skipped and named in the headers."""
    unreadable = ["flags (more than there are properties)"] if flags & _MORE_FLAGS else []
    for name in self.__slots__:
        if not flags & self.flags[name]:
            continue
        kind = getattr(self.__class__, f"_{name}")
        try:
            consumed, value = _read_headers(data) if kind == "table" else _METHOD_OF[kind](data)
        except _BROKEN as error:
            unreadable.append(f"{name} ({_reason(error)})")
            try:
                consumed, value = _SKIP[kind](data), None
            except _BROKEN:
                break
        setattr(self, name, value)
        data = data[consumed:]
    if unreadable:
        self.headers = self.headers or Headers()
        self.headers[UNREADABLE] = ", ".join(unreadable)


def _read_flags(data: bytes) -> tuple[int, int]:
    """Bytes read, and the flags. Only one word of flags is read: no client sends more. Brokers of 3.x pass on the bit
    that announces a second word even if none follows, and pamqp would raise then."""
    return 2, int.from_bytes(data[:2], "big")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, fields.TooMuch) else type(error).__name__


def _read_headers(data: bytes) -> tuple[int, Headers]:
    size = int(struct.unpack_from(">I", data)[0])
    if size > HEADERS_BYTES:  # checked before reading, because reading 100,000 headers would block the event loop
        raise fields.TooMuch(f"{size} bytes, allowed are {HEADERS_BYTES}")
    return fields.read(data, levels=NESTED_LEVELS)


def read_short_str(value: bytes) -> tuple[int, str]:
    """Used for routing keys, of which an unreadable one could not be reported by name: each byte that is not ASCII in a
    key that is not UTF-8 becomes `?`, so that the key gets no longer."""
    length = value[0]
    text = value[1 : length + 1]
    try:
        return length + 1, text.decode()
    except UnicodeDecodeError:
        return length + 1, text.decode("ascii", errors="replace").replace("\ufffd", "?")


_METHOD_OF: dict[str, Callable[[bytes], tuple[int, Any]]] = {
    "shortstr": decode.short_str,  # strict: a property that is not UTF-8 is unreadable
    "octet": decode.octet,
    "timestamp": decode.timestamp,
}
