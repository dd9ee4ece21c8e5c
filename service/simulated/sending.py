"""Sends the simulated API's answers: whole, slowly, or with a fault."""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from aiohttp import web

from service.simulated.faults import ERROR_TYPES, Fault, Refusal, error_body, event

_FOREVER_S = 10 * 365 * 86_400.0
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"


async def read_body(request: web.BaseRequest) -> bytes:
    """Raises `Refusal` (413)."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, "Request exceeds the maximum size", outcome="too_large") from None


async def before_answering(request: web.BaseRequest, fault: Fault, *, streamed: bool) -> None:
    """What a fault does instead of an answer, or before it."""
    if (refusal := fault.refusal()) is not None:
        raise refusal
    match fault.name:
        case "hang":
            await hang()
        case "slow_first_byte":
            await asyncio.sleep(fault.delay_s)
        case "reset" if fault.at == "start" or (fault.at is None and not streamed):
            await reset(request)
        case "error_mid_stream" if not streamed:
            status = next((status for status, type in ERROR_TYPES.items() if type == fault.type), 500)
            raise Refusal(status, f"{fault.type} instead of an answer", outcome=fault.name)


def json_answer(content: dict[str, Any], headers: dict[str, str]) -> web.Response:
    """A whole answer."""
    return web.Response(body=json.dumps(content).encode(), headers={**headers, "content-type": "application/json"})


def html(headers: Mapping[str, str]) -> web.Response:
    """502 with HTML, as a proxy sends it that cannot reach the API."""
    return web.Response(status=502, body=_HTML, headers={**headers, "content-type": "text/html"})


async def send_message(
    request: web.BaseRequest, message: bytes, *, headers: Mapping[str, str], fault: Fault | None
) -> web.StreamResponse:
    """Send an answer (`message`: its JSON) as one body."""
    headers = {**headers, "content-type": "application/json"}
    match fault.name if fault else "":
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


async def send_stream(
    request: web.BaseRequest,
    events: Sequence[bytes],
    *,
    headers: Mapping[str, str],
    pause_s: float,
    fault: Fault | None,
    request_id: str,
) -> web.StreamResponse:
    """Send an answer as a stream of events, with a pause of `pause_s` seconds before each."""
    headers = {**headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    events = list(events)
    half = max(1, len(events) // 2)
    match fault.name if fault else "":
        case "broken_json":
            events[half] = b'event: content_block_delta\ndata: {"type": "content_block_delta", \n\n'
        case "not_a_message":
            events = [event("ping"), b'data: {"ok": true}\n\n']
        case "unfinished":
            del events[-2]
        case "error_mid_stream" if fault is not None:
            error = error_body(fault.type, f"{fault.type} in the middle", request_id=request_id)
            events[half:] = [b"event: error\ndata: %b\n\n" % error]
        case "cut":
            del events[half:]
    return await _send(request, events, headers=headers, fault=fault, pause_s=pause_s)


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
    delay_s = fault.delay_s if fault else 0.0
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
