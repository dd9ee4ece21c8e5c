"""Reads the JSON and the events of a provider's answer, in any dialect."""

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any, Protocol

import jiter

from consumers.dialects.answers import DONE
from consumers.dialects.fields import broken_stream
from consumers.failures import AnswerTooLargeError, TransientError
from topology.codec import bounds


async def bounded(body_pieces: AsyncIterable[bytes], most_bytes: int, *, hint: str = "") -> AsyncGenerator[bytes, None]:
    """Yield the pieces. Raises `AnswerTooLargeError` if they have more than `most_bytes` together."""
    size = 0
    async for piece in body_pieces:
        size += len(piece)
        if size > most_bytes:
            raise AnswerTooLargeError(f"more than {most_bytes} bytes{hint}")
        yield piece


def from_json(data: bytes) -> Any:
    """Raises ValueError if it is invalid, which a lone surrogate (`"\\ud83d"`) is not: a model writes one if it is cut
    off within a character."""
    try:
        return jiter.from_json(data, allow_inf_nan=False, cache_mode="keys")
    except ValueError as error:
        if "escape" not in str(error):
            raise
        try:
            return json.loads(data, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError("nested too deep") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)


class Splitter(Protocol):
    """Splits the bytes of a stream into its events."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The JSON of each event that is whole by now."""


_BOM = b"\xef\xbb\xbf"
_LINES = 1000
"""Usually an event has one or two; it has more if its JSON is indented."""


class EventSplitter:
    """Splits Server-Sent Events, in pieces of any size, by those rules of the HTML standard that matter for JSON data:
    the data of each event is returned as soon as its blank line has come. The decoder of Anthropic's SDK takes several
    times as much CPU as the HTTP call itself.

    Lines end in LF, CRLF or CR. The `data` lines of an event are joined by LF. Comments and other fields are ignored,
    because the type of an event is in its JSON. An event without a blank line at the end of the stream is dropped, as
    is one that `keeps` (given its name and its data) refuses.
    """

    __slots__ = ("_after_cr", "_is_first", "_keeps", "_max_event_bytes", "_rest")

    def __init__(self, max_event_bytes: int, *, keeps: Callable[[bytes, bytes], bool] = lambda _, __: True) -> None:
        self._keeps = keeps
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        self._after_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]  # the LF of a CRLF; its CR was in the piece before, and has ended the line
            self._after_cr = False
            if not chunk:
                return []
        self._after_cr = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        searched, size = max(0, len(self._rest) - 1), len(self._rest) + len(chunk)
        blocks: list[bytes] = []
        if not self._rest and chunk.endswith(b"\n\n"):  # most pieces are whole events
            blocks = chunk[:-2].split(b"\n\n")
        else:
            self._rest += chunk
            if self._rest.find(b"\n\n", searched) >= 0:
                *blocks, rest = bytes(self._rest).split(b"\n\n")
                self._rest = bytearray(rest)
        most = self._max_event_bytes
        if size > most and any(len(block) > most for block in (*blocks, self._rest)):
            raise AnswerTooLargeError(f"an event of more than {self._max_event_bytes} bytes")
        found = []
        for block in blocks:
            if self._is_first:
                block = block.removeprefix(_BOM)
                self._is_first = False
            name, data = _event_in(block)
            if data and self._keeps(name, data):
                found.append(data)
        return found


def _event_in(block: bytes) -> tuple[bytes, bytes]:
    """Its name and its data."""
    if block.count(b"\n") > _LINES:
        raise AnswerTooLargeError(f"an event of more than {_LINES} lines")
    lines: list[bytes] = []
    name = b""
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            lines.append(b"")
        elif line.startswith(b"event:"):
            name = line[6:].strip()
    data = lines[0] if len(lines) == 1 else b"\n".join(lines)
    return name, data


def parse_event(data: bytes, *, max_values: int = bounds.VALUES) -> dict[str, Any]:
    """Empty for `[DONE]`. Raises `TransientError` if it is not a JSON object, `AnswerTooLargeError` if it would take
    long to parse."""
    if not data.startswith(b"{") and data.strip() == DONE:
        return {}
    if (excess := bounds.excess(data, max_values=max_values)) is not None:
        raise AnswerTooLargeError(excess)
    try:
        event = from_json(data)
    except ValueError as error:
        raise TransientError("an event of the stream is not JSON", type="broken_stream") from error
    if not isinstance(event, dict):
        raise TransientError("an event of the stream is not a JSON object", type="broken_stream")
    return event


def to_json(message: object) -> bytes:
    """Raises `TransientError` if a number is too large (1e999)."""
    try:
        return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate can be written as an escape alone
        return json.dumps(message, separators=(",", ":")).encode()
    except ValueError as error:
        raise broken_stream("in its content", error) from error


def error_json(error: object) -> bytes:
    """Like `to_json`, with what Python writes for a number that is too large: an error is told whatever is in it."""
    try:
        return to_json(error)
    except TransientError:
        return json.dumps(error).encode()
