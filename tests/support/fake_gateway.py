"""The paths `/v1/requests` of a gateway without lanes behind them: what it answers, and how it fails, is set by a test.

async with FakeGateway() as gateway:
    gateway.faults += [503, CUT]     the next two calls
    …
    gateway.calls                    what was called, in order
"""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

CUT = "cut"
"""The connection is closed instead of an answer."""
KEY = "lane-right"
RESULT = '{"content": [{"type": "text",  "text": "Pô"}], "role":"assistant" }'


@dataclass(frozen=True)
class Refusal:
    status: int
    document: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Call:
    method: str
    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes


@dataclass
class FakeGateway:
    """Every request ends at once, unless `status` says otherwise."""

    status: dict[str, Any] = field(default_factory=lambda: {"status": "completed"})
    result: str | None = RESULT
    faults: deque[int | str | Refusal | asyncio.Event] = field(default_factory=deque)
    """Of the next calls, one each. Of an Event, the answer waits until it is set."""
    streams: deque[list[str]] = field(default_factory=deque)
    """What each connection to `/events` sends before it is closed; the last one sends the end as well."""
    ssl_context: ssl.SSLContext | None = None
    calls: list[Call] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    posted: dict[str, bytes] = field(default_factory=dict)
    """The requests that it knows, by id."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/v1/requests{rest:.*}", self._called)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.ssl_context).start()
        scheme, host = ("http", "127.0.0.1") if self.ssl_context is None else ("https", "localhost")
        self.url = f"{scheme}://{host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def called(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    async def _called(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/requests/-":  # a client opens
            return _json({}, status=404 if request.headers.get("x-api-key") == KEY else 401)
        self.calls.append(Call(request.method, request.path, request.headers, request.query, await request.read()))
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, asyncio.Event):
            await fault.wait()
        elif fault is not None:
            if fault == CUT:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            refusal = fault if isinstance(fault, Refusal) else Refusal(int(fault))
            return _json(refusal.document, status=refusal.status, headers=refusal.headers)
        id = request.path.split("/")[3] if request.path.count("/") > 2 else request.headers["idempotency-key"]
        if request.method == "POST":
            self.posted[id] = self.calls[-1].body
            return _json({"id": id, "status_url": f"/v1/requests/{id}"}, status=202)
        if id not in self.posted:
            return _json({"status": 404, "detail": "not known"}, status=404)
        if request.method == "DELETE":
            self.cancelled.append(id)
            return _json({"id": id, "outcome": "told"}, status=202)
        if request.path.endswith("/events"):
            return await self._events(request, id)
        return web.Response(text=self.document(id), content_type="application/json")

    def document(self, id: str) -> str:
        """The status of a request."""
        found = {"id": id, "lane": "normal", "attempts": 1, **self.status}
        if found["status"] != "completed":
            return json.dumps(found)
        return f'{json.dumps(found)[:-1]}, "result": {self.result}}}'

    async def _events(self, request: web.Request, id: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.streams.popleft() if self.streams else []:
            await response.write(event.encode())
        if not self.streams:
            end = f"id: 99\nevent: {self.status['status']}\ndata: {self.document(id)}\n\n"
            await response.write(end.encode())
        return response


def _json(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(document, status=status, headers=headers)
