"""Limits how much a JSON text may hold, and checks that before it is parsed.

The event loop stands still while JSON is parsed. How long that takes depends on the number of values more than on the
number of bytes: 8 MiB of `[],[],…` took 1.8 s and 958 MB, 8 MiB of text takes 30 ms. So keys and values are counted
first, by a few passes over the bytes in C: at most 10 ms a MiB, and nothing for short bodies.
"""

from collections.abc import Iterator
from typing import Final

VALUES: Final = 100_000
"""Keys and values of one request or answer, by default. As many are parsed, checked and written again in 50 ms. The
largest requests that we know (thousands of messages, hundreds of tools) have a tenth of it."""
ANSWER_BYTES: Final = 16 * 1024 * 1024
"""RabbitMQ 4's default limit for one message, and far more than the longest answer of a model today (1 MB)."""
DIGITS: Final = 128
"""The most digits of one number. The time grows with the square of the digits: 8 MiB of numbers with 4,300 digits took
0.8 s to write."""
SMALL_BYTES: Final = 32 * 1024
"""A text this short is parsed within 10 ms, whatever it holds."""
_PIECE_BYTES: Final = 2 * 1024 * 1024
_MARKS: Final = (b",", b":", b"[", b"{")
_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_STEP: Final = 16
_RUN: Final = b"0" * (DIGITS // _STEP)
"""Finds numbers that are too long by looking at every 16th byte."""


class Measure:
    """Counts the keys and values of JSON that comes in pieces. The inside of strings does not count."""

    __slots__ = ("_carried", "_in_string", "_values", "left")

    def __init__(self, values: int) -> None:
        self._values = values
        self.left = values
        self._in_string = False
        self._carried = b""

    def add(self, piece: bytes) -> str | None:
        """The limit that the pieces so far exceed; None: no limit."""
        piece = self._carried + piece
        self._carried = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            if piece.endswith(b"\\"):  # the escaped character is in the next piece
                piece, self._carried = piece[:-1], b"\\"
        quotes = piece.count(b'"')
        if quotes > 2 * self.left + 2:
            return self._too_many()
        outside = b" ".join(piece.split(b'"')[self._in_string :: 2])
        self._in_string ^= quotes % 2 == 1
        # a key ends in a colon; each value but the first of an array or object follows a comma
        self.left -= sum(map(outside.count, _MARKS))
        if self.left < 0:
            return self._too_many()
        if len(outside) > DIGITS and b"0" * (DIGITS + 1) in outside.translate(_ZEROS):
            return f"a number of more than {DIGITS} digits"
        return None

    def _too_many(self) -> str:
        return f"more than {self._values} keys and values (LANEKEEPER_JSON_VALUES)"


def excess(raw: bytes, *, values: int) -> str | None:
    """The limit that this JSON exceeds; None: no limit. Invalid JSON is not detected here."""
    return next((found for found in measured(raw, values=values) if found is not None), None)


def measured(raw: bytes, *, values: int) -> Iterator[str | None]:
    """The result of `excess`, in steps of at most 20 ms. It ends with the first step that is not None."""
    if len(raw) <= min(values, SMALL_BYTES):
        return
    marks = 0
    for at in range(0, len(raw), _PIECE_BYTES):
        if at:
            yield None
        piece = raw[at : at + _PIECE_BYTES]
        marks += len(piece) - len(piece.translate(None, b"".join(_MARKS)))
    has_many = marks > values
    if not has_many and _RUN not in raw[::_STEP].translate(_ZEROS):
        return
    measure = Measure(values)
    for at in range(0, len(raw), _PIECE_BYTES):
        found = measure.add(raw[at : at + _PIECE_BYTES])
        yield found
        if found is not None:
            return
