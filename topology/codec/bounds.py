"""Checks, before a JSON text is parsed, that it does not have too many values or too long numbers.

Parsing JSON blocks the event loop. How long it takes depends more on the number of values than on the number of bytes:
8 MiB of `[],[],…` took 1.8 s and 958 MB of memory; 8 MiB of text take 30 ms. So keys and values are counted first, by a
few passes over the bytes, which run in C (methods of `bytes`). Counting takes at most 10 ms for each MiB. Short texts
are not counted.
"""

from collections.abc import Iterator
from typing import Final

VALUES: Final = 100_000
"""A JSON text with this many is parsed, checked and encoded again in 50 ms. The largest requests that we know of
(thousands of messages, hundreds of tools) have a tenth."""
ANSWER_BYTES: Final = 16 * 1024 * 1024
ANSWER_SETTINGS: Final = "LANEKEEPER_RESULTS__ANSWER_BYTES, and LANEKEEPER_BODIES__URL for more than a message holds"
DIGITS: Final = 128
"""The time to encode a number grows with the square of its digits: 8 MiB of numbers with 4,300 digits took 0.8 s."""
SMALL_BYTES: Final = 32 * 1024
_PIECE_BYTES: Final = 2 * 1024 * 1024
_MARKS: Final = (b",", b":", b"[", b"{")
_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_STEP: Final = 16
_RUN: Final = b"0" * (DIGITS // _STEP)
"""To find too long numbers: only every 16th byte of the text is kept, and all digits are replaced by zeros. A number
with more than `DIGITS` digits is then at least such a run of zeros."""


class Measure:
    """Checks a JSON text that is given in pieces, by counting separators outside strings."""

    __slots__ = ("_carried", "_in_string", "_max_values", "left")

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self.left = max_values
        self._in_string = False
        self._carried = b""

    def add(self, piece: bytes) -> str | None:
        """Returns a text that names the limit that the pieces so far exceed together, if any."""
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
        if b"0" * (DIGITS + 1) in outside.translate(_ZEROS):
            return f"a number of more than {DIGITS} digits"
        return None

    def _too_many(self) -> str:
        return f"more than {self._max_values} keys and values (LANEKEEPER_JSON_VALUES)"


def excess(raw: bytes, *, max_values: int) -> str | None:
    """Returns a text that names the exceeded limit, if a JSON text has more than `max_values` keys and values, or a
    number of more than `DIGITS` digits. Invalid JSON is not detected."""
    return next((found for found in excess_in_steps(raw, max_values=max_values) if found is not None), None)


def excess_in_steps(raw: bytes, *, max_values: int) -> Iterator[str | None]:
    """Like `excess`, in steps of at most 20 ms, between which a caller can do other work. The first text is the last
    step."""
    if len(raw) <= min(max_values, SMALL_BYTES):
        return
    marks = 0
    for at in range(0, len(raw), _PIECE_BYTES):
        if at:
            yield None
        piece = raw[at : at + _PIECE_BYTES]
        marks += len(piece) - len(piece.translate(None, b"".join(_MARKS)))
    has_many = marks > max_values
    if not has_many and _RUN not in raw[::_STEP].translate(_ZEROS):
        return
    measure = Measure(max_values)
    for at in range(0, len(raw), _PIECE_BYTES):
        found = measure.add(raw[at : at + _PIECE_BYTES])
        yield found
        if found is not None:
            return
