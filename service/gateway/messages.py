"""`POST /v1/messages`: one call, from its body to the last byte of its answer.

A streamed answer is the provider's events, unchanged and in their order. The first events (`message_start`, the start
of a block) are held back until the first piece of the answer's content comes, so that the client does not notice an
attempt that fails before that. After that, a failed attempt ends the stream with an `error` event, because events that
a client has read cannot be withdrawn. `message_stop` is held back until a worker has stored the request's outcome.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any

from aiohttp import web

from lanekeeper import Client, Final
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError, ReplyLost
from lanekeeper.replies import Part
from service.config.settings import GatewayKey
from service.gateway.answers import StoredAnswers, event_stream, send_pieces
from service.gateway.calls import IDEMPOTENCY_KEY, Bodies, CheckedCall, request_id_of
from service.gateway.problems import ABOUT_REQUEST, ApiError, api_error_of
from service.side_tasks import beside

REPLY_HEADERS_SENT = (n.LANE_NAME, n.MODEL, n.PROVIDER, n.ATTEMPT, n.WAIT_MS, n.RUN_MS, n.WAIT_FROM, n.REPLAYED)
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_FIRST = frozenset({"message_start", "content_block_start", "ping"})
_LAST = "message_stop"
_LOST = "parts of the answer were lost"
_HELD_BYTES = 64 * 1024
"""How much of a stream is held back at most before the content of the answer begins."""
_TYPE = b'{"type":"'
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


@dataclass(slots=True)
class Messages:
    """Publishes each call as a request to its lane, waits for the answer, and sends it whole or as a stream."""

    client: Client
    bodies: Bodies
    answers: StoredAnswers
    _: KW_ONLY
    ping_every_s: float

    async def answer(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """If the HTTP client disconnects, aiohttp cancels this coroutine, and `Client` then cancels the request. Raises
        ApiError, LanekeeperError."""
        request[ABOUT_REQUEST] = id = request_id_of(request.headers)
        try:
            async with self.bodies.checked_call(request, caller, request_id=id) as call:
                if call.stream:
                    return await self._streamed(request, call, caller)
                final = await self.client.request(call.body, key=call.key, timeout_s=call.timeout_s, **call.options)
                return await self._whole(request, final, id, caller)
        except LanekeeperError as error:
            raise api_error_of(error, chose_id=IDEMPOTENCY_KEY in request.headers) from error

    async def _whole(
        self, request: web.Request, final: Final, request_id: str, caller: GatewayKey
    ) -> web.StreamResponse:
        headers = {name: _text(final.headers[name]) for name in REPLY_HEADERS_SENT if name in final.headers}
        headers |= {"content-type": "application/json", "cache-control": "no-store", "request-id": request_id}
        if (kept := final.kept) is None:
            return web.Response(body=final.body, headers=headers)
        async with self.answers.fetched(kept, caller.tenant) as answer:
            return await send_pieces(request, answer.pieces(), size=answer.size, headers=headers)

    async def _replies(self, call: CheckedCall, forwarding: Forwarding) -> AsyncGenerator[Part | Final, None]:
        """The replies to a streamed call. If their connection is lost before something was written to the client, ask
        again under the same id, else cancel the request, because its caller has to send it again."""
        while True:
            if not isinstance(call.body, bytes):
                await asyncio.to_thread(call.body.seek, 0)
            try:
                async with aclosing(
                    self.client.stream(call.body, key=call.key, timeout_s=call.timeout_s, **call.options)
                ) as replies:
                    async for reply in replies:
                        yield reply
                    return
            except ReplyLost:
                try:
                    forwarding.lost()
                except ApiError:
                    self.client.abandon(call.request.id, call.options)
                    raise

    async def _streamed(self, request: web.Request, call: CheckedCall, caller: GatewayKey) -> web.StreamResponse:
        id, forwarding = call.request.id, Forwarding()
        writing = event_stream(request, id)
        async with (
            aclosing(self._replies(call, forwarding)) as replies,
            beside(writing.pings(PING, every_s=self.ping_every_s), name=f"pings {id}"),
        ):
            try:
                async for reply in replies:
                    if isinstance(reply, Part):
                        await writing.write(forwarding.part(reply))
                    elif (end := forwarding.end()) is not None:
                        await writing.write(end)
                    elif (kept := reply.kept) is None:
                        await writing.write(b"".join(events_of(reply.message)))
                    else:
                        made = self.answers.converted(kept, caller.tenant, lambda body: events_of(json.loads(body)))
                        async with made as answer:
                            await writing.write_all(answer.pieces())
            except ConnectionError:
                return writing.response  # `replies` is then closed, which cancels the request
            except (ApiError, LanekeeperError) as error:
                if not writing.has_begun:
                    raise
                told = api_error_of(error, chose_id=IDEMPOTENCY_KEY in request.headers)
                await writing.write(b"event: error\ndata: %b\n\n" % told.body(id))
            return await writing.end()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Forwarding:
    """Turns the parts of a streamed answer into the Server-Sent Events to write to the client."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._has_begun = False
        self._next_seq = 0
        self._has_gap = False
        self._stop: bytes | None = None

    def part(self, part: Part) -> bytes:
        """The bytes to write now, which may be none. Raises ApiError if the client has events of an answer that a
        worker has begun anew."""
        if part.kind == "restart":
            self._start_over("an attempt failed in the middle of the answer, and another one has begun")
            self._next_seq = 1
            return b""
        if part.seq != self._next_seq and not self._has_gap:
            self._start_over(_LOST)
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
        """The bytes that end the stream; None if parts were lost, or none came, before anything was written: the whole
        stream is then made from the final reply (`events_of`). Raises ApiError if something was written."""
        if self._stop is not None and not self._has_gap:
            return self._stop
        self._start_over(_LOST)
        return None

    def lost(self) -> None:
        """The parts will come again from the first. Raises ApiError if something was written."""
        self._start_over(_LOST)
        self._next_seq = 0

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
    """The `type` of a provider's event. It is usually the first field, and is then found without parsing the JSON."""
    if event.startswith(_TYPE) and (end := event.find(b'"', len(_TYPE))) > 0 and b"\\" not in event[:end]:
        return event[len(_TYPE) : end].decode(errors="replace")
    return str(json.loads(event).get("type"))


def _event(kind: str, data: bytes) -> bytes:
    if b"\n" in data or b"\r" in data:  # a line break would end the `data` field
        data = json.dumps(json.loads(data)).encode()
    if not kind.isidentifier():
        kind = "unknown"
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def events_of(message: dict[str, Any]) -> Iterator[bytes]:
    """The Server-Sent Events that stream a complete Message, with one delta for the content of each block."""
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
    """What a block's `content_block_start` event contains, and the deltas that follow: none for an unknown type."""
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
    return _event(kind, json.dumps({"type": kind, **fields}).encode())
