"""The paths of OpenAI's API. `POST /v1/chat/completions`, `/v1/responses` and `/v1/embeddings` are calls like those of
`/v1/messages` (`messages.py`), in other formats.

A response with `background: true` is a submitted request (`requests.py`). Its id is `resp_` followed by the request's,
and its status comes from the store. Its stream is made from the request's entries, whose numbers become the events'
`sequence_number`, so that any gateway can continue it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final

import jiter
from aiohttp import web

from consumers.background import background_task
from consumers.dialects.fields import object_in
from consumers.state.base import EVENT, QUEUED, RESTART, Completion, Entry
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import body_address_in
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.replies import Problem
from service.config.settings import GatewayKey
from service.gateway.answers import StoredAnswers, Writing, event_stream, in_one_line
from service.gateway.calls import IDEMPOTENCY_KEY, Bodies, CheckedCall, submitted_id_of
from service.gateway.messages import AwaitedCalls, Format, StreamStage, named
from service.gateway.problems import ABOUT_REQUEST, JSON, ApiError, api_error_of, detail_of, encoded
from service.gateway.requests import HEARTBEAT, LARGEST_NUMBER, Known, SubmittedRequests, end_of, word_of
from topology.codec.fields import with_field

CHAT_PATH: Final = "/v1/chat/completions"
RESPONSES_PATH: Final = "/v1/responses"
RESPONSE_PATH: Final = "/v1/responses/{id}"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
REQUEST_ID_HEADER: Final = "x-request-id"
DONE: Final = b"data: [DONE]\n\n"
_PREFIX: Final = "resp_"
_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_BEFORE: Final = frozenset(
    {
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)
_STATUSES: Final = {"running": "in_progress", "cancelled": "cancelled", "failed": "failed"}
"""Of responses without an answer, by the word for the request; others are `queued`."""
Handler = Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]


# ---- formats ---------------------------------------------------------------------------------------------------------


def _data(content: bytes) -> bytes:
    return b"data: %b\n\n" % in_one_line(content)


_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"[^"]')


def _read_chunk(data: bytes) -> tuple[StreamStage, bytes]:
    if _FINISHED.search(data):
        return StreamStage.LAST, _data(data)
    is_first = b'"role"' in data and not any(map(_has_content, _objects(jiter.from_json(data), "choices")))
    return StreamStage.BEFORE if is_first else StreamStage.CONTENT, _data(data)


def _ended_by(data: bytes) -> set[object]:
    return {each.get("index") for each in _objects(jiter.from_json(data), "choices") if each.get("finish_reason")}


def _has_content(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    return not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role")


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    found = value.get(name) if isinstance(value, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _chunks_of(completion: dict[str, Any], call: CheckedCall) -> Iterator[bytes]:
    head = {name: value for name, value in completion.items() if name not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    if call.wants_usage:
        head["usage"] = None

    def chunk(**fields: Any) -> bytes:
        return _data(json.dumps({**head, **fields}).encode())

    for choice in _objects(completion, "choices"):
        delta = dict(object_in(choice.get("message")))
        if called := _objects(delta, "tool_calls"):
            delta["tool_calls"] = [{"index": index, **each} for index, each in enumerate(called)]
        yield chunk(choices=[{**_without(choice, "message"), "delta": delta, "finish_reason": None}])
        yield chunk(choices=[{**_without(choice, "message", "logprobs"), "delta": {}}])
    if call.wants_usage:
        yield chunk(choices=[], usage=completion.get("usage"))
    yield DONE


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _read_response_event(data: bytes) -> tuple[StreamStage, bytes]:
    kind, event = named(data)
    return StreamStage.LAST if kind in _ENDS else StreamStage.BEFORE if kind in _BEFORE else StreamStage.CONTENT, event


def _events_of(response: dict[str, Any], call: CheckedCall) -> Iterator[bytes]:
    events = _Events()
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield events.new("response.created", response=begun)
    yield events.new("response.in_progress", response=begun)
    for index, item in enumerate(_objects(response, "output")):
        at = {"output_index": index, "item_id": item.get("id")}
        parts = _objects(item, "content")
        empty = {**item, "status": "in_progress"}
        if item.get("type") == "message":
            empty["content"] = []
        elif "arguments" in item:
            empty["arguments"] = ""
        yield events.new("response.output_item.added", output_index=index, item=empty)
        for number, part in enumerate(parts if item.get("type") == "message" else ()):
            name = "refusal" if part.get("type") == "refusal" else "text"
            kind = "response.refusal" if name == "refusal" else "response.output_text"
            here, text = {**at, "content_index": number}, part.get(name, "")
            yield events.new("response.content_part.added", **here, part={**part, name: ""})
            yield events.new(f"{kind}.delta", **here, delta=text, logprobs=[])
            yield events.new(f"{kind}.done", **here, **{name: text}, logprobs=[])
            yield events.new("response.content_part.done", **here, part=part)
        if "arguments" in item:
            yield events.new("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield events.new(
                "response.function_call_arguments.done", **at, arguments=item["arguments"], name=item.get("name")
            )
        yield events.new("response.output_item.done", output_index=index, item=item)
    yield events.new(f"response.{response.get('status') or 'completed'}", response=response)


class _Events:
    """Makes events with their numbers."""

    def __init__(self) -> None:
        self._number = -1

    def new(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _response_event(kind, self._number, **fields)


def _response_event(kind: str, number: int, **fields: Any) -> bytes:
    return named(json.dumps({"type": kind, "sequence_number": number, **fields}).encode())[1]


def _error_event(error: ApiError, number: int = 0) -> bytes:
    fields = _without(error.openai_error(), "type")
    return b"event: error\ndata: %b\n\n" % json.dumps({"type": "error", "sequence_number": number, **fields}).encode()


CHAT: Final = Format(
    dialect=n.OPENAI_CHAT,
    task="chat",
    request_id_header=REQUEST_ID_HEADER,
    ping=HEARTBEAT,
    read=_read_chunk,
    events_of=_chunks_of,
    error_event=lambda error, id: _data(error.openai_body()),
    ends=_ended_by,
    closing=DONE,
)
RESPONSES: Final = Format(
    dialect=n.OPENAI_RESPONSES,
    task="responses",
    request_id_header=REQUEST_ID_HEADER,
    ping=HEARTBEAT,
    read=_read_response_event,
    events_of=_events_of,
    error_event=lambda error, id: _error_event(error),
)
EMBEDDINGS: Final = replace(CHAT, dialect=n.OPENAI_EMBEDDINGS, task="embeddings")  # they have no streams


# ---- responses -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ResponsePaths:
    """The handlers of `/v1/responses` and of the paths below it. All of them raise ApiError, LanekeeperError."""

    awaited: AwaitedCalls
    requests: SubmittedRequests
    bodies: Bodies
    answers: StoredAnswers
    _: KW_ONLY
    ping_every_s: float

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        return {
            ("POST", RESPONSES_PATH): self._post,
            ("GET", RESPONSE_PATH): self._get,
            ("DELETE", RESPONSE_PATH): self._delete,
            ("POST", f"{RESPONSE_PATH}/cancel"): self._cancel,
        }

    async def _post(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        request[ABOUT_REQUEST] = id = submitted_id_of(request.headers)
        format = self.awaited.format
        try:
            async with self.bodies.checked_call(
                request, caller, request_id=id, task=format.task, dialect=format.dialect
            ) as checked:
                call = await self._following(checked, caller)
                if not call.is_background:
                    return await self.awaited.answer_checked(request, call, caller)
                await self.requests.submit(call, caller)
                is_streamed = call.stream
        except LanekeeperError as error:
            raise api_error_of(error, chose_id=IDEMPOTENCY_KEY in request.headers) from error
        if is_streamed:
            return await self._stream(request, id, caller, after=0)
        return await self._send(request, await self._found(id, caller), caller)

    async def _get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        id = _id_in(request)
        if request.query.get("stream") == "true":
            return await self._stream(request, id, caller, after=_starting_after(request) + 1)
        return await self._send(request, await self._found(id, caller), caller)

    async def _cancel(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        found = await self._found(_id_in(request), caller)
        if found.known.found.completion is None and await self.requests.cancel(found.known.id, caller) != "ended":
            return self._json(found, found.unfinished("cancelled"))
        return await self._send(request, await self._found(found.known.id, caller), caller)

    async def _delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        found = await self._found(_id_in(request), caller)
        await self.requests.cancel(found.known.id, caller)
        await self.requests.forget(found.known.id, caller)
        return self._json(found, {"id": found.id, "object": "response", "deleted": True})

    async def _following(self, call: CheckedCall, caller: GatewayKey) -> CheckedCall:
        """The provider does not know the ids of responses in the background, so it gets its own."""
        if call.previous is None:
            return call
        try:
            found = await self._found(call.previous.removeprefix(_PREFIX), caller)
        except ApiError as error:
            if error.status != 404:
                raise
            return call
        ended = found.known.found.completion
        if ended is None or ended.status != "ok":
            raise ApiError(400, f"previous_response_id: {call.previous[:100]!r} has no answer")
        async with self._body_of(ended, caller) as body:
            previous = json.loads(body).get("id")
        return await asyncio.to_thread(_continuing, call, previous)

    async def _found(self, id: str, caller: GatewayKey) -> _StoredResponse:
        """Raises ApiError 404."""
        try:
            known = await self.requests.known(id, caller)
            first = await self.requests.first_entry(id, caller)
        except ApiError as error:
            raise _unknown(id) if error.status == 404 else error from None
        if first.get("dialect") != n.OPENAI_RESPONSES:
            raise _unknown(id)
        return _StoredResponse(known, str(first.get("model")))

    def _json(self, found: _StoredResponse, response: Mapping[str, Any]) -> web.StreamResponse:
        return web.Response(
            body=encoded(response),
            headers={"content-type": JSON, "cache-control": "no-store", REQUEST_ID_HEADER: found.known.id},
        )

    async def _send(self, request: web.Request, found: _StoredResponse, caller: GatewayKey) -> web.StreamResponse:
        async with self._whole(found, caller) as response:
            return self._json(found, response)

    @asynccontextmanager
    async def _whole(self, found: _StoredResponse, caller: GatewayKey) -> AsyncIterator[dict[str, Any]]:
        """The response as it is now."""
        ended = found.known.found.completion
        if ended is None or ended.status != "ok":
            yield found.unfinished(_STATUSES.get(word_of(found.known, LARGEST_NUMBER), "queued"))
        else:
            async with self._body_of(ended, caller) as body:
                yield found.answered(body)

    @asynccontextmanager
    async def _body_of(self, ended: Completion, caller: GatewayKey) -> AsyncIterator[bytes]:
        if (kept := body_address_in(ended.headers)) is None:
            yield ended.body
            return
        async with self.answers.in_memory(kept, caller.tenant) as body:
            yield body

    async def _stream(self, request: web.Request, id: str, caller: GatewayKey, *, after: int) -> web.StreamResponse:
        found = await self._found(id, caller)
        request[ABOUT_REQUEST] = id
        writing = event_stream(request, id, id_header=REQUEST_ID_HEADER)
        try:
            async with (
                self.requests.poller.following(caller),
                background_task(writing.pings(HEARTBEAT, every_s=self.ping_every_s), name=f"heartbeats {id}"),
                aclosing(self.requests.entries(id, caller, after=after)) as entries,
            ):
                has_content = after > 1
                async for entry in entries:
                    if not isinstance(entry, Entry):
                        await self._write_end(writing, id, caller, number=entry.number - 1)
                    elif entry.kind == RESTART and has_content:
                        await writing.write(_error_event(_BEGUN_AGAIN, entry.number - 1))
                        break
                    else:
                        await writing.write(found.event(entry))
                        has_content = has_content or entry.kind == EVENT
        except ConnectionError:
            return writing.response
        except (ApiError, LanekeeperError) as error:
            if not writing.has_begun:
                raise
            await writing.write(_error_event(api_error_of(error)))
        return await writing.end()

    async def _write_end(self, writing: Writing, id: str, caller: GatewayKey, *, number: int) -> None:
        async with self._whole(await self._found(id, caller), caller) as response:
            if f"response.{response['status']}" in _ENDS:
                await writing.write(_response_event(f"response.{response['status']}", number, response=response))


def _continuing(call: CheckedCall, previous: object) -> CheckedCall:
    name = "previous_response_id"
    if isinstance(file := call.body, bytes):
        return replace(call, body=with_field(file, name, previous))
    body = with_field(file.read(), name, previous)
    file.seek(0)
    file.write(body)
    file.truncate()
    file.seek(0)
    return replace(call, sha256=hashlib.sha256(body).hexdigest())


_BEGUN_AGAIN: Final = ApiError(
    500, "an attempt failed in the middle of the answer, and another one follows: stream the response from its start"
)


def _unknown(id: str) -> ApiError:
    """In OpenAI's words."""
    return ApiError(404, f"Response with id '{_PREFIX}{id[:100]}' not found.")


def _id_in(request: web.Request) -> str:
    given = request.match_info["id"]
    id = given.removeprefix(_PREFIX)
    if id == given:
        raise _unknown(id)
    request[ABOUT_REQUEST] = id
    return id


def _starting_after(request: web.Request) -> int:
    text = request.query.get("starting_after", "-1")
    if text != "-1" and not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ApiError(400, f"starting_after: found {text[:20]!r}, allowed is an event's sequence_number")
    return int(text)


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """A response in the background, as the store knows it."""

    known: Known
    model: str

    @property
    def id(self) -> str:
        return _PREFIX + self.known.id

    def answered(self, body: bytes) -> dict[str, Any]:
        """The provider's response."""
        return {**json.loads(body), "id": self.id, "background": True}

    def unfinished(self, status: str) -> dict[str, Any]:
        """One without an answer."""
        submission, ended = self.known.submission, self.known.found.completion
        error = None
        if ended is not None and end_of(ended) == "failed":
            problem = Problem(json.loads(ended.body))
            code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
            error = {"code": code, "message": detail_of(problem)}
        return {
            "id": self.id,
            "object": "response",
            "created_at": 0 if submission is None else submission.submitted_ms // 1000,
            "status": status,
            "background": True,
            "error": error,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }

    def event(self, entry: Entry) -> bytes:
        """The event of its stream for an entry, if there is one: the last comes with the outcome."""
        number = entry.number - 1
        if entry.kind == QUEUED:
            return _response_event("response.created", number, response=self.unfinished("queued"))
        if entry.kind != EVENT:
            return b""
        event = jiter.from_json(entry.body)
        kind = str(event.pop("type", ""))
        if kind == "response.created" or kind in _ENDS:
            return b""
        if isinstance(event.get("response"), dict):
            event["response"] |= {"id": self.id, "background": True}
        return _response_event(kind, number, **_without(event, "sequence_number"))
