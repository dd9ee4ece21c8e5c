"""Reads and writes AMQP field tables (message headers) so that a requester's headers are passed on unchanged.

This replaces pamqp's functions, which choose an integer's type by its value, and write doubles in single precision.
Here an integer is always written as a signed 64-bit integer (`l`), and a float as a double (`d`). The original bytes of
each header that was read stay available (`Encoded`), and can be written again unchanged.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
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
"""The type bytes of AMQP field values of fixed size, each with its `struct` format. The types are those of RabbitMQ,
which differ from the specification's, and two more that some clients send: `L` and the zero byte."""
_DECIMAL, _TIME = b"DT"
_MILLISECONDS_FROM: Final = 2**32
"""The smallest AMQP timestamp that is read as milliseconds. AMQP timestamps are in seconds, but some clients send
milliseconds; read as seconds, this value would be a time in the year 2106."""
MAX_VALUES: Final = 4000
"""The largest number of values in one AMQP field table (a message's headers), including the values in nested tables and
arrays. Without this limit, a table of 64 KiB could have 64,000 values. Reading them would block the event loop for 30
ms, and many such messages can be delivered at once."""


class TableTooLarge(ValueError):
    """An AMQP field table (a message's headers) is valid, but has too many values, levels of nesting or bytes."""


def read(data: bytes, *, levels: int) -> tuple[int, Headers]:
    """Read the AMQP field table of a message's headers at the start of `data`. Returns the table's length in bytes, and
    the headers. `levels`: how deep tables and arrays may be nested.

    Raises TableTooLarge. For bytes that are no table, raises ValueError, IndexError, struct.error or similar.
    """
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


def write(table: Mapping[str, Any] | None) -> bytes:
    """Encode headers as an AMQP field table. Raises TypeError for a value that no AMQP type can express."""
    fields = (table or {}).items()
    content = b"".join([bytes((len(raw := name.encode()),)) + raw + _encoded(value) for name, value in fields])
    return _SIZE.pack(len(content)) + content


def _value(data: bytes, at: int, end: int, levels: int, values: Iterator[int]) -> tuple[Any, int]:
    """Read the value of a field table that begins at position `at`. Returns the value, and the position after it.
    Raises an error if the value goes beyond position `end`. `values` counts the values that were read, from 1."""
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
"""The functions that read the AMQP field values of variable size, by their type byte. Such a value begins with its
length in four bytes."""


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
            return b"F" + write(value)
        case list():
            items = b"".join([_encoded(item) for item in value])
            return b"A" + _SIZE.pack(len(items)) + items
        case _:  # decimals, times, byte arrays, None: pamqp has no choice of types here
            return encode.encode_table_value(value)
