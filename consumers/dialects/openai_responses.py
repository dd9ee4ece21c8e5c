"""OpenAI's responses: the table of the dialect. A stream's last event has the whole response."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from consumers.dialects.answers import NO_CATEGORY, Answer
from consumers.dialects.base import ErrorFields, StreamedAnswer
from consumers.dialects.bodies import set_stream
from consumers.dialects.fields import name_in, object_in
from consumers.dialects.openai import answer_of, error_in, read_usage
from consumers.dialects.openai_chat import CHAT, FILTERED
from consumers.failures import AnswerTooLargeError, TransientError
from consumers.limits.base import Amounts
from lanekeeper.contract.names import OPENAI_RESPONSES
from topology.codec import bounds
from topology.codec.decoding import Request

_ENDED: Final = frozenset({"response.completed", "response.incomplete"})
_WHOLE: Final = frozenset({"completed", "incomplete"})


class ResponseStream:
    """Waits for the event that has the whole response."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._response: dict[str, Any] | None = None
        self.size = 0
        self.is_complete = False

    def take(self, event: dict[str, Any], data: bytes) -> bytes | None:
        if not event:  # `[DONE]`, which some servers send
            return None
        if name_in(event.get("type")) in _ENDED:
            response = event.get("response")
            if not isinstance(response, dict):
                raise TransientError("the stream's last event has no response", type="broken_stream")
            self.size = len(data)
            if self.size > self._max_bytes:
                raise AnswerTooLargeError(f"more than {self._max_bytes} bytes ({bounds.ANSWER_SETTINGS})")
            self._response = response
            self.is_complete = True
        return data

    def end(self) -> None:
        raise TransientError("the stream ended without response.completed", type="cut")

    def used(self) -> Amounts | None:
        usage, is_counted = read_usage(None if self._response is None else self._response.get("usage"))
        return Amounts(1, usage.prompt, usage.output_tokens) if is_counted else None

    def message(self) -> dict[str, Any]:
        return self._response or {}


def _error_within(event: Mapping[str, Any]) -> ErrorFields | None:
    """An event `error` or `response.failed`, or a response that has failed."""
    match event:
        case {"type": "error"}:
            return error_in(event)
        case {"type": "response.failed", "response": dict(response)}:
            return error_in(response)
        case {"error": dict() | str()}:
            return error_in(event)
    return None


def _read_answer(message: dict[str, Any], body: bytes, **about: Any) -> Answer:
    output, status = message.get("output"), name_in(message.get("status"))
    if not isinstance(output, list):
        raise TransientError("the answer is JSON, but no response", type="broken_answer")
    if status not in _WHOLE:
        raise TransientError("the response is not whole", type="unfinished")
    reason = name_in(object_in(message.get("incomplete_details")).get("reason")) or status
    refusal = NO_CATEGORY if reason == FILTERED or _refuses(output) else None
    return answer_of(message, body, stop_reason=reason, refusal=refusal, **about)


def _refuses(output: list[Any]) -> bool:
    contents = [item.get("content") for item in output if isinstance(item, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "refusal" for part in parts)


def _new_stream(request: Request, *, max_bytes: int, max_values: int) -> StreamedAnswer:
    return ResponseStream(max_bytes=max_bytes)


RESPONSES: Final = replace(
    CHAT,
    name=OPENAI_RESPONSES,
    path="/responses",
    body=lambda request, streamed: set_stream(request.body, streamed, is_stated=request.states_stream),
    read_answer=_read_answer,
    new_stream=_new_stream,
    error_within=_error_within,
)
