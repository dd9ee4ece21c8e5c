"""How a stream ends whose client has not read it yet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from service.gateway import writing
from service.gateway.writing import event_stream
from service.side_tasks import beside
from tests.support.waiting import until

PING = b"x" * 16 * 2**20
"""More than the kernel takes for a client that does not read."""


class Stream:
    """Ends while its ping waits until the client reads."""

    def __init__(self) -> None:
        self.begins_to_end = asyncio.Event()
        self.has_ended = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        stream = event_stream(request, "a")
        async with beside(stream.pings(PING, every_s=0.01), name="pings"):
            await until(lambda: request.protocol.writing_paused)
        self.begins_to_end.set()
        await stream.end()
        self.has_ended = True
        return stream.response


@asynccontextmanager
async def called() -> AsyncIterator[tuple[Stream, aiohttp.ClientResponse]]:
    """A stream, and its answer that is not read yet."""
    stream = Stream()
    app = web.Application()
    app.router.add_get("/", stream.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            yield stream, response
    finally:
        await runner.cleanup()


async def test_a_stream_ends_after_its_client_has_read_all_though_a_ping_waited() -> None:
    async with called() as (stream, response):
        await stream.begins_to_end.wait()

        assert await response.read() == PING
        await until(lambda: stream.has_ended)


@pytest.mark.slow
async def test_a_stream_whose_end_nobody_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "WRITE_WITHIN_S", 0.3)
    async with called() as (stream, response):
        await until(lambda: stream.has_ended)

        with pytest.raises(aiohttp.ClientError):
            await response.read()
