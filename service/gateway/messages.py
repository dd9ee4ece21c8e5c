"""Anthropic's own paths. `POST /v1/messages`: one call, from its body to the last byte of its answer. The calls of
OpenAI's clients take the same way, with other formats (`openai.py`).

A streamed answer is the provider's events, unchanged and in their order. The first events (`message_start`, the start
of a block) are held back until the first piece of the answer's content comes, so that the client does not notice an
attempt that fails before that. After that, a failed attempt ends the stream with an `error` event, because events that
a client has read cannot be withdrawn. `message_stop` is held back until a worker has stored the request's outcome.

`POST /v1/messages/count_tokens` and `GET /v1/models` are passed to the provider without a lane: they change nothing and
cost no tokens (`accounts.py`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

import jiter
from aiohttp import web

from consumers.background import background_task
from consumers.failures import ProviderError
from consumers.providers.anthropic import LookedUp
from lanekeeper import Client, Final
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError, ProviderFailure, ReplyLost
from lanekeeper.replies import Part
from service.config.settings import GatewayKey, Settings
from service.gateway.access import require_allowed_model
from service.gateway.accounts import Accounts, listed, not_called, passed_headers
from service.gateway.answers import StoredAnswers, event_stream, in_one_line, send_pieces
from service.gateway.calls import (
    IDEMPOTENCY_KEY,
    MESSAGES,
    Bodies,
    CheckedCall,
    limit_of,
    page_in,
    provider_headers_of,
    request_id_of,
)
from service.gateway.files import FilePaths
from service.gateway.problems import ABOUT_REQUEST, JSON, ApiError, answer, api_error_of, is_openai, passed_on
from service.gateway.shares import SharedLimit
from topology.codec import bounds
from topology.codec.decoding import too_large
from topology.codec.file_ids import MAY_NAME, named_in

REPLY_HEADERS_SENT = (
    n.LANE_NAME,
    n.MODEL,
    n.PROVIDER,
    n.PROVIDER_REQUEST_ID,
    n.STOP_REASON,
    n.ATTEMPT,
    n.WAIT_MS,
    n.RUN_MS,
    n.WAIT_FROM,
    n.REPLAYED,
)
PING = b'event: ping\ndata: {"type": "ping"}\n\n'

_FIRST = frozenset({"message_start", "content_block_start", "ping"})
_LAST = "message_stop"
_ALWAYS_THERE = ("stop_reason", "stop_sequence")
_ENDS = (*_ALWAYS_THERE, "stop_details", "container")
"""Of the Message, what `message_delta` tells."""
_LOST = "parts of the answer were lost"
_FAILED = "an attempt failed in the middle of the answer"
_HELD_BYTES = 64 * 1024
_TYPED = re.compile(rb'\{"type": ?"([\w.]+)"')
"""The beginning of an event whose type can be its name; OpenAI's have dots."""
_NAME = re.compile(r"[\w.]+", re.ASCII)
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
MODEL = "/v1/models/{id}"
AT_A_TIME = 32
"""Without a limit, one tenant could take all connections to the provider. A low one is enough: each call is answered in
less than a second."""
PAGE = 20
PAGE_AT_MOST = 1000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


class StreamStage(Enum):
    """Where in a streamed answer an event is."""

    BEFORE = "before the first piece of the content"
    CONTENT = "content"
    LAST = "the last event"
    """In chat completions: of one choice, or of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a dialect's answers are sent. `task`: the word for it in routing keys."""

    dialect: str
    task: str
    request_id_header: str
    ping: bytes
    """What keeps the connection of a stream open."""
    read: Callable[[bytes], tuple[StreamStage, bytes]]
    """The stage of a part, and its Server-Sent Event."""
    events_of: Callable[[dict[str, Any], CheckedCall], Iterator[bytes]]
    """The Server-Sent Events that stream a complete answer."""
    error_event: Callable[[ApiError, str], bytes]
    """The event that ends a stream, for an error and the id of the request."""
    ends: Callable[[bytes], Collection[object]] = lambda part: (0,)
    """The choices that a part ends whose stage is `LAST`."""
    closing: bytes = b""
    """What follows the last event."""


@dataclass(slots=True)
class AwaitedCalls:
    """Publishes each call as a request to its lane, waits for the answer, and sends it whole or as a stream."""

    client: Client
    bodies: Bodies
    answers: StoredAnswers
    _: KW_ONLY
    format: Format
    ping_every_s: float

    async def answer(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Cancelled if the client disconnects; `Client` then cancels the request. Raises ApiError, LanekeeperError."""
        request[ABOUT_REQUEST] = id = request_id_of(request.headers)
        try:
            task, dialect = self.format.task, self.format.dialect
            async with self.bodies.checked_call(request, caller, request_id=id, task=task, dialect=dialect) as call:
                return await self.answer_checked(request, call, caller)
        except LanekeeperError as error:
            raise api_error_of(error, chose_id=IDEMPOTENCY_KEY in request.headers) from error

    async def answer_checked(self, request: web.Request, call: CheckedCall, caller: GatewayKey) -> web.StreamResponse:
        if call.stream:
            return await self._streamed(request, call, caller)
        final = await self.client.request(call.body, key=call.key, timeout_s=call.timeout_s, **call.options)
        return await self._whole(request, final, call.request.id, caller)

    async def _whole(
        self, request: web.Request, final: Final, request_id: str, caller: GatewayKey
    ) -> web.StreamResponse:
        headers = {name: _text(final.headers[name]) for name in REPLY_HEADERS_SENT if name in final.headers}
        headers |= {"content-type": JSON, "cache-control": "no-store", self.format.request_id_header: request_id}
        if (kept := final.kept) is None:
            return web.Response(body=final.body, headers=headers)
        async with self.answers.fetched(kept, caller.tenant) as answer:
            return await send_pieces(request, answer.pieces(), size=answer.size, headers=headers)

    async def _replies(self, call: CheckedCall, forwarding: Forwarding) -> AsyncGenerator[Sequence[Part | Final], None]:
        """If they are lost before the client got a byte, ask again under the same id; else cancel the request."""
        while True:
            if not isinstance(call.body, bytes):
                await asyncio.to_thread(call.body.seek, 0)
            try:
                async with aclosing(
                    self.client.streamed(call.body, key=call.key, timeout_s=call.timeout_s, **call.options)
                ) as replies:
                    async for came in replies:
                        yield came
                    return
            except ReplyLost:
                try:
                    forwarding.lost()
                except ApiError:
                    self.client.abandon(call.request.id, call.options)
                    raise

    async def _streamed(self, request: web.Request, call: CheckedCall, caller: GatewayKey) -> web.StreamResponse:
        id, format = call.request.id, self.format
        forwarding = Forwarding(format, choices=call.choices)
        writing = event_stream(request, id, id_header=format.request_id_header)
        async with (
            aclosing(self._replies(call, forwarding)) as replies,
            background_task(writing.pings(format.ping, every_s=self.ping_every_s), name=f"pings {id}"),
        ):
            try:
                async for came in replies:
                    found = came if forwarding.has_begun else _since_restart(came)
                    await writing.write(b"".join([forwarding.part(part) for part in found if isinstance(part, Part)]))
                    if not isinstance(reply := came[-1], Final):
                        continue
                    if (end := forwarding.end(_choices_of(reply, call))) is not None:
                        await writing.write(end + format.closing)
                    elif (kept := reply.kept) is None:
                        await writing.write(b"".join(format.events_of(reply.message, call)))
                    else:
                        made = self.answers.converted(
                            kept, caller.tenant, lambda body: format.events_of(json.loads(body), call)
                        )
                        async with made as answer:
                            await writing.write_all(answer.pieces())
            except ConnectionError:
                return writing.response  # `replies` is then closed, which cancels the request
            except (ApiError, LanekeeperError) as error:
                if not writing.has_begun:
                    raise
                told = api_error_of(error, chose_id=IDEMPOTENCY_KEY in request.headers)
                await writing.write(format.error_event(told, id))
            return await writing.end()


def _since_restart(came: Sequence[Part | Final]) -> Sequence[Part | Final]:
    """Without the parts of an attempt that failed before any of them was written."""
    restarts = (at for at, each in enumerate(came) if isinstance(each, Part) and each.kind == "restart")
    return came[max(restarts, default=0) :]


def _choices_of(reply: Final, call: CheckedCall) -> int:
    """A provider may give fewer than the call asked for."""
    return 1 if call.choices == 1 or reply.kept is not None else len(reply.message.get("choices") or ())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Forwarding:
    """Turns the parts of a streamed answer into the Server-Sent Events to write to the client."""

    def __init__(self, format: Format, *, choices: int = 1) -> None:
        self._read = format.read
        self._ends = format.ends
        self._choices = choices
        self._ended: set[object] = set()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.has_begun = False
        self._next_seq = 0
        self._has_gap = False
        self._stop: bytes | None = None

    def part(self, part: Part) -> bytes:
        if part.kind == "restart":
            self._start_over(_FAILED, part.failure)
            self._next_seq = 1
            return b""
        if part.seq != self._next_seq and not self._has_gap:
            self._start_over(_LOST)
            self._has_gap = True  # the whole answer is sent at the end, from the final reply
        self._next_seq = part.seq + 1
        if self._has_gap:
            return b""
        stage, event = self._read(part.body)
        if self.has_begun and stage is StreamStage.CONTENT and self._stop is None:
            return event
        if stage is StreamStage.LAST:
            self._ended.update(self._ends(part.body))
        if self._stop is not None:
            self._stop += event
            return b""
        if stage is StreamStage.LAST and len(self._ended) >= self._choices:
            self._stop = event
            return self._release()
        self._held.append(event)
        self._held_bytes += len(event)
        if not self.has_begun and stage is StreamStage.BEFORE and self._held_bytes < _HELD_BYTES:
            return b""
        return self._release()

    def end(self, choices: int = 1) -> bytes | None:
        """None: the stream is to be made from the final reply (`events_of`). Raises ApiError if some was written."""
        if len(self._ended) >= choices and not self._has_gap:
            return self._stop or b""
        self._start_over(_LOST)
        return None

    def lost(self) -> None:
        self._start_over(_LOST)
        self._next_seq = 0

    def _release(self) -> bytes:
        self.has_begun = True
        events, self._held = b"".join(self._held), []
        return events

    def _start_over(self, why: str, failure: ProviderFailure | None = None) -> None:
        if self.has_begun:
            raise passed_on(failure) or ApiError(529, f"{why}; send the request again")
        self._held.clear()
        self._held_bytes = 0
        self._stop = None
        self._ended.clear()
        self._has_gap = False


def named(data: bytes) -> tuple[str, bytes]:
    """The `type` of a provider's event, and the event as a Server-Sent Event of this name. The type is usually the
    first field, and is then found without parsing the JSON."""
    data = in_one_line(data)
    found = _TYPED.match(data)
    name = found[1].decode() if found else _type_in(data)
    return name, b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _type_in(data: bytes) -> str:
    kind = str(json.loads(data).get("type"))
    return kind if _NAME.fullmatch(kind) else "unknown"


def read_event(data: bytes) -> tuple[StreamStage, bytes]:
    """`Format.read` of Messages."""
    name, event = named(data)
    return StreamStage.LAST if name == _LAST else StreamStage.BEFORE if name in _FIRST else StreamStage.CONTENT, event


def events_of(message: dict[str, Any]) -> Iterator[bytes]:
    """The Server-Sent Events that stream a complete Message, with one delta for the content of each block."""
    blocks = message.get("content", [])
    ends = {name: message.get(name) for name in _ENDS if name in message or name in _ALWAYS_THERE}
    yield _new_event("message_start", message={**message, "content": [], **dict.fromkeys(ends)})
    for index, block in enumerate(blocks):
        start, deltas = _split_block(block)
        yield _new_event("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _new_event("content_block_delta", index=index, delta=delta)
        yield _new_event("content_block_stop", index=index)
    yield _new_event("message_delta", delta=ends, usage=message.get("usage") or {})
    yield _new_event(_LAST)


def _split_block(block: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Its start, and its deltas; none if it is no block that has any, whatever the provider meant by it."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("tool_use", "server_tool_use"):
        piece = json.dumps(block.get("input", {}), ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece}]
    if not isinstance(kind, str) or kind not in _DELTAS:
        return block, []
    delta, field = _DELTAS[kind]
    start: dict[str, Any] = {**block, field: ""}
    deltas: list[dict[str, Any]] = [{"type": delta, field: block.get(field, "")}]
    if "signature" in block:
        start["signature"] = ""
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    if isinstance(citations := start.pop("citations", None), list) and citations:
        start["citations"] = []
        deltas += [{"type": "citations_delta", "citation": citation} for citation in citations]
    return start, deltas


def _new_event(kind: str, **fields: Any) -> bytes:
    return named(json.dumps({"type": kind, **fields}).encode())[1]


FORMAT = Format(
    dialect=n.ANTHROPIC_MESSAGES,
    task=MESSAGES,
    request_id_header="request-id",
    ping=PING,
    read=read_event,
    events_of=lambda message, call: events_of(message),
    error_event=lambda error, id: b"event: error\ndata: %b\n\n" % in_one_line(error.body(id)),
)


# ---- count_tokens and models -----------------------------------------------------------------------------------------


class LookupPaths:
    """Handles `count_tokens` and `models`. Answers 501 if the settings of this process contain no provider's key."""

    def __init__(self, settings: Settings, bodies: Bodies, accounts: Accounts, files: FilePaths) -> None:
        self._bodies = bodies
        self._accounts = accounts
        self._files = files
        self._values = settings.json_values
        self._tenant_models = settings.models.tenants
        self._places = SharedLimit(AT_A_TIME, "calls for tokens and models")

    def handlers(self) -> Mapping[tuple[str, str], Callable[[web.Request, GatewayKey], Awaitable[web.Response]]]:
        return {("POST", COUNT_TOKENS): self._count_tokens, ("GET", MODELS): self._models, ("GET", MODEL): self._model}

    async def _count_tokens(self, request: web.Request, caller: GatewayKey) -> web.Response:
        allowed = self._allowed(caller)
        files: Sequence[str] = ()

        def check(body: bytes) -> None:
            nonlocal files
            if (excess := bounds.excess(body, max_values=self._values)) is not None:
                raise too_large(excess)
            if allowed is not None:
                require_allowed_model(allowed, _model_in(body))
            if MAY_NAME.search(body):
                files = named_in(_object_in(body))

        async with self._bodies.in_memory(request, caller, check=check) as body:
            provider = await self._files.provider_of(files, caller)
            return _response(await self._call_provider(request, caller, body=body, provider=provider))

    async def _models(self, request: web.Request, caller: GatewayKey) -> web.Response:
        if is_openai(request):
            return answer({"object": "list", "data": await self._openai_models(caller)})
        allowed = self._allowed(caller)
        if allowed is None:
            return _response(await self._call_provider(request, caller))
        limit = limit_of(request.query, PAGE, 1, PAGE_AT_MOST)
        found = await self._call_provider(request, caller, query={"limit": str(PAGE_AT_MOST)})
        body = page_of(found.body, allowed, request.query, limit) if found.status == 200 else None
        return _response(found, body=body)

    async def _model(self, request: web.Request, caller: GatewayKey) -> web.Response:
        id, allowed = request.match_info["id"], self._allowed(caller)
        if is_openai(request):
            found = next((model for model in await self._openai_models(caller) if model["id"] == id), None)
            if found is None:
                message = f"The model `{id[:100]}` does not exist or you do not have access to it."
                raise ApiError(404, message, code="model_not_found")
            return answer(dict(found))
        if _ID.fullmatch(id) is None or (allowed is not None and id not in allowed):
            raise ApiError(404, f"model: {id[:100]}")
        return _response(await self._call_provider(request, caller))

    async def _openai_models(self, caller: GatewayKey) -> list[Mapping[str, Any]]:
        allowed = self._allowed(caller)
        with self._places.taken(caller.tenant):
            self._accounts.count(caller)
            try:
                models = await self._accounts.openai_models()
            except ProviderError as error:
                raise not_called(error) from error
        return [model for model in models if allowed is None or model["id"] in allowed]

    def _allowed(self, caller: GatewayKey) -> list[str] | None:
        of_tenant = self._tenant_models.get(caller.tenant or "")
        both = [frozenset(models) for models in (caller.models, of_tenant) if models is not None]
        return sorted(frozenset.intersection(*both)) if both else None

    async def _call_provider(
        self,
        request: web.Request,
        caller: GatewayKey,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        provider: str | None = None,
    ) -> LookedUp:
        account = self._accounts.of(provider)
        headers = provider_headers_of(request.headers)
        with self._places.taken(caller.tenant):
            self._accounts.count(caller)
            try:
                return await account.call(request.path, body=body, query=query or request.query, headers=headers)
            except ProviderError as error:
                raise not_called(error) from error


def _object_in(body: bytes) -> dict[str, Any]:
    """Raises ApiError, also where a key is there twice: the provider could read the other one."""
    try:
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, "body: not a JSON object in UTF-8, or a key is there twice")
    return found


def _model_in(body: bytes) -> str:
    model = _object_in(body).get("model")
    if not isinstance(model, str):
        raise ApiError(400, "model: a string is required")
    return model


def _response(found: LookedUp, *, body: bytes | None = None) -> web.Response:
    headers = {**passed_headers(found.headers), "content-type": "application/json"}
    return web.Response(status=found.status, body=found.body if body is None else body, headers=headers)


def page_of(body: bytes, allowed: Collection[str], query: Mapping[str, str], limit: int) -> bytes:
    """One page of the whole list in `body`, of what is `allowed`, as Anthropic pages it. Raises ApiError."""
    models = [model for model in listed(body) if model["id"] in allowed]
    try:
        where, has_more = page_in([model["id"] for model in models], query, limit)
    except KeyError as unknown:
        raise ApiError(404, f"model: {unknown.args[0][:100]}") from None
    page = models[where]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json.dumps({"data": page, "has_more": has_more, "first_id": first, "last_id": last}).encode()
