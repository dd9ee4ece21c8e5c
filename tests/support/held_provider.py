"""A provider whose streams come in parts, each when the test says so.

async with HeldProvider(parts=3) as provider, serving(url, base_url=provider.base_url):
    …                               the first third of every stream comes at once
    provider.go_on()                the next third
"""

import asyncio
from typing import Self

from aiohttp import web
from aiohttp.test_utils import TestServer

from service.simulated.messages import answer, events, read_request

PIECES = 60


class HeldProvider:
    """Every call has to be streamed."""

    def __init__(self, *, parts: int) -> None:
        self._may_come = [asyncio.Event() for _ in range(parts)]
        self.go_on()
        app = web.Application()
        app.router.add_post("/v1/messages", self._messages)
        self._server = TestServer(app)
        self.calls = 0
        self.running = 0

    @property
    def base_url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    def go_on(self) -> None:
        """Let the next part of each stream come."""
        next(each for each in self._may_come if not each.is_set()).set()

    async def __aenter__(self) -> Self:
        await self._server.start_server(shutdown_timeout=0.05)  # it cancels the handler of a client that has gone
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        self.running += 1
        try:
            return await self._answer(request)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await request.read())
        found = events(asked, answer(asked, output_tokens=None), id=f"msg_{self.calls}", deltas=PIECES)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        parts = len(self._may_come)
        for number, may_come in enumerate(self._may_come):
            await may_come.wait()
            await response.write(b"".join(found[number * len(found) // parts : (number + 1) * len(found) // parts]))
        await response.write_eof()
        return response
