"""Turns the parts of a worker's streamed reply into a stream for the HTTP client: the provider's events, unchanged and
in their order.

The first events (`message_start`, the start of a block) are held back until the first piece of the answer's content
comes, so that the client does not notice an attempt that fails before that. After that, a failed attempt ends the
stream with an `error` event, because events that a client has read cannot be withdrawn. `message_stop` is held back
until a worker has stored the request's outcome.
"""

import json
from collections.abc import Iterator
from typing import Any

from lanekeeper.replies import Part
from service.gateway.problems import ApiError

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_FIRST = frozenset({"message_start", "content_block_start", "ping"})
_LAST = "message_stop"
_HELD_BYTES = 64 * 1024
"""How many bytes of a stream are held back at most before the content of the answer begins."""
_TYPE = b'{"type":"'
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class Forwarding:
    """Turns the parts of a streamed answer into the Server-Sent Events to write to the HTTP client. It holds the first
    events back until the answer's content begins, and notices when parts are missing."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._has_begun = False
        self._next_seq = 0
        self._has_gap = False
        self._stop: bytes | None = None

    def part(self, part: Part) -> bytes:
        """Process one part of the streamed answer. Returns the bytes to write to the client now, which may be none.
        Raises ApiError if the worker began the answer anew, so that events which the client already has are not part of
        it."""
        if part.kind == "restart":
            self._start_over("an attempt failed in the middle of the answer, and another one has begun")
            self._next_seq = 1
            return b""
        if part.seq != self._next_seq and not self._has_gap:
            self._start_over("parts of the answer were lost")
            self._has_gap = True  # the whole answer is sent at the end, from the final reply
        self._next_seq = part.seq + 1
        if self._has_gap:
            return b""
        kind = type_of(part.body)
        event = _event(kind, part.body)
        if kind == _LAST:
            self._stop = event
            return self._release()
        self._held.append(event)
        self._held_bytes += len(event)
        if not self._has_begun and kind in _FIRST and self._held_bytes < _HELD_BYTES:
            return b""
        return self._release()

    def end(self) -> bytes | None:
        """Return the bytes that end the stream. If no parts came, or some were lost before anything was written to the
        client, return None: the caller then writes the whole stream from the worker's final reply (`events_of`). Raises
        ApiError if parts were lost after something was written to the client."""
        if self._stop is not None and not self._has_gap:
            return self._stop
        self._start_over("parts of the answer were lost")
        return None

    def _release(self) -> bytes:
        self._has_begun = True
        events, self._held = b"".join(self._held), []
        return events

    def _start_over(self, why: str) -> None:
        if self._has_begun:
            raise ApiError(529, f"{why}; send the request again")
        self._held.clear()
        self._held_bytes = 0
        self._stop = None
        self._has_gap = False


def type_of(event: bytes) -> str:
    """The `type` in the JSON of a provider's event. It is usually the JSON's first field, and is then found without
    parsing the JSON."""
    if event.startswith(_TYPE) and (end := event.find(b'"', len(_TYPE))) > 0 and b"\\" not in event[:end]:
        return event[len(_TYPE) : end].decode(errors="replace")
    return str(json.loads(event).get("type"))


def error_event(error: ApiError, request_id: str) -> bytes:
    """The Server-Sent Event `error`, which ends a stream that cannot continue."""
    return b"event: error\ndata: %b\n\n" % error.body(request_id)


def _event(kind: str, data: bytes) -> bytes:
    if b"\n" in data or b"\r" in data:  # a line break would end the `data` field
        data = json.dumps(json.loads(data), ensure_ascii=False).encode()
    if not kind.isidentifier():
        kind = "unknown"
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def events_of(message: dict[str, Any]) -> Iterator[bytes]:
    """The Server-Sent Events that stream a complete Message, as the provider would send them: one delta for the content
    of each block."""
    blocks = message.get("content", [])
    ends = {"stop_reason": message.get("stop_reason"), "stop_sequence": message.get("stop_sequence")}
    yield _new_event("message_start", message={**message, "content": [], **dict.fromkeys(ends)})
    for index, block in enumerate(blocks):
        start, deltas = _split_block(block)
        yield _new_event("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _new_event("content_block_delta", index=index, delta=delta)
        yield _new_event("content_block_stop", index=index)
    yield _new_event("message_delta", delta=ends, usage=message.get("usage") or {})
    yield _new_event(_LAST)


def _split_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split a content block of a Message into what its `content_block_start` event contains, and the deltas that
    follow. A block of an unknown type is sent completely in its start event."""
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
        deltas += [{"type": "citations_delta", "citation": citation} for citation in citations]
    return start, deltas


def _new_event(kind: str, **fields: Any) -> bytes:
    return _event(kind, json.dumps({"type": kind, **fields}, ensure_ascii=False).encode())
