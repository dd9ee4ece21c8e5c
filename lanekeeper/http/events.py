"""Reads Server-Sent Events, as the HTML standard defines them, from chunks of bytes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

LARGEST_BYTES = 64 * 1024 * 1024
"""The largest Server-Sent Event, in bytes, that is read. The limit is this high because the last event of a request may
contain the whole answer."""
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the end of a chunk may be half of \r\n


@dataclass(frozen=True, slots=True)
class Event:
    """One Server-Sent Event. `kind`: the value of its field `event`. `id`: the latest id in the stream: that of this
    event or, if it has none, of an earlier one."""

    kind: str
    data: bytes
    id: str


class EventTooLarge(ValueError):
    """A Server-Sent Event has more bytes than `LARGEST_BYTES`, so it is not read."""


class Events:
    """Parses a stream of Server-Sent Events that arrives in chunks. An event is complete when the blank line after it
    has arrived."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        """How many bytes at the beginning of `_rest` were searched for the end of a line, without finding one."""
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0
        self._id = ""

    def read(self, chunk: bytes) -> Iterator[Event]:
        """Process the next chunk of the stream, and yield the events that it completes. Raises EventTooLarge."""
        self._rest += chunk
        if self._size + len(self._rest) > LARGEST_BYTES:
            raise EventTooLarge(f"an event of more than {LARGEST_BYTES} bytes")
        begin, at = 0, self._searched
        while (found := _LINE_END.search(self._rest, at)) is not None:
            line = bytes(self._rest[begin : found.start()])
            begin = at = found.end()
            if line:
                self._field(line)
            elif (event := self._event()) is not None:
                yield event
        del self._rest[:begin]
        self._searched = max(0, len(self._rest) - 1)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
                self._size += len(value) + 1
            case b"event":
                self._kind = value.decode(errors="replace")
            case b"id" if b"\0" not in value:
                self._id = value.decode(errors="replace")
            case _:
                pass  # a comment (empty name), or a field that the standard says to ignore

    def _event(self) -> Event | None:
        found = Event(self._kind or "message", b"\n".join(self._data), self._id) if self._data else None
        self._kind, self._data, self._size = "", [], 0
        return found
