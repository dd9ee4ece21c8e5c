"""OpenAI's chat completions: how a stream's chunks become a whole answer, and the table of the dialect."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from consumers.dialects.answers import NO_CATEGORY, Answer
from consumers.dialects.base import Dialect, StreamedAnswer
from consumers.dialects.bodies import set_stream
from consumers.dialects.fields import MALFORMED, broken_stream, name_in, object_in
from consumers.dialects.openai import (
    answer_of,
    classify,
    error_in,
    error_within,
    is_event,
    read_rate,
    read_usage,
    status_of,
)
from consumers.failures import AnswerTooLargeError, TransientError
from consumers.limits.base import Amounts
from lanekeeper.contract.names import OPENAI_CHAT
from topology.codec import bounds
from topology.codec.decoding import Request
from topology.codec.fields import with_field

FILTERED: Final = "content_filter"
_REPLACED: Final = frozenset({"role", "id", "type", "name", "index", "format"})
"""A chunk replaces them, unless it has them empty; all other texts of a delta are appended. What a choice has beside
its delta is said anew by each chunk, such as Azure's results of its content filter."""
_NO_USAGE: Final = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')
_USAGE: Final = {"include_usage": True}


def _body(request: Request, streamed: bool) -> bytes:
    """A stream has no usage unless it is asked for."""
    body = set_stream(request.body, streamed, is_stated=request.states_stream)
    if not streamed or _asks_usage(request):
        return body
    if b'"stream_options"' not in body and b"\\u" not in body:
        return body.replace(b"{", b'{"stream_options":{"include_usage":true},', 1)
    return with_field(body, "stream_options", {**object_in(json.loads(body).get("stream_options")), **_USAGE})


def _asks_usage(request: Request) -> bool:
    if b'"include_usage"' not in request.body and b"\\u" not in request.body:
        return False
    return object_in(json.loads(request.body).get("stream_options")).get("include_usage") is True


class _Text(list[str]):
    """Pieces of a text, which are joined at the end: appending each would copy the whole text each time."""


class _ByIndex(dict[int, dict[str, Any]]):
    """The entries of a list that come with their `index`."""


class ChatStream:
    """Puts a chat completion together from its chunks; fields that Lanekeeper does not know are kept. What it keeps in
    memory is limited to `max_bytes` bytes, and to `max_values` JSON keys and values."""

    def __init__(
        self, *, asks_usage: bool, max_bytes: int = bounds.ANSWER_BYTES, max_values: int = bounds.VALUES
    ) -> None:
        """`asks_usage`: whether the requester gets the chunk with the usage."""
        self._asks_usage = asks_usage
        self._max_bytes, self._max_values = max_bytes, max_values
        self._fields: dict[str, Any] = {}
        self._choices = _ByIndex()
        self._usage: object = None
        self._values = 0
        self.size = 0
        self.is_complete = False

    def take(self, event: dict[str, Any], data: bytes) -> bytes | None:
        if not event:  # `[DONE]`
            self.is_complete = True
            return None
        try:
            self._add(event)
        except MALFORMED as error:
            raise broken_stream("at a chunk", error) from error
        if self._asks_usage or "usage" not in event:
            return data
        if event["usage"] is None:
            return _NO_USAGE.sub(b"", data)
        return data if event.get("choices") else None

    def end(self) -> None:
        if not any(choice.get("finish_reason") for choice in self._choices.values()):
            raise TransientError("the stream ended without a finish_reason and [DONE]", type="cut")

    def used(self) -> Amounts | None:
        usage, is_counted = read_usage(self._usage)
        return Amounts(1, usage.prompt, usage.output_tokens) if is_counted else None

    def message(self) -> dict[str, Any]:
        try:
            choices = [_finished_choice(self._choices[index]) for index in sorted(self._choices)]
        except MALFORMED as error:
            raise broken_stream("in its content", error) from error
        found = {**_finished(self._fields), "object": "chat.completion", "choices": choices}
        return found if self._usage is None else {**found, "usage": self._usage}

    def _add(self, event: dict[str, Any]) -> None:
        for key, value in event.items():
            if key == "usage":
                self._usage = value if isinstance(value, dict) else self._usage
            elif key == "choices":
                for choice in value or ():  # null, where a server's language says so of an empty list
                    self._merge(self._choices.setdefault(choice.get("index", 0), {}), choice)
            elif value is not None or key not in self._fields:
                if key not in self._fields:
                    self._count(value)
                self._fields[key] = value

    def _merge(self, into: dict[str, Any], given: Mapping[str, Any], *, in_delta: bool = False) -> None:
        for key, value in given.items():
            before = into.get(key)
            if isinstance(value, str) and in_delta and key not in _REPLACED:
                if not isinstance(before, _Text):
                    before = into[key] = _Text()
                    self._count(None)
                before.append(value)
                self._grow(len(value.encode(errors="surrogatepass")))
            elif isinstance(value, dict):
                if not isinstance(before, dict):
                    before = into[key] = {}
                    self._count(None)
                self._merge(before, value, in_delta=in_delta or key == "delta")
            elif isinstance(value, list):
                self._extend(into, key, value, in_delta=in_delta)
            elif value not in (None, "") or key not in into:
                if key not in into:
                    self._count(value)
                into[key] = value

    def _extend(self, into: dict[str, Any], key: str, entries: list[Any], *, in_delta: bool) -> None:
        by_index = bool(entries) and all(isinstance(each, dict) and type(each.get("index")) is int for each in entries)
        before = into.get(key)
        if not isinstance(before, _ByIndex if by_index else list):
            before = into[key] = _ByIndex() if by_index else []
            self._count(None)
        if isinstance(before, _ByIndex):
            for each in entries:
                self._merge(before.setdefault(each["index"], {}), each, in_delta=in_delta)
        else:
            for each in entries:
                self._count(each)
            before.extend(entries)

    def _count(self, value: object) -> None:
        """A new value, with those in it."""
        left = [value]
        while left:
            each = left.pop()
            self._values += 1
            if self._values > self._max_values:
                raise AnswerTooLargeError(f"more than {self._max_values} keys and values (LANEKEEPER_JSON_VALUES)")
            if isinstance(each, dict):
                left += each.values()
            elif isinstance(each, list):
                left += each
            self._grow(len(each) + 8 if isinstance(each, str) else 8)

    def _grow(self, size: int) -> None:
        self.size += size
        if self.size > self._max_bytes:
            raise AnswerTooLargeError(f"more than {self._max_bytes} bytes ({bounds.ANSWER_SETTINGS})")


def _finished(value: Any) -> Any:
    match value:
        case _Text():
            return "".join(value)
        case _ByIndex():
            return [_finished({k: v for k, v in value[index].items() if k != "index"}) for index in sorted(value)]
        case dict():
            return {key: _finished(each) for key, each in value.items()}
        case _:
            return value


def _finished_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: _finished(value) for key, value in choice.items() if key != "delta"}
    message = {"role": "assistant", "content": None, **_finished(choice.get("delta") or {})}
    return {"index": 0, **fields, "message": message}


def _read_answer(message: dict[str, Any], body: bytes, **about: Any) -> Answer:
    choices = message.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, dict) for each in choices):
        raise TransientError("the answer is JSON, but no chat completion", type="broken_answer")
    stop_reason = name_in(choices[0].get("finish_reason")) or None
    refuses = stop_reason == FILTERED or bool(object_in(choices[0].get("message")).get("refusal"))
    return answer_of(message, body, stop_reason=stop_reason, refusal=NO_CATEGORY if refuses else None, **about)


def _new_stream(request: Request, *, max_bytes: int, max_values: int) -> StreamedAnswer:
    return ChatStream(asks_usage=_asks_usage(request), max_bytes=max_bytes, max_values=max_values)


CHAT: Final = Dialect(
    name=OPENAI_CHAT,
    path="/chat/completions",
    content=b'"delta"',
    body=_body,
    read_answer=_read_answer,
    new_stream=_new_stream,
    is_event=is_event,
    error_within=error_within,
    error=error_in,
    status_of=status_of,
    classify=classify,
    read_rate=read_rate,
    joins_tokens=True,
)
