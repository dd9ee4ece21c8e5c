"""The simulated API with a bill, and with the faults that only tests need, besides the five that users have.

They are in markers, in `SimulatedOptions.faults`, and `api.batches.fail("create", "reset")` lets the next call of an
endpoint of batches fail.
"""

import asyncio
import json
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from aiohttp import web

from service.simulated import messages
from service.simulated.app import SimulatedAPI
from service.simulated.batches import NEVER_S, SimulatedBatch, SimulatedBatches, SimulatedItem
from service.simulated.faults import MID_STREAM, REFUSED, Fault, Faults, Refusal, event, seconds
from service.simulated.sending import stream_headers
from tests.support.bill import Ledger

_REFUSED: Final[Mapping[str, tuple[int, str]]] = {
    **REFUSED,
    "prompt_too_long": (400, "prompt is too long: 1000001 tokens > 1000000 maximum"),
    "usage_limit": (400, "You have reached your specified API usage limits. You will regain access on 2026-12-01."),
    "on_hold": (400, "This organization has been disabled."),
    "authentication": (401, "invalid x-api-key"),
    "billing": (402, "Your organization's payment failed."),
    "permission": (403, "Your API key does not have permission to use the specified resource."),
    "not_found": (404, "The requested resource could not be found."),
    "too_large": (413, "Request exceeds the maximum size"),
    "acceleration": (429, "This request would exceed the limit on how fast usage may grow."),
    "spend_limit": (429, "Your organization has reached its monthly API usage threshold."),
    "unavailable": (503, "Service unavailable"),
}

BROKEN: Final[Mapping[str, str]] = {
    "html": "502 with a page of HTML, as from a proxy",
    "hang": "the request is taken, and nothing comes",
    "slow_first_byte": "nothing comes for `delay=` (10s), then the answer",
    "stall": "half of the answer, nothing for `delay=` (1h), then the rest",
    "drip": "the answer byte by byte, each after `delay=` (1s)",
    "cut": "half of the answer, then a clean end of the transfer",
    "truncated": "half of the answer, then the connection closes before the announced end",
    "reset": "a TCP reset, `at=start` or `at=middle` (streamed: middle, else start)",
    "broken_json": "a whole answer (or one event of it) that is not JSON",
    "not_a_message": "200 with JSON that is no Message",
    "unfinished": "a whole Message (or stream) without a stop_reason",
    "refusal": "an answer with the stop_reason `refusal` and `category=` (cyber); `at=middle`: after half a text",
}

IN_BATCHES: Final[Mapping[str, str]] = {
    "expired": "the request expires",
    "no_line": "the results have no line of the request",
    "vanish": "the batch is gone from now on",
}
"""Further faults of batches; live calls are answered."""
_ERROR_CODES: Final = {
    "spend_limit": "enforced_spend_limit_reached",
    "acceleration": "ramp_limit_exceeded",
    "on_hold": "organization_on_hold",
}
_DELAYS_S: Final[Mapping[str, float]] = {"slow_first_byte": 10.0, "stall": 3600.0, "drip": 1.0}
ENDPOINTS: Final = ("create", "retrieve", "list", "cancel", "delete", "results")
_FOREVER_S = 10 * 365 * 86_400.0
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"


class EveryFault(Faults):
    """Reads and chooses all of them."""

    refused = _REFUSED
    others = (MID_STREAM, *BROKEN, *IN_BATCHES)
    parameters = ("retry_after", "type", "delay", "at", "category")

    def refusal(self, fault: Fault) -> Refusal | None:
        refusal = super().refusal(fault)
        if refusal is not None and (code := _ERROR_CODES.get(fault.name)):
            refusal.details = {"error_code": code}
            if fault.name == "spend_limit" and "retry_after" not in fault.given:
                refusal.headers = {}
        return refusal


class _Html(Exception):
    pass


async def before_answering(request: web.BaseRequest, fault: Fault, *, streamed: bool) -> None:
    """What a fault that is no error answer does instead of an answer, or before it."""
    match fault.name:
        case "html":
            raise _Html
        case "hang":
            await asyncio.sleep(_FOREVER_S)
            _break_off()
        case "slow_first_byte":
            await asyncio.sleep(_delay_s(fault))
        case "reset" if fault.given.get("at") == "start" or ("at" not in fault.given and not streamed):
            await reset(request)


def _delay_s(fault: Fault) -> float:
    return seconds(fault.given["delay"]) if "delay" in fault.given else _DELAYS_S.get(fault.name, 0.0)


def html(headers: Mapping[str, str]) -> web.Response:
    """502 with HTML, as a proxy sends it that cannot reach the API."""
    return web.Response(status=502, body=_HTML, headers={**headers, "content-type": "text/html"})


async def send_broken(
    request: web.BaseRequest, message: bytes, *, headers: Mapping[str, str], fault: Fault
) -> web.StreamResponse:
    """Send an answer (`message`: its JSON) as one body."""
    headers = {**headers, "content-type": "application/json"}
    match fault.name:
        case "broken_json":
            message = message[: len(message) // 2]
        case "not_a_message":
            message = b'{"ok": true}'
        case "unfinished":
            message = json.dumps({**json.loads(message), "stop_reason": None}).encode()
        case "cut":
            return await _send(request, [message[: len(message) // 2]], headers=headers, fault=None)
        case "stall" | "drip" | "truncated" | "reset":
            half = len(message) // 2
            headers["content-length"] = str(len(message))
            return await _send(request, [message[:half], message[half:]], headers=headers, fault=fault)
    return web.Response(body=message, headers=headers)


class FaultyBatches(SimulatedBatches):
    """Batches whose requests and endpoints can fail in every way."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.ledger = Ledger()
        self._wanted: defaultdict[str, deque[Fault]] = defaultdict(deque)

    def fail(self, endpoint: str, fault: str) -> None:
        """Let the next call of an endpoint fail; with `x3` the next three."""
        if endpoint not in ENDPOINTS:
            raise ValueError(f"no endpoint {endpoint!r} of batches; there are {', '.join(ENDPOINTS)}")
        found = self._item_faults.read(fault)
        self._wanted[endpoint].extend([found] * (found.times or 1))

    async def _answer(
        self, request: web.BaseRequest, endpoint: str, id: str, body: bytes, request_id: str, headers: dict[str, str]
    ) -> web.StreamResponse:
        if not (wanted := self._wanted[endpoint]):
            return await super()._answer(request, endpoint, id, body, request_id, headers)
        fault = wanted.popleft()
        if (refusal := self._item_faults.refusal(fault)) is not None:
            raise refusal
        try:
            await before_answering(request, fault, streamed=endpoint == "create")
        except _Html:
            return html(headers)
        if fault.name == "vanish" and id:
            self._batches.pop(id, None)
        if endpoint == "results":
            return await send_broken(request, b"".join(self.lines(self.batch(id))), headers=headers, fault=fault)
        answer = await super()._answer(request, endpoint, id, body, request_id, headers)
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        if fault.name == "vanish":
            self._batches.pop(json.loads(answer.body)["id"], None)
        return await send_broken(request, answer.body, headers=headers, fault=fault)

    def _item(self, custom_id: str, params: dict[str, Any], **more: Any) -> SimulatedItem:
        item = super()._item(custom_id, params, **more)
        if item.fault is not None and item.fault.name == "hang":
            item.done_s = NEVER_S
        return item

    def _look_at(self, batch: SimulatedBatch) -> None:
        is_new = batch.ended_s is None
        super()._look_at(batch)
        for item in batch.items if is_new and batch.ended_s is not None else ():
            if item.kind == "succeeded" and item.asked is not None:
                tokens = {"input_tokens": item.asked.input_tokens, "output_tokens": self.output(item.asked).tokens}
                self.ledger.bill_batched(item.asked.model, **tokens)

    def _kind(self, item: SimulatedItem, batch: SimulatedBatch) -> str:
        is_expired = item.fault is not None and item.fault.name == "expired"
        return "expired" if is_expired else super()._kind(item, batch)

    def _line(self, item: SimulatedItem, batch: SimulatedBatch, nth: int) -> bytes:
        line = super()._line(item, batch, nth)
        match item.fault.name if item.fault else "":
            case "broken_json":
                return line[: len(line) // 2] + b"\n"
            case "no_line":
                return b""
        return line


class FaultyAPI(SimulatedAPI):
    """The simulated API with all faults."""

    faults_type = EveryFault
    batches_type = FaultyBatches
    batches: FaultyBatches

    @property
    def ledger(self) -> Ledger:
        return self.batches.ledger

    def count(self, asked: messages.Asked, output: messages.Output) -> None:
        super().count(asked, output)
        self.ledger.bill_live(asked.model, input_tokens=asked.input_tokens, output_tokens=output.tokens)

    async def _answer(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        try:
            return await super()._answer(request, asked, fault, request_id)
        except _Html:
            return html(self._headers(request_id, asked.model))

    def fault(self, asked: messages.Asked) -> Fault | None:
        found = super().fault(asked)
        return None if found is not None and found.name in IN_BATCHES else found

    async def before_answering(self, request: web.BaseRequest, fault: Fault, *, streamed: bool) -> None:
        await super().before_answering(request, fault, streamed=streamed)
        await before_answering(request, fault, streamed=streamed)

    def output(self, asked: messages.Asked, fault: Fault | None) -> messages.Output:
        output = super().output(asked, fault)
        if fault is None or fault.name != "refusal":
            return output
        return refused(
            output, category=fault.given.get("category", "cyber"), has_text=fault.given.get("at") == "middle"
        )

    async def send_message(
        self, request: web.BaseRequest, message: bytes, *, headers: Mapping[str, str], fault: Fault | None
    ) -> web.StreamResponse:
        if fault is None:
            return await super().send_message(request, message, headers=headers, fault=None)
        return await send_broken(request, message, headers=headers, fault=fault)

    async def send_stream(
        self,
        request: web.BaseRequest,
        events: Sequence[bytes],
        *,
        headers: Mapping[str, str],
        pause_s: float,
        fault: Fault | None,
    ) -> web.StreamResponse:
        if fault is None or fault.name == MID_STREAM:
            return await super().send_stream(request, events, headers=headers, pause_s=pause_s, fault=fault)
        events = list(events)
        half = max(1, len(events) // 2)
        match fault.name:
            case "broken_json":
                events[half] = b'event: content_block_delta\ndata: {"type": "content_block_delta", \n\n'
            case "not_a_message":
                events = [event("ping"), b'data: {"ok": true}\n\n']
            case "unfinished":
                del events[-2]
            case "cut":
                del events[half:]
        return await _send(request, events, headers=stream_headers(headers), fault=fault, pause_s=pause_s)


def refused(output: messages.Output, *, category: str, has_text: bool) -> messages.Output:
    """The model stops before it writes anything, or after half of the text."""
    details = {"type": "refusal", "category": category, "explanation": "its prompt asked for that"}
    text = "" if not has_text else output.blocks[-1].get("text", "")
    blocks = ({"type": "text", "text": text[: len(text) // 2]},) if text else ()
    return messages.Output(
        blocks=blocks, stop_reason="refusal", tokens=messages.tokens_of(len(text) // 2), stop_details=details
    )


async def reset(request: web.BaseRequest) -> NoReturn:
    """End a client's connection with a TCP reset."""
    if request.transport is not None:
        connection: socket.socket = request.transport.get_extra_info("socket")
        # With a linger time of zero, closing the socket sends RST.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    _break_off()


async def hang() -> NoReturn:
    """Send nothing until the client has disconnected."""
    await asyncio.sleep(_FOREVER_S)
    _break_off()


async def _send(
    request: web.BaseRequest,
    chunks: Sequence[bytes],
    *,
    headers: Mapping[str, str],
    fault: Fault | None,
    pause_s: float = 0.0,
) -> web.StreamResponse:
    name = fault.name if fault else ""
    delay_s = _delay_s(fault) if fault else 0.0
    response = web.StreamResponse(headers=headers)
    if "content-length" not in headers:
        response.enable_chunked_encoding()
    await response.prepare(request)
    if not pause_s and name not in ("stall", "drip", "truncated", "reset"):
        await response.write(b"".join(chunks))
        await response.write_eof()
        return response
    half = max(1, len(chunks) // 2)
    for nth, chunk in enumerate(chunks):
        if pause_s:
            await asyncio.sleep(pause_s)
        if nth == half:
            match name:
                case "stall":
                    await asyncio.sleep(delay_s)
                case "truncated":
                    _break_off()
                case "reset":
                    await reset(request)
        if name == "drip":
            for at in range(len(chunk)):
                await response.write(chunk[at : at + 1])
                await asyncio.sleep(delay_s)
        else:
            await response.write(chunk)
    await response.write_eof()
    return response


def _break_off() -> NoReturn:
    # When a handler is cancelled, aiohttp's server closes the connection at once.
    raise asyncio.CancelledError
