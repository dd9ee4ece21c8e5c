"""Reads the provider's answers that came with HTTP 200: whole ones, and streams of events. An answer must be a whole
Message with a `stop_reason`; anything else is a failed call."""

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from typing import Any, Final, Protocol

import jiter

from consumers.failures import AnswerTooLargeError, TransientError
from consumers.limits.base import Amounts, RateHeaders
from consumers.prices import Tokens, Usage
from consumers.providers.answers import NO_CATEGORY, REFUSAL, Answer, counted
from lanekeeper.contract.identity import encodable
from topology.codec import bounds
from topology.codec.bounds import Measure
from topology.codec.file_ids import made_in

BATCH_TIER: Final = "batch"
MOST_TOKENS: Final = 10_000_000
"""More is ignored as impossible: charging it would use up the budget for ever."""
_NAME_CHARACTERS: Final = 256
"""Longer names in an answer are not copied into headers and spans."""


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


def read_answer(
    message: dict[str, Any], body: bytes, *, provider: str, request_id: str | None, rate: RateHeaders | None = None
) -> Answer:
    """Turn the provider's Message (`body`: as JSON) into an `Answer`. Raises `TransientError` if it is not whole."""
    stop_reason = message.get("stop_reason")
    if message.get("type") != "message" or not isinstance(message.get("content"), list):
        raise TransientError("the answer is JSON, but no Message", type="broken_answer")
    if not _name(stop_reason):
        raise TransientError("the answer has no stop_reason", type="unfinished")
    return Answer(
        body=body,
        model=_name(message.get("model")),
        provider=provider,
        usage=read_usage(message.get("usage")),
        request_id=request_id,
        stop_reason=_name(stop_reason),
        refusal=_category(message) if stop_reason == REFUSAL else None,
        files=made_in(message) if b'"file_id"' in body else (),
        rate=rate,
    )


def _category(message: Mapping[str, Any]) -> str:
    details = message.get("stop_details")
    return _name(details.get("category") if isinstance(details, dict) else None) or NO_CATEGORY


def _name(value: object) -> str:
    return encodable(value) if isinstance(value, str) and len(value) <= _NAME_CHARACTERS else ""


def read_usage(counts: object) -> Usage:
    """A count that is missing or impossible is 0."""
    given = counts if isinstance(counts, dict) else {}
    tokens, tools = _read_tokens(given), given.get("server_tool_use")
    iterations = given.get("iterations")
    return Usage(
        input_tokens=tokens.input_tokens,
        output_tokens=tokens.output_tokens,
        cache_creation_input_tokens=tokens.cache_creation_input_tokens,
        cache_creation_1h_tokens=tokens.cache_creation_1h_tokens,
        cache_read_input_tokens=tokens.cache_read_input_tokens,
        web_searches=_count(tools, "web_search_requests"),
        is_fast=given.get("speed") == "fast",
        geo=_name(given.get("inference_geo")),
        is_batch=given.get("service_tier") == BATCH_TIER,
        iterations=tuple(
            (_name(each.get("model")), _read_tokens(each))
            for each in (iterations if isinstance(iterations, list) else ())
            if isinstance(each, dict)
        ),
    )


def _read_tokens(given: Mapping[str, object]) -> Tokens:
    written = _count(given, "cache_creation_input_tokens")
    return Tokens(
        input_tokens=_count(given, "input_tokens"),
        output_tokens=_count(given, "output_tokens"),
        cache_creation_input_tokens=written,
        cache_creation_1h_tokens=min(written, _count(given.get("cache_creation"), "ephemeral_1h_input_tokens")),
        cache_read_input_tokens=_count(given, "cache_read_input_tokens"),
    )


def _count(given: object, name: str) -> int:
    value = given.get(name) if isinstance(given, dict) else None
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0


def _is_readable(name: bytes, data: bytes) -> bool:
    """Whether clients read such an event. They skip what is no JSON object and has no name of Anthropic's events, such
    as a server's own keep-alive."""
    return data.lstrip().startswith(b"{") or data.strip() == DONE or name in _KNOWN


class Splitter(Protocol):
    """Splits the bytes of a stream into its events."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The JSON of each event that is whole by now."""


DONE: Final = b"[DONE]"
"""With it, servers that speak OpenAI's protocol too end a stream: before, after or in place of `message_stop`."""
_KNOWN: Final = frozenset(
    {
        b"message_start", b"message_delta", b"message_stop", b"content_block_start", b"content_block_delta",
        b"content_block_stop", b"error",
    }
)  # fmt: skip
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
        searched = max(0, len(self._rest) - 1)
        blocks: list[bytes] = []
        if not self._rest and chunk.endswith(b"\n\n"):  # most pieces are whole events
            blocks = chunk[:-2].split(b"\n\n")
        else:
            self._rest += chunk
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
            name, data = _event_in(block)
            if data and self._keeps(name, data):
                found.append(data)
        return found


def events_of_anthropic(max_event_bytes: int) -> EventSplitter:
    """A splitter that drops what no client reads."""
    return EventSplitter(max_event_bytes, keeps=_is_readable)


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


_JSON_DELTA = "input_json_delta"
_JSON = "partial_json"
_WITH_CONTENT = frozenset({"content_block_delta", "content_block_start", "message_start", "message_delta"})
_REPLACED = frozenset({"signature"})
"""A delta replaces them; its text is appended to all other string fields."""
_CHARACTERS_PER_TOKEN = 4
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError)


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

    def add(self, event: dict[str, Any], data: bytes = b"") -> bool:
        """Add an event, of which `data` is the JSON. Returns True if it was the last one, `message_stop`. Raises
        `TransientError` if it is malformed or cannot follow the events before it."""
        try:
            self._count(event, data)
            return self._add(event)
        except _MALFORMED as error:
            raise _broken(f"at an event {str(event.get('type'))[:50]!r}", error) from error

    @property
    def has_ended(self) -> bool:
        """Whether the reason has come why the model stopped: only `message_stop` follows."""
        return self._message is not None and bool(_name(self._message.get("stop_reason")))

    def used(self) -> Amounts | None:
        """What the call has used so far: the provider's count of the input, which comes first, and the output by its
        text. None if the input was not counted yet."""
        usage = read_usage(None if self._message is None else self._message.get("usage"))
        if not (usage.input_tokens or usage.cache_creation_input_tokens or usage.cache_read_input_tokens):
            return None
        characters = sum(block.characters for block in self._blocks.values())
        return counted(usage)._replace(output_tokens=max(usage.output_tokens, characters / _CHARACTERS_PER_TOKEN))

    def message(self) -> dict[str, Any]:
        """The content blocks are in the order of their index. Raises `TransientError` if the events are malformed."""
        try:
            return self._finished()
        except _MALFORMED as error:
            raise _broken("in its content", error) from error

    def _count(self, event: dict[str, Any], data: bytes) -> None:
        """If the event only appends to strings, only the bytes of the appended text count."""
        kind = event["type"]
        if kind not in _WITH_CONTENT:
            return
        block = self._blocks.get(event["index"]) if kind == "content_block_delta" else None
        if block is None or (pieces := block.pieces(event["delta"])) is None:
            measure, added, size = self._measure, data, len(data)
        else:
            measure, added, size = (
                block.measure,
                pieces.get(_JSON, "").encode(errors="surrogatepass"),
                sum(map(_size, pieces.values())),
            )
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
                self._blocks[event["index"]] = _Block(event["content_block"], Measure(self._max_values))
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


def _broken(where: str, error: Exception) -> TransientError:
    return TransientError(f"the stream is broken {where} ({error.__class__.__name__})", type="broken_stream")


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


def parse_event(data: bytes, *, max_values: int = bounds.VALUES) -> dict[str, Any]:
    """Empty for `[DONE]`. Raises `TransientError` if it is not a JSON object, `AnswerTooLargeError` if it would take
    long to parse."""
    if data.strip() == DONE:
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


def to_json(message: dict[str, Any]) -> bytes:
    """Raises `TransientError` if a number is too large (1e999)."""
    try:
        return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate can be written as an escape alone
        return json.dumps(message, separators=(",", ":")).encode()
    except ValueError as error:
        raise _broken("in its content", error) from error
