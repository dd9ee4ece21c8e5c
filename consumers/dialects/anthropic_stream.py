"""Puts a Message of Anthropic's API together from the events of its stream."""

from typing import Any, Final

import jiter

from consumers.dialects.answers import DONE, counted
from consumers.dialects.anthropic_answers import read_usage
from consumers.dialects.fields import MALFORMED, broken_stream, name_in
from consumers.failures import AnswerTooLargeError, TransientError
from consumers.limits.base import Amounts
from lanekeeper.contract.identity import encodable
from topology.codec import bounds
from topology.codec.bounds import Measure

_STOP: Final = b'{"type":"message_stop"}'
_JSON_DELTA = "input_json_delta"
_JSON = "partial_json"
_WITH_CONTENT = frozenset({"content_block_delta", "content_block_start", "message_start", "message_delta"})
_REPLACED = frozenset({"signature"})
"""A delta replaces them; its text is appended to all other string fields."""
_ABOUT = frozenset({"type", "estimated_tokens"})
"""What a delta says of itself: it is no part of the block, and a block that had it would be refused when it is sent
back."""
_CHARACTERS_PER_TOKEN = 4


class StreamedMessage:
    """Puts a Message together from the events of its stream; fields that Lanekeeper does not know are kept. What it
    keeps in memory is limited to `max_bytes` bytes, and to `max_values` JSON keys and values."""

    def __init__(self, *, max_bytes: int = bounds.ANSWER_BYTES, max_values: int = bounds.VALUES) -> None:
        self._message: dict[str, Any] | None = None
        self._blocks: dict[int, _Block] = {}
        self._max_bytes = max_bytes
        self.size = 0
        self._measure = Measure(max_values)
        self._left = self._max_values = max_values
        self.is_complete = False

    def add(self, event: dict[str, Any], data: bytes = b"") -> bool:
        """Add an event, of which `data` is the JSON. Returns True if it was the last one, `message_stop`. Raises
        `TransientError` if it is malformed or cannot follow the events before it."""
        try:
            kind = event["type"]
            block = self._blocks[event["index"]] if kind == "content_block_delta" else None
            if block is not None and (pieces := block.pieces(event["delta"])) is not None:
                # it only appends to strings, so only the bytes of the appended text count
                json = pieces.get(_JSON, "").encode(errors="surrogatepass")
                self._count(block.measure, json, sum(map(_size, pieces.values())))
                block.append(pieces)
                return False
            if kind in _WITH_CONTENT:
                self._count(self._measure, data, len(data))
            return self._add(event)
        except MALFORMED as error:
            raise broken_stream(f"at an event {str(event.get('type'))[:50]!r}", error) from error

    @property
    def has_ended(self) -> bool:
        """Whether the reason has come why the model stopped: only `message_stop` follows."""
        return self._message is not None and bool(name_in(self._message.get("stop_reason")))

    def used(self) -> Amounts | None:
        """What the call has used so far: the provider's count of the input, which comes first, and the output by its
        text. None if the input was not counted yet."""
        usage = read_usage(None if self._message is None else self._message.get("usage"))
        if not (usage.input_tokens or usage.cache_creation_input_tokens or usage.cache_read_input_tokens):
            return None
        characters = sum(block.characters for block in self._blocks.values())
        return counted(usage)._replace(output_tokens=max(usage.output_tokens, characters / _CHARACTERS_PER_TOKEN))

    def take(self, event: dict[str, Any], data: bytes) -> bytes | None:
        if not isinstance(event.get("type"), str):  # no event of Anthropic's, or `[DONE]`
            if data.strip() != DONE or not self.has_ended:
                return None
            data, event = _STOP, {"type": "message_stop"}
        self.is_complete = self.add(event, data)
        return data

    def end(self) -> bytes:
        if not self.has_ended:
            raise TransientError("the stream ended without message_stop", type="cut")
        return _STOP

    def message(self) -> dict[str, Any]:
        """The content blocks are in the order of their index. Raises `TransientError` if the events are malformed."""
        try:
            return self._finished()
        except MALFORMED as error:
            raise broken_stream("in its content", error) from error

    def _count(self, measure: Measure, added: bytes, size: int) -> None:
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
                block = event["content_block"]
                self._blocks[event["index"]] = _Block(block, Measure(self._max_values))
                served = block.get("to") if block.get("type") == "fallback" else None
                if self._message is not None and isinstance(served, dict) and isinstance(served.get("model"), str):
                    self._message["model"] = served["model"]  # as the message that is not streamed names it
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
        """Token counts in `message_delta` are totals, which replace earlier ones; a missing or null count changes
        nothing."""
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


class _Block:
    """Pieces of strings are joined at the end, because appending each would copy the whole string each time."""

    __slots__ = ("_fields", "_json", "_lists", "_strings", "measure")

    def __init__(self, fields: dict[str, Any], measure: Measure) -> None:
        self._fields = {**fields}
        self._lists: dict[str, list[Any]] = {}
        self.measure = measure
        self._strings: dict[str, list[str]] = {}
        self._json: list[str] = []

    def pieces(self, delta: dict[str, Any]) -> dict[str, str] | None:
        known = (_JSON,) if delta["type"] == _JSON_DELTA else self._strings
        pieces = {key: value for key, value in delta.items() if key in known and isinstance(value, str)}
        return pieces if len(pieces) == len(delta) - 1 else None

    def append(self, pieces: dict[str, str]) -> None:
        for key, piece in pieces.items():
            self._strings.get(key, self._json).append(piece)

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta["type"]
        if kind == _JSON_DELTA:
            self._json.append(delta[_JSON])
            return
        if kind == "citations_delta":
            self._extend("citations", [delta["citation"]])
            return
        for key, value in delta.items():
            if key in _ABOUT:
                continue
            if isinstance(value, str) and key not in _REPLACED:
                self._strings.setdefault(key, []).append(value)
            elif isinstance(value, list):
                self._extend(key, value)
            else:
                self._fields[key] = value

    @property
    def characters(self) -> int:
        return sum(map(len, self._json)) + sum(len(piece) for pieces in self._strings.values() for piece in pieces)

    def _extend(self, key: str, items: list[Any]) -> None:
        """In place, because a copy at each delta would take quadratic time."""
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


def _tool_input(text: str) -> Any:
    # If the answer ended at max_tokens, the JSON of a tool call's input may be cut: return its complete part, as
    # Anthropic's client does. With fine-grained streaming it may be no JSON at all: wrap it, as Anthropic advises.
    try:
        return jiter.from_json(encodable(text).encode(), allow_inf_nan=False, partial_mode=True)
    except ValueError:
        return {"INVALID_JSON": text}


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _merge(into: dict[str, Any], given: dict[str, Any]) -> None:
    for key, value in given.items():
        if value is not None or key not in into:
            into[key] = value
