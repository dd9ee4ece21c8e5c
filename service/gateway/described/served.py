"""Serves the OpenAPI and AsyncAPI documents. Each is made at its first GET, because making both takes as long as the
rest of a gateway's start."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web


class Served:
    """The HTTP handler for `GET` of the document (OpenAPI or AsyncAPI) that `make` returns."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make
        self._made: asyncio.Task[bytes] | None = None

    async def get(self, request: web.Request) -> web.Response:
        if self._made is None:
            # in a thread, so that other calls are answered meanwhile
            self._made = asyncio.create_task(asyncio.to_thread(self._json), name="document")
        # others may wait for it after this client has gone
        return web.Response(body=await asyncio.shield(self._made), content_type="application/json")

    def _json(self) -> bytes:
        return json.dumps(self._make()).encode()
