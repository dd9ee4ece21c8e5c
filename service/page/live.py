"""Serves the page's files, and what it shows, by Server-Sent Events, to all that look: a snapshot every two seconds,
and the history of the last hour, which the workers keep in the store, every minute."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from consumers.clock import now_ms
from consumers.state.base import StoreUnavailable
from consumers.state.store import Store
from lanekeeper.contract.problems import LanekeeperError
from service import history
from service.config.settings import GatewayKey
from service.gateway.access import require_operator
from service.gateway.groups import overview
from service.gateway.problems import ApiError
from service.gateway.requests import Poller
from service.status import Status

Look = Callable[[], Awaitable[Status]]

FILES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot.LICENSE": "text/plain",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
EVERY_S: Final = 2.0
GROUPS_EVERY_S: Final = 5.0
GROUPS_WITHIN_S: Final = 2.0
HISTORY_EVERY_S: Final = 60.0
LOOK_WITHIN_S: Final = 5.0
TAKEN_WITHIN_S: Final = 30.0
"""A page that takes nothing for so long is not followed any more; it connects again by itself."""
VIEWERS: Final = 64


class Live:
    """The snapshots, and the calls that follow them, each of which takes a place of the `poller`."""

    def __init__(self, look: Look, poller: Poller, store: Store, *, jaeger_url: str | None) -> None:
        self._jaeger_url = jaeger_url
        self._look = look
        self._poller = poller
        self._store = store
        self._viewers = 0
        self._woken = asyncio.Event()
        self._latest = b""
        self._changed = asyncio.Event()
        self._groups: tuple[float, list[dict[str, Any]]] = -GROUPS_EVERY_S, []
        self._history = -HISTORY_EVERY_S, b""
        self._reading = asyncio.Lock()
        self._lanes: list[Any] = []
        self._is_closed = False

    def handlers(self) -> Mapping[tuple[str, str], Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        """The page's files, which anybody may read: they hold nothing of this system."""
        named = {("GET", f"/{name}"): _serves(name, type) for name, type in FILES.items() if name != "index.html"}
        return {("GET", "/"): _serves("index.html", "text/html"), **named}

    async def run(self) -> None:
        while True:
            if not self._viewers:
                await self._woken.wait()
            try:
                async with asyncio.timeout(LOOK_WITHIN_S):
                    found = {"trouble": None, **asdict(await self._look())}
                self._lanes = found["lanes"]
            except (LanekeeperError, TimeoutError, OSError) as error:
                why = str(error) or f"the broker did not answer within {LOOK_WITHIN_S:g} s"
                found = {"trouble": why, "lanes": self._lanes, "workers": []}
            groups = await self._read_groups()
            self._publish({"at_ms": now_ms(), "jaeger_url": self._jaeger_url, "groups": groups, **found})
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._woken.wait()

    def close(self) -> None:
        """End the calls that follow; their pages connect again, to whoever serves then."""
        self._is_closed = True
        self._tell()

    async def follow(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        if self._viewers >= VIEWERS:
            raise ApiError(503, f"{VIEWERS} pages follow this process already: look at another one, or close some")
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
        with suppress(TimeoutError):
            async with self._poller.following(caller):
                await self._send(request, response)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse) -> None:
        self._viewers += 1
        try:
            if self._viewers == 1:
                self._woken.set()
            await response.prepare(request)
            sent = sent_history = b""
            while not self._is_closed:
                if self._latest is sent:
                    await self._changed.wait()
                    continue
                sent, events = self._latest, b""
                if (hour := await self._read_history()) is not sent_history:
                    sent_history, events = hour, b"event: history\ndata: %s\n\n" % hour
                async with asyncio.timeout(TAKEN_WITHIN_S):
                    await response.write(b"%bevent: status\ndata: %b\n\n" % (events, sent))
        finally:
            self._viewers -= 1

    async def _read_groups(self) -> list[dict[str, Any]]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._groups[0] >= GROUPS_EVERY_S:
            found = self._groups[1]
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(GROUPS_WITHIN_S):
                    found = await overview(self._store)
            self._groups = now_s, found
        return self._groups[1]

    async def _read_history(self) -> bytes:
        now_s = asyncio.get_running_loop().time()
        async with self._reading:
            if now_s - self._history[0] >= HISTORY_EVERY_S:
                minute, found = now_ms() // history.MINUTE_MS, self._history[1]
                with suppress(StoreUnavailable):
                    found = json.dumps(history.read(await self._store.history(minute), now_minute=minute)).encode()
                self._history = now_s, found
        return self._history[1]

    def _publish(self, found: Mapping[str, Any]) -> None:
        self._latest = json.dumps(found, default=str).encode()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _serves(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    body = files("service.page").joinpath(name).read_bytes()

    async def get(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=HEADERS)

    return get
