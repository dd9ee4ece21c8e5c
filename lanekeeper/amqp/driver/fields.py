"""AMQP field tables (message headers): read and written so that a requester's headers are passed on unchanged.

pamqp chooses an integer's type by its value, and writes doubles in single precision. Here an integer is always written
as a signed 64-bit one (`l`) and a float as a double (`d`). Each header that was read also keeps its original bytes
(`Encoded`), which can be written again unchanged.
"""

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from pamqp import encode

from lanekeeper.contract.messages import Encoded, Headers

_SIZE: Final = struct.Struct(">I")
_INTEGER: Final = struct.Struct(">cq")
_DOUBLE: Final = struct.Struct(">cd")
_FIXED: Final = {
    ord(kind): struct.Struct(layout)
    for kind, layout in {
        "t": ">?", "b": ">b", "B": ">B", "s": ">h", "u": ">H", "I": ">i", "i": ">I", "l": ">q", "L": ">q",
        "f": ">f", "d": ">d", "D": ">Bi", "T": ">Q", "V": ">", "\0": ">",
    }.items()
}  # fmt: skip
"""Types of fixed size: RabbitMQ's list, not the specification's, and two that clients send: L and the zero byte."""
_DECIMAL, _TIME = b"DT"
_MILLISECONDS_FROM: Final = 2**32
"""A timestamp is in seconds; a value this large would be past the year 2106, so it is in milliseconds."""


VALUES: Final = 4000
"""Most values in one table, nested ones included. 64 KiB have room for 64,000 values, which took 30 ms to read, and
many such messages can be delivered at once."""


class TooMuch(ValueError):
    """A table that could be read, but has too many values, too many levels or too many bytes."""


class _Room:
    """Counts how many more values a table may have."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = VALUES


def read(data: bytes, *, levels: int) -> tuple[int, Headers]:
    """Read the table at the start of `data`: its length in bytes, and its headers. `levels`: the deepest nesting of
    tables and arrays.

    Raises TooMuch, and ValueError, IndexError or struct.error and the like for bytes that are no table.
    """
    end = _SIZE.size + _SIZE.unpack_from(data)[0]
    if end > len(data):
        raise ValueError("cut short")
    headers = Headers(data)
    at, room = _SIZE.size, _Room()
    while at < end:
        start = at + 1 + data[at]
        name = data[at + 1 : start].decode()
        headers[name], at = _value(data, start, end, levels - 1, room)
        headers.places[name] = (start, at)
    return end, headers


def write(table: Mapping[str, Any] | None) -> bytes:
    """A table in its AMQP encoding. Raises TypeError for a value that AMQP has no type for."""
    fields = (table or {}).items()
    content = b"".join([bytes((len(raw := name.encode()),)) + raw + _written(value) for name, value in fields])
    return _SIZE.pack(len(content)) + content


def _value(data: bytes, at: int, end: int, levels: int, room: _Room) -> tuple[Any, int]:
    """The value that begins at `at`, and the position after it, which may not be past `end`."""
    room.left -= 1
    if room.left < 0:
        raise TooMuch(f"more than {VALUES} values")
    kind = data[at]
    at += 1
    if kind in _LONG:
        start = at + 4
        past: int = start + _SIZE.unpack_from(data, at)[0]
        if past > end:
            raise ValueError("cut short")
        return _LONG[kind](data, start, past, levels, room), past
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


def _text(data: bytes, at: int, end: int, _levels: int, _room: _Room) -> str | bytes:
    try:
        return data[at:end].decode()
    except UnicodeDecodeError:
        return data[at:end]


def _array(data: bytes, at: int, end: int, levels: int, room: _Room) -> list[Any]:
    if not levels:
        raise TooMuch("nested too deep")
    items = []
    while at < end:
        item, at = _value(data, at, end, levels - 1, room)
        items.append(item)
    return items


def _table(data: bytes, at: int, end: int, levels: int, room: _Room) -> dict[str, Any]:
    if not levels:
        raise TooMuch("nested too deep")
    table = {}
    while at < end:
        start = at + 1 + data[at]
        name = data[at + 1 : start].decode()
        table[name], at = _value(data, start, end, levels - 1, room)
    return table


_LONG: Final[dict[int, Callable[[bytes, int, int, int, _Room], Any]]] = {
    ord("S"): _text,
    ord("x"): lambda data, at, end, *_: bytearray(data[at:end]),
    ord("A"): _array,
    ord("F"): _table,
}
"""Types that begin with their length in four bytes."""


def _written(value: Any) -> bytes:
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
            return b"F" + write(value)
        case list():
            items = b"".join([_written(each) for each in value])
            return b"A" + _SIZE.pack(len(items)) + items
        case _:  # decimals, times, byte arrays, None: AMQP has one type for each
            return encode.encode_table_value(value)
