"""Serves the OpenAPI and AsyncAPI documents."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any

from aiohttp import web


def served(make: Callable[[], Mapping[str, Any]]) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    """The HTTP handler for `GET` of the document that `make` returns. The document is made at the first GET, not when
    the gateway starts, because making both documents would double the time of the start. It is made in a thread, so
    that other calls are answered meanwhile."""

    @cache
    def made() -> asyncio.Task[bytes]:
        return asyncio.create_task(asyncio.to_thread(lambda: json.dumps(make()).encode()), name="document")

    async def get(request: web.Request) -> web.Response:
        # other calls may wait for the document after this client has disconnected
        return web.Response(body=await asyncio.shield(made()), content_type="application/json")

    return get
