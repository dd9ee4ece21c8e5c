"""A stream as the client gets it: the provider's events, in the order and with the words that they came in.

What comes first (`message_start`, the start of a block) is held until the first piece of the answer: if an attempt
fails before that, the client hears nothing of it. After that, a failed attempt ends the stream with an `error` event,
because a client cannot forget what it has read. `message_stop` is held until the outcome is stored.
"""

import json
from collections.abc import Iterator
from typing import Any

from lanekeeper.replies import Final, Part
from service.gateway.problems import ApiError

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_FIRST = frozenset({"message_start", "content_block_start", "ping"})
_LAST = "message_stop"
_HELD_BYTES = 64 * 1024
_TYPE = b'{"type":"'
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class Forwarding:
    """Turns the parts of an answer into what is written to the client, and notices when some are missing."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._has_begun = False
        self._next_seq = 0
        self._has_gap = False
        self._stop: bytes | None = None

    def part(self, part: Part) -> bytes:
        """What to write now; may be nothing. Raises ApiError if the client would have to forget what it has."""
        if part.kind == "restart":
            self._start_over("an attempt failed in the middle of the answer, and another one has begun")
            self._next_seq = 1
            return b""
        if part.seq != self._next_seq and not self._has_gap:
            self._start_over("parts of the answer were lost")
            self._has_gap = True  # the whole answer comes at the end
        self._next_seq = part.seq + 1
        if self._has_gap:
            return b""
        kind = type_of(part.body)
        event = _event(kind, part.body)
        if kind == _LAST:
            self._stop = event
            return self._released()
        self._held.append(event)
        self._held_bytes += len(event)
        if not self._has_begun and kind in _FIRST and self._held_bytes < _HELD_BYTES:
            return b""
        return self._released()

    def final(self, final: Final) -> bytes:
        """The end of the stream; all of it, where no parts came: the answer was stored before. Raises ApiError."""
        if self._stop is not None and not self._has_gap:
            return self._stop
        self._start_over("parts of the answer were lost")
        return b"".join(events_of(final.message))

    def _released(self) -> bytes:
        self._has_begun = True
        found, self._held = b"".join(self._held), []
        return found

    def _start_over(self, why: str) -> None:
        if self._has_begun:
            raise ApiError(529, f"{why}; send the request again")
        self._held.clear()
        self._held_bytes = 0
        self._stop = None
        self._has_gap = False


def type_of(event: bytes) -> str:
    """The type of an event. It mostly comes first, so that the event need not be parsed."""
    if event.startswith(_TYPE) and (end := event.find(b'"', len(_TYPE))) > 0 and b"\\" not in event[:end]:
        return event[len(_TYPE) : end].decode(errors="replace")
    return str(json.loads(event).get("type"))


def error_event(error: ApiError, request_id: str) -> bytes:
    """What ends a stream that cannot go on."""
    return b"event: error\ndata: %b\n\n" % error.body(request_id)


def _event(kind: str, data: bytes) -> bytes:
    if b"\n" in data or b"\r" in data:  # a line of its own would end the field
        data = json.dumps(json.loads(data), ensure_ascii=False).encode()
    if not kind.isidentifier():
        kind = "unknown"
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def events_of(message: dict[str, Any]) -> Iterator[bytes]:
    """The events of a Message that is there already, each block in one piece."""
    blocks = message.get("content", [])
    ends = {"stop_reason": message.get("stop_reason"), "stop_sequence": message.get("stop_sequence")}
    yield _made("message_start", message={**message, "content": [], **dict.fromkeys(ends)})
    for index, block in enumerate(blocks):
        start, deltas = _taken_apart(block)
        yield _made("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _made("content_block_delta", index=index, delta=delta)
        yield _made("content_block_stop", index=index)
    yield _made("message_delta", delta=ends, usage=message.get("usage") or {})
    yield _made(_LAST)


def _taken_apart(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and what is added to it; a block of an unknown type starts whole."""
    kind = block.get("type")
    if kind in ("tool_use", "server_tool_use"):
        piece = json.dumps(block.get("input", {}), ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece}]
    if kind not in _DELTAS:
        return block, []
    delta, field = _DELTAS[kind]
    start: dict[str, Any] = {**block, field: ""}
    deltas: list[dict[str, Any]] = [{"type": delta, field: block.get(field, "")}]
    if "signature" in block:
        start["signature"] = ""
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    if citations := start.pop("citations", None):
        start["citations"] = []
        deltas += [{"type": "citations_delta", "citation": each} for each in citations]
    return start, deltas


def _made(kind: str, **fields: Any) -> bytes:
    return _event(kind, json.dumps({"type": kind, **fields}, ensure_ascii=False).encode())
