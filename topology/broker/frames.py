"""AMQP frames to our `Message` and back, whatever a client put into them.

pamqp raises on bytes that are not UTF-8, on timestamps past the year 9999 and on deeply nested tables. It does so in
the task that reads the connection: one such message would end the connection, be delivered again, and end the next one.
`tolerate()` makes the decoder keep what can be read and say what could not; the codec then refuses the message.
"""

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiormq.abc import DeliveredMessage
from pamqp import decode
from pamqp.commands import Basic

from topology.contract.codec import UNREADABLE
from topology.contract.messages import Message

_SKIP: dict[str, Callable[[bytes], int]] = {
    "shortstr": lambda data: 1 + data[0],
    "octet": lambda data: 1,
    "timestamp": lambda data: 8,
    "table": lambda data: 4 + int(struct.unpack(">I", data[:4])[0]),
}
_BROKEN = (ValueError, OverflowError, OSError, RecursionError, KeyError, IndexError, TypeError, struct.error)


def _short_str(value: bytes) -> tuple[int, str]:
    length = value[0]
    return length + 1, value[1 : length + 1].decode("utf-8", errors="replace")


def _unmarshal_properties(self: Any, flags: int, data: bytes) -> None:
    """As pamqp's own, but a property that cannot be read is passed over and named in the headers."""
    unreadable = []
    for name in self.__slots__:
        if not flags & self.flags[name]:
            continue
        kind = getattr(self.__class__, f"_{name}")
        try:
            consumed, value = decode.by_type(data, kind)
        except _BROKEN as error:
            unreadable.append(f"{name} ({type(error).__name__})")
            try:
                consumed, value = _SKIP[kind](data), None
            except _BROKEN:
                break
        setattr(self, name, value)
        data = data[consumed:]
    if unreadable:
        self.headers = {**(self.headers or {}), UNREADABLE: ", ".join(unreadable)}


def tolerate() -> None:
    """Make pamqp's decoder survive what it would raise on. Safe to call more than once."""
    decode.METHODS["shortstr"] = _short_str
    Basic.Properties.unmarshal = _unmarshal_properties  # type: ignore[method-assign]


def message_of(delivered: DeliveredMessage) -> Message:
    """The message that a `Basic.Deliver` or `Basic.Return` brought."""
    properties = delivered.header.properties
    timestamp = properties.timestamp
    return Message(
        body=delivered.body,
        exchange=delivered.delivery.exchange or "",  # type: ignore[union-attr]
        routing_key=delivered.delivery.routing_key or "",  # type: ignore[union-attr]
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


def properties_of(message: Message) -> Basic.Properties:
    """The properties that `message` is published with."""
    timestamp = message.timestamp_s
    return Basic.Properties(
        headers={key: _writable(value) for key, value in message.headers.items() if key != UNREADABLE} or None,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        priority=message.priority,
        message_type=message.type,
        expiration=message.expiration,
        timestamp=None if timestamp is None else datetime.fromtimestamp(timestamp, tz=UTC),
        user_id=message.user_id,
        app_id=message.app_id,
        delivery_mode=2 if message.persistent else 1,
    )


def _writable(value: Any) -> Any:
    """Bytes (a string that was not UTF-8) go out as a byte array: pamqp writes no other form of them."""
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, list):
        return [_writable(each) for each in value]
    if isinstance(value, dict):
        return {key: _writable(each) for key, each in value.items()}
    return value
