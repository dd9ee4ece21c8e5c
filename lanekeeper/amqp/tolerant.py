"""What others write, read without an error, and what Lanekeeper writes, without a loss: message properties and headers.

pamqp, aiormq's codec, is not enough for what others write. It raises on bytes that are not UTF-8, on timestamps past
the year 9999 and on deeply nested tables; aiormq would then close the connection, get the message again, and close the
next one. It also reads values that it cannot write (a double of 1e300), so that a worker could never publish such a
request again, as a retry or as a dead letter. So pamqp gets a message's properties as one value (`readable_header`),
which `message_of` reads. There, every value that can be read can be written, a requester's headers are passed on with
their bytes unchanged (`Encoded`), and properties that cannot be read are named in a header (`UNREADABLE`), for which
the worker's decoder (topology/codec) refuses the message.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
from typing import Any, Final

from aiormq.abc import DeliveredMessage
from pamqp import encode
from pamqp.commands import Basic

from lanekeeper.contract.messages import UNREADABLE, Encoded, Headers, Message

HEADERS_BYTES: Final = 64 * 1024
"""The largest field table of message headers, in bytes, that is read. The limit leaves room for the headers that a
worker adds when it publishes the message again: all properties must fit into one frame of 128 KiB, because the broker
closes a connection that sends a larger frame (501 FRAME_ERROR), which also ends all other publishes on it."""
NESTED_LEVELS: Final = 16
MAX_VALUES: Final = 4000
"""The largest number of values in one table, including those in nested tables and arrays. A table of 64 KiB could have
64,000, and reading them would block the event loop for 30 ms."""
KEY_BYTES: Final = 255
_SIZE: Final = struct.Struct(">I")
_INTEGER: Final = struct.Struct(">cq")
_DOUBLE: Final = struct.Struct(">cd")
_FLAGS: Final = struct.Struct(">H")
_TIMESTAMP: Final = struct.Struct(">Q")
_BASIC: Final = b"\0\x3c"
_PROPERTIES_AT: Final = 12
"""Where the properties begin in a content header: after the class (2 bytes), the weight (2) and the body's size (8)."""
AS_READ: Final = "properties"
"""The header in which pamqp gets a message's encoded properties."""
_FIXED: Final = {
    ord(kind): struct.Struct(layout)
    for kind, layout in {
        "t": ">?", "b": ">b", "B": ">B", "s": ">h", "u": ">H", "I": ">i", "i": ">I", "l": ">q", "L": ">q",
        "f": ">f", "d": ">d", "D": ">Bi", "T": ">Q", "V": ">", "\0": ">",
    }.items()
}  # fmt: skip
"""The types of fixed size by their type byte: RabbitMQ's, which differ from the specification's, and two more that
some clients send (`L` and the zero byte)."""
_DECIMAL, _TIME = b"DT"
_MILLISECONDS_FROM: Final = 2**32
"""The smallest AMQP timestamp that is read as milliseconds. They are in seconds, but some clients send milliseconds;
in seconds, this would be in the year 2106."""
_READ_ERRORS: Final = (
    ValueError, OverflowError, OSError, RecursionError, KeyError, IndexError, TypeError, struct.error,
)  # fmt: skip

_WRITE_ERRORS: Final = (AttributeError, OverflowError, RecursionError, struct.error)
"""Of a name that is no text, a number or time that is too large, and tables that nest too deep."""


class TableTooLarge(ValueError):
    """A field table is valid, but has too many values, levels of nesting or bytes."""


# ---- messages that were received -------------------------------------------------------------------------------------

_CLOSE, _RETURN, _DELIVER, _GET_OK = b"\0\x14\0\x28", b"\0\x3c\0\x32", b"\0\x3c\0\x3c", b"\0\x3c\0\x47"
QUOTING: Final[dict[bytes, tuple[int, ...]]] = {
    b"\0\x0a\0\x32": (2, 0, 4),
    _CLOSE: (2, 0, 4),
    _RETURN: (2, 0, 0, 0),
    _DELIVER: (0, 9, 0, 0),
    _GET_OK: (9, 0, 0, 4),
}
"""The methods in which the broker quotes what others chose (close of a connection or channel, return, deliver, get-ok),
with the layout of their arguments: 0 is a short string, other numbers are bytes of fixed size."""


def readable_method(payload: bytes) -> bytes:
    """A method's frame in which each short string is UTF-8. It has as many bytes as before."""
    if payload.isascii() or (layout := QUOTING.get(payload[:4])) is None:
        return payload
    parts, at = [payload[:4]], 4
    for fixed in layout:
        past = fixed or 1 + payload[at]
        part = payload[at : at + past]
        parts.append(part if fixed else part[:1] + _shown(part[1:]))
        at += past
    return b"".join((*parts, payload[at:]))


def readable_header(payload: bytes, *, of_return: bool) -> bytes:
    """A content header that pamqp can read whatever a client wrote: its properties are one value in a table, from which
    `message_of` takes them. aiormq matches a returned message by its message id, so this stays beside it."""
    if payload[:2] != _BASIC:
        return payload
    properties = payload[_PROPERTIES_AT:]
    name = AS_READ.encode()
    field = bytes((len(name),)) + name + b"x" + _SIZE.pack(len(properties)) + properties
    flags, found = 0x2000, _SIZE.pack(len(field)) + field
    if of_return and isinstance(id := properties_in(properties).get("message_id"), str):
        flags, found = flags | 0x80, found + _short(id)
    return payload[:_PROPERTIES_AT] + _FLAGS.pack(flags) + found


def message_of(found: DeliveredMessage) -> Message:
    """A message that aiormq delivered, got or returned, on a connection of ours."""
    encoded: Any = (found.header.properties.headers or {})[AS_READ]
    return message_from(bytes(encoded), found.body, exchange=found.exchange or "", routing_key=found.routing_key or "")


def message_from(properties: bytes, body: bytes, *, exchange: str, routing_key: str) -> Message:
    """`properties`: as they are encoded in a content header."""
    found = properties_in(properties)
    at = found.pop("timestamp", None)
    return Message(
        body=body,
        exchange=exchange,
        routing_key=routing_key,
        type=found.pop("message_type", None),
        timestamp_s=None if at is None else at.timestamp(),
        persistent=found.pop("delivery_mode", None) != 1,
        **found,
    )


def properties_in(properties: bytes) -> dict[str, Any]:
    """The properties by pamqp's names. One that cannot be read is left out, and named in the header `UNREADABLE`.

    Only one word of flags is read, because no client sends more. RabbitMQ 3.x passes on the bit that announces a second
    word even if none follows.
    """
    flags, data = int.from_bytes(properties[:2], "big"), properties[2:]
    unreadable = ["flags (more than there are properties)"] if flags & 1 else []
    found: dict[str, Any] = {}
    for flag, name, read, length in _PROPERTIES:
        if not flags & flag:
            continue
        try:
            size, found[name] = read(data)
        except _READ_ERRORS as error:
            reason = str(error) if isinstance(error, TableTooLarge) else type(error).__name__
            unreadable.append(f"{name} ({reason})")
            try:
                size = length(data)
            except _READ_ERRORS:
                break
        data = data[size:]
    if unreadable:
        found.setdefault("headers", Headers())[UNREADABLE] = ", ".join(unreadable)
    return found


def _shown(text: bytes) -> bytes:
    """If the bytes are not UTF-8, each byte that is not ASCII becomes `?`, so that the text has as many as before."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return bytes(each if each < 0x80 else ord("?") for each in text)
    return text


def _property_text(data: bytes) -> tuple[int, str]:
    past = 1 + data[0]
    return past, data[1:past].decode()  # strict: a property that is not UTF-8 is unreadable


def _property_time(data: bytes) -> tuple[int, datetime]:
    return 8, _time(_TIMESTAMP.unpack_from(data)[0])


def _property_headers(data: bytes) -> tuple[int, Headers]:
    size = _SIZE.unpack_from(data)[0]
    if size > HEADERS_BYTES:  # checked before reading, because reading 100,000 headers would block the event loop
        raise TableTooLarge(f"{size} bytes, allowed are {HEADERS_BYTES}")
    return read_table(data, levels=NESTED_LEVELS)


_Kind = tuple[Callable[[bytes], tuple[int, Any]], Callable[[bytes], int]]
_TEXT: Final[_Kind] = (_property_text, lambda data: 1 + data[0])
_OCTET: Final[_Kind] = (lambda data: (1, data[0]), lambda data: 1)
_PROPERTIES: Final = tuple(
    (1 << (15 - position), name, *kind)
    for position, (name, kind) in enumerate(
        (
            ("content_type", _TEXT),
            ("content_encoding", _TEXT),
            ("headers", (_property_headers, lambda data: 4 + int(_SIZE.unpack_from(data)[0]))),
            ("delivery_mode", _OCTET),
            ("priority", _OCTET),
            ("correlation_id", _TEXT),
            ("reply_to", _TEXT),
            ("expiration", _TEXT),
            ("message_id", _TEXT),
            ("timestamp", (_property_time, lambda data: 8)),
            ("message_type", _TEXT),
            ("user_id", _TEXT),
            ("app_id", _TEXT),
        )
    )
)


# ---- messages to be published ----------------------------------------------------------------------------------------


class Properties(Basic.Properties):
    """A message's properties for aiormq, which writes them in our encoding. `as_id`: by what aiormq matches the message
    if it is returned; it reads nothing else from here."""

    def __init__(self, message: Message, *, as_id: str = "not returned") -> None:
        """Raises TypeError, ValueError."""
        super().__init__(message_id=as_id)
        self.bytes = encoded(message)

    def marshal(self) -> bytes:
        return self.bytes


def encoded(message: Message) -> bytes:
    """The properties of `message`, headers included. Raises TypeError, ValueError."""
    headers = {key: value for key, value in message.headers.items() if key != UNREADABLE}
    fields: tuple[tuple[Any, Callable[[Any], bytes]], ...] = (
        (message.content_type, _short),
        (message.content_encoding, _short),
        (headers or None, write_table),
        (2 if message.persistent else 1, _octet),
        (message.priority, _octet),
        (message.correlation_id, _short),
        (message.reply_to, _short),
        (message.expiration, _short),
        (message.message_id, _short),
        (message.timestamp_s, _seconds),
        (message.type, _short),
        (message.user_id, _short),
        (message.app_id, _short),
    )
    flags, flag, parts = 0, 0x8000, []
    for value, write in fields:
        if value is not None:
            flags |= flag
            parts.append(write(value))
        flag >>= 1
    return _FLAGS.pack(flags) + b"".join(parts)


def _seconds(value: float) -> bytes:
    try:
        return _TIMESTAMP.pack(int(value))
    except _WRITE_ERRORS as error:
        raise ValueError(f"timestamp {value}: {error}") from error


def _octet(value: int) -> bytes:
    return bytes((value,))


def _short(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > KEY_BYTES:
        raise ValueError(f"{text[:40]!r}…: {len(raw)} bytes, allowed are {KEY_BYTES}")
    return bytes((len(raw),)) + raw


# ---- field tables ----------------------------------------------------------------------------------------------------


def read_table(data: bytes, *, levels: int) -> tuple[int, Headers]:
    """The length in bytes and the headers of the field table at the start of `data`. Raises TableTooLarge; for bytes
    that are no table ValueError, IndexError, struct.error or similar."""
    end = _SIZE.size + _SIZE.unpack_from(data)[0]
    if end > len(data):
        raise ValueError("cut short")
    headers = Headers(data)
    at, values = _SIZE.size, count(1)
    while at < end:
        start = at + 1 + data[at]
        name = data[at + 1 : start].decode()
        headers[name], at = _value(data, start, end, levels - 1, values)
        headers.places[name] = (start, at)
    return end, headers


def write_table(table: Mapping[str, Any] | None) -> bytes:
    """Encode headers: integers always as signed 64-bit, floats as doubles. (pamqp chooses an integer's type by its
    value, and writes floats in single precision.) Raises TypeError, ValueError for what no AMQP type can express."""
    try:
        return _written(table or {})
    except _WRITE_ERRORS as error:
        raise ValueError(str(error)) from error


def _written(table: Mapping[str, Any]) -> bytes:
    fields = table.items()
    content = b"".join([bytes((len(raw := name.encode()),)) + raw + _encoded(value) for name, value in fields])
    return _SIZE.pack(len(content)) + content


def _value(data: bytes, at: int, end: int, levels: int, values: Iterator[int]) -> tuple[Any, int]:
    if next(values) > MAX_VALUES:
        raise TableTooLarge(f"more than {MAX_VALUES} values")
    kind = data[at]
    at += 1
    if kind in _VARIABLE:
        start = at + 4
        past: int = start + _SIZE.unpack_from(data, at)[0]
        if past > end:
            raise ValueError("cut short")
        return _VARIABLE[kind](data, start, past, levels, values), past
    if (fixed := _FIXED.get(kind)) is None:
        raise ValueError(f"no type {chr(kind)!r}")
    past = at + fixed.size
    if past > end:
        raise ValueError("cut short")
    found = fixed.unpack_from(data, at)
    if kind == _DECIMAL:
        return Decimal(found[1]).scaleb(-found[0]), past
    if kind == _TIME:
        return _time(found[0]), past
    return found[0] if found else None, past


def _time(value: int) -> datetime:
    return datetime.fromtimestamp(value if value < _MILLISECONDS_FROM else value / 1000, tz=UTC)


def _text(data: bytes, at: int, end: int, _levels: int, _values: Iterator[int]) -> str | bytes:
    try:
        return data[at:end].decode()
    except UnicodeDecodeError:
        return data[at:end]


def _array(data: bytes, at: int, end: int, levels: int, values: Iterator[int]) -> list[Any]:
    if not levels:
        raise TableTooLarge("nested too deep")
    items = []
    while at < end:
        item, at = _value(data, at, end, levels - 1, values)
        items.append(item)
    return items


def _table(data: bytes, at: int, end: int, levels: int, values: Iterator[int]) -> dict[str, Any]:
    if not levels:
        raise TableTooLarge("nested too deep")
    table = {}
    while at < end:
        start = at + 1 + data[at]
        name = data[at + 1 : start].decode()
        table[name], at = _value(data, start, end, levels - 1, values)
    return table


_VARIABLE: Final[dict[int, Callable[[bytes, int, int, int, Iterator[int]], Any]]] = {
    ord("S"): _text,
    ord("x"): lambda data, at, end, *_: bytearray(data[at:end]),
    ord("A"): _array,
    ord("F"): _table,
}


def _encoded(value: Any) -> bytes:
    match value:
        case Encoded():
            return value
        case str():
            text = value.encode()
            return b"S" + _SIZE.pack(len(text)) + text
        case bool():
            return b"t\1" if value else b"t\0"
        case int() if -(2**63) <= value < 2**63:
            return _INTEGER.pack(b"l", value)
        case float():
            return _DOUBLE.pack(b"d", value)
        case bytes():  # a string that is not UTF-8
            return b"S" + _SIZE.pack(len(value)) + value
        case dict():
            return b"F" + _written(value)
        case list():
            items = b"".join([_encoded(item) for item in value])
            return b"A" + _SIZE.pack(len(items)) + items
        case _:  # decimals, times, byte arrays, None: pamqp has no choice of types here
            return encode.encode_table_value(value)
