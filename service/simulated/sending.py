"""Sends the simulated API's answers: whole, or as a stream."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from service.simulated.faults import Refusal


async def read_body(request: web.BaseRequest) -> bytes:
    """Raises `Refusal` (413)."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, "Request exceeds the maximum size", outcome="too_large") from None


def json_answer(content: dict[str, Any], headers: dict[str, str]) -> web.Response:
    """A whole answer."""
    return web.Response(body=json.dumps(content).encode(), headers={**headers, "content-type": "application/json"})


def stream_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """With those that a stream of events has."""
    return {**headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


async def send_stream(
    request: web.BaseRequest, events: Sequence[bytes], *, headers: Mapping[str, str], pause_s: float
) -> web.StreamResponse:
    """Send an answer as a stream of events, with a pause of `pause_s` seconds before each."""
    response = web.StreamResponse(headers=stream_headers(headers))
    response.enable_chunked_encoding()
    await response.prepare(request)
    for event in events if pause_s else [b"".join(events)]:
        await asyncio.sleep(pause_s)
        await response.write(event)
    await response.write_eof()
    return response


def time_text(seconds: float | None) -> str | None:
    """A time (s since 1970) as the API writes it."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
