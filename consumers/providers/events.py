"""Splits a stream of bytes into Server-Sent Events, by those rules of the HTML standard that matter for events with
JSON data.

The decoder of Anthropic's SDK takes several times as much CPU as the HTTP call itself. The code here splits the stream
at blank lines, and returns the data of each event unchanged, so that the data can be forwarded without being encoded
again.
"""

from consumers.failures import AnswerTooLargeError

_BOM = b"\xef\xbb\xbf"
_LINES = 1000
"""How many lines one Server-Sent Event may have at most. Usually an event has one or two; it has more if its JSON is
indented."""


class EventSplitter:
    """Takes the bytes of a stream in pieces of any size, and returns the data of each event as soon as the blank line
    that ends the event has come.

    Lines end in LF, CRLF or CR. The `data` lines of an event are joined by LF. Comments and other fields are ignored,
    because the type of an event is in its JSON. An event without a blank line at the end of the stream is dropped.
    """

    __slots__ = ("_after_cr", "_is_first", "_max_event_bytes", "_rest")

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        self._after_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes of the stream, and return the data of the events that are complete now. Raises
        `AnswerTooLargeError` if an event is too large."""
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
        searched = max(0, len(self._rest) - 1)
        self._rest += chunk
        blocks: list[bytes] = []
        if self._rest.find(b"\n\n", searched) >= 0:
            *blocks, rest = bytes(self._rest).split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > self._max_event_bytes or any(len(block) > self._max_event_bytes for block in blocks):
            raise AnswerTooLargeError(f"an event of more than {self._max_event_bytes} bytes")
        found = []
        for block in blocks:
            if self._is_first:
                block = block.removeprefix(_BOM)
                self._is_first = False
            if (data := _data(block)) is not None:
                found.append(data)
        return found


def _data(block: bytes) -> bytes | None:
    """The data of one Server-Sent Event; None if it has none (a comment, for example)."""
    if block.count(b"\n") > _LINES:
        raise AnswerTooLargeError(f"an event of more than {_LINES} lines")
    lines: list[bytes] = []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            lines.append(b"")
    data = lines[0] if len(lines) == 1 else b"\n".join(lines)
    return data or None
