"""Puts a Message together from the events of its stream. Fields that Lanekeeper does not know are kept."""

import json
from typing import Any

import jiter

from consumers.failures import AnswerTooLargeError, TransientError
from topology.codec import bounds
from topology.codec.bounds import Measure

_JSON_DELTA = "input_json_delta"
_JSON = "partial_json"
_WITH_CONTENT = frozenset({"content_block_delta", "content_block_start", "message_start", "message_delta"})
_REPLACED = frozenset({"signature"})
"""The string fields of a content block that a delta replaces. For all other string fields, the delta's text is appended
to the field."""
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError)
"""The exceptions that may be raised when a malformed event is read."""


class StreamedMessage:
    """Puts a provider's Message together from the events of its stream, which it takes in order. What it keeps in
    memory is limited to `max_bytes` bytes, and to `max_values` JSON keys and values."""

    def __init__(self, *, max_bytes: int = bounds.ANSWER_BYTES, max_values: int = bounds.VALUES) -> None:
        self._message: dict[str, Any] | None = None
        self._blocks: dict[int, _Block] = {}
        self._max_bytes = max_bytes
        self.size = 0
        """How many bytes of the stream's events are kept in memory."""
        self._measure = Measure(max_values)
        self._left = max_values

    def add(self, event: dict[str, Any], data: bytes = b"") -> bool:
        """Add an event. Returns True if it was the last one, `message_stop`. `data`: the event's JSON.

        Raises `TransientError` if the event is malformed or cannot follow the events before it, and
        `AnswerTooLargeError` if all events together are too large.
        """
        try:
            self._count(event, data)
            return self._add(event)
        except _MALFORMED as error:
            raise _broken(f"at an event {str(event.get('type'))[:50]!r}", error) from error

    def message(self) -> dict[str, Any]:
        """The Message that was put together from the events, as a JSON object; its content blocks are in the order of
        their index. Raises `TransientError` if the events are malformed."""
        try:
            return self._finished()
        except _MALFORMED as error:
            raise _broken("in its content", error) from error

    def _count(self, event: dict[str, Any], data: bytes) -> None:
        """Count the bytes, keys and values that the event adds to those kept in memory; raise `AnswerTooLargeError` if
        they are too many. If the event only appends to strings, only the bytes of the appended text count."""
        kind = event["type"]
        if kind not in _WITH_CONTENT:
            return
        block = self._blocks.get(event["index"]) if kind == "content_block_delta" else None
        if block is None or (pieces := block.pieces(event["delta"])) is None:
            measure, added, size = self._measure, data, len(data)
        else:
            measure, added, size = block.measure, pieces.get(_JSON, "").encode(), sum(map(_size, pieces.values()))
        measure.left = self._left
        excess = measure.add(added) if added else None
        self._left = measure.left
        self.size += size
        if self.size > self._max_bytes:
            excess = f"more than {self._max_bytes} bytes ({bounds.ANSWER_SETTINGS})"
        if excess is not None:
            raise AnswerTooLargeError(excess)

    def _add(self, event: dict[str, Any]) -> bool:
        match event["type"]:
            case "content_block_delta":
                self._blocks[event["index"]].add(event["delta"])
            case "content_block_start":
                self._blocks[event["index"]] = _Block(event["content_block"])
            case "message_start":
                self._message = {**event["message"]}
            case "message_delta":
                self._finish(event)
            case "message_stop":
                return True
            case _:
                pass  # ping, content_block_stop, and events that may be added one day
        return False

    def _finish(self, event: dict[str, Any]) -> None:
        """Merge the event `message_delta` into the Message. Its token counts are totals, which replace earlier ones; a
        missing or null count changes nothing."""
        if self._message is None:
            raise ValueError("message_delta before message_start")
        usage = self._message.get("usage") or {}
        _merge(usage, event.get("usage") or {})
        _merge(self._message, event["delta"])
        _merge(self._message, {key: value for key, value in event.items() if key not in ("type", "delta", "usage")})
        self._message["usage"] = usage

    def _finished(self) -> dict[str, Any]:
        if self._message is None:
            raise ValueError("no message_start")
        blocks = [self._blocks[index].finished() for index in sorted(self._blocks)]
        return {**self._message, "content": [*(self._message.get("content") or ()), *blocks]}


def _broken(where: str, error: Exception) -> TransientError:
    return TransientError(f"the stream is broken {where} ({error.__class__.__name__})", type="broken_stream")


class _Block:
    """One content block of a streamed Message. The pieces of its strings are joined at the end, because appending each
    piece to the string would copy the whole string each time."""

    __slots__ = ("_fields", "_json", "_lists", "_strings", "measure")

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = {**fields}
        self._lists: dict[str, list[Any]] = {}
        self.measure = Measure(0)
        """Counts the keys and values in the JSON that the model sends as input of a tool."""
        self._strings: dict[str, list[str]] = {}
        self._json: list[str] = []

    def pieces(self, delta: dict[str, Any]) -> dict[str, str] | None:
        """The text that a delta appends to existing strings, by field. None if the delta contains anything else, such
        as the first piece of a string."""
        known = (_JSON,) if delta["type"] == _JSON_DELTA else self._strings
        pieces = {key: value for key, value in delta.items() if key in known and isinstance(value, str)}
        return pieces if len(pieces) == len(delta) - 1 else None

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta["type"]
        if kind == _JSON_DELTA:
            self._json.append(delta[_JSON])
            return
        if kind == "citations_delta":
            self._extend("citations", [delta["citation"]])
            return
        for key, value in delta.items():
            if key == "type":
                continue
            if isinstance(value, str) and key not in _REPLACED:
                self._strings.setdefault(key, []).append(value)
            elif isinstance(value, list):
                self._extend(key, value)
            else:
                self._fields[key] = value

    def _extend(self, key: str, items: list[Any]) -> None:
        """Append items to a list field of the content block in place, because a copy at each delta would take quadratic
        time."""
        if self._fields.get(key) is not self._lists.get(key) or key not in self._lists:
            self._lists[key] = self._fields[key] = [*(self._fields.get(key) or ())]
        self._lists[key].extend(items)

    def finished(self) -> dict[str, Any]:
        fields = {**self._fields}
        for key, pieces in self._strings.items():
            fields[key] = (fields.get(key) or "") + "".join(pieces)
        if text := "".join(self._json):
            fields["input"] = _tool_input(text)
        return fields


def parse_event(data: bytes, *, max_values: int = bounds.VALUES) -> dict[str, Any]:
    """Parse one event of the stream. Raises `TransientError` if it is not a JSON object, and `AnswerTooLargeError` if
    it exceeds a limit, so that it would take long to parse."""
    if (excess := bounds.excess(data, max_values=max_values)) is not None:
        raise AnswerTooLargeError(excess)
    try:
        event = jiter.from_json(data, allow_inf_nan=False, cache_mode="keys")
    except ValueError as error:
        raise TransientError(f"an event of the stream is not JSON: {error}", type="broken_stream") from error
    if not isinstance(event, dict):
        raise TransientError("an event of the stream is not a JSON object", type="broken_stream")
    return event


def _tool_input(text: str) -> Any:
    # If the answer ended at max_tokens, the JSON of a tool call's input may be cut: return its complete part, as
    # Anthropic's client does. With fine-grained streaming it may be no JSON at all: wrap it, as Anthropic advises.
    try:
        return jiter.from_json(text.encode(), allow_inf_nan=False, partial_mode=True)
    except ValueError:
        return {"INVALID_JSON": text}


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _merge(into: dict[str, Any], given: dict[str, Any]) -> None:
    for key, value in given.items():
        if value is not None or key not in into:
            into[key] = value


def to_json(message: dict[str, Any]) -> bytes:
    """The Message as JSON. Raises `TransientError` if a number is too large (1e999)."""
    try:
        return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise _broken("in its content", error) from error
