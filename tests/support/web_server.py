"""A server whose every path one function answers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def web_server(handler: Handler) -> AsyncIterator[str]:
    """Its URL. The call of a client that has gone is cancelled."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
