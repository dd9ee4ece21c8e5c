"""The simulated Anthropic API: an HTTP server. START HERE; `routes.py` has the answers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from aiohttp import web

from service.simulated.calls import Call, Calls
from service.simulated.options import SimulatedOptions
from service.simulated.routes import Routes


class SimulatedAPI:
    """A simulated Anthropic API: an HTTP server on `host` and `port` (0: a free port, which stays the same after `stop`
    and `start`)."""

    def __init__(self, options: SimulatedOptions | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        options = options or SimulatedOptions()
        self._calls = Calls(options.keep_calls)
        self._routes = Routes(options, self._calls)
        self._runner: web.ServerRunner | None = None

    @property
    def options(self) -> SimulatedOptions:
        return self._routes.options

    def configure(self, options: SimulatedOptions) -> None:
        """Use other options from now on. All token buckets are full again; the recorded calls stay."""
        self._routes = Routes(options, self._calls)

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def calls(self) -> Sequence[Call]:
        """The latest calls that the API has received, oldest first."""
        return self._calls.latest

    @property
    def running(self) -> int:
        """The number of calls that have not ended yet."""
        return self._calls.running

    def stats(self) -> dict[str, Any]:
        """Counts of all calls: by outcome and by model, calls running now and at most at the same time, tokens."""
        return self._calls.stats()

    async def until(self, holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until `holds()` is true; it is checked whenever a call starts or ends. Raises `TimeoutError`."""
        await self._calls.until(holds, timeout_s)

    async def start(self) -> None:
        server = web.Server(self._handle, request_factory=self._request, handler_cancellation=True, access_log=None)
        # A short timeout, so that stopping does not wait for a stalled answer.
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections and end the running calls. `start` begins again on the same port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop, most = asyncio.get_running_loop(), self.options.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._routes.handle(request)
