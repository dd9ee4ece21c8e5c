"""One call to a gateway: how long it may take."""

import asyncio

import pytest
from aiohttp import web

from lanekeeper.http import calls
from lanekeeper.http.calls import Calls


@pytest.mark.slow
async def test_a_large_body_has_more_time_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow line: the body arrives in ten pieces, and takes twice as long as an answer may."""
    monkeypatch.setattr(calls, "ANSWERED_WITHIN_S", 0.5)

    async def read(request: web.Request) -> web.Response:
        size = 0
        async for piece in request.content.iter_chunked(200_000):
            size += len(piece)
            await asyncio.sleep(0.1)
        return web.json_response({"size": size})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/", read)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Calls(url, api_key=None, ssl_context=None) as session:
            answer = await session.call("POST", "/", within_s=30, body=b"x" * 2_000_000)
    finally:
        await runner.cleanup()

    assert answer.document == {"size": 2_000_000}
