"""The HTTP server of a process, one in each: START HERE. `/healthz`, `/readyz`, and the gateway where there is one.

`/healthz` succeeds whenever the event loop can answer. `/readyz` succeeds if no part of the worker reports a problem.
"""

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, Self

from aiohttp import web

from lanekeeper.contract.problems import LanekeeperError
from service.gateway.faults import absent, note_beginning, unforeseen
from topology.codec.decoding import PACKED_BYTES

Readiness = Callable[[], Mapping[str, str | None]]
"""The parts that must work, by name ("consume connection"), each with its trouble or None. Called for every
`/readyz`."""
HOST = "LANEKEEPER_GATEWAY__HOST"
PORT = "LANEKEEPER_GATEWAY__PORT"
KEEP_ALIVE_S = 75.0
"""How long a connection may be idle, and how long the headers of a request may take."""
LINGER_S = 2.0
"""How long a refused body is read on, so that its sender reads the refusal instead of a reset."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes(Protocol):
    """What is served beside health: `app.py`."""

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        """By method and path."""
        ...

    @property
    def largest_body(self) -> int:
        """Bytes. Larger ones are refused before they are asked for."""
        ...

    async def drained(self) -> None:
        """Take no new calls, and return when none is under way."""
        ...

    async def aclose(self) -> None:
        """Close what it has opened."""
        ...


class CannotListen(LanekeeperError):
    """The address is in use, does not belong to this machine, or may not be opened by this user."""


class Server:
    """The HTTP server, as a context manager. With port 0 it takes a free port, which `port` returns."""

    def __init__(self, readiness: Readiness, *, host: str, port: int, routes: Routes | None = None) -> None:
        self._readiness = readiness
        self._host = host
        self.port = port
        self._routes = routes
        app = web.Application(client_max_size=PACKED_BYTES, middlewares=[unforeseen])
        app.on_response_prepare.append(note_beginning)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        for (method, path), handler in ({} if routes is None else routes.handlers()).items():
            app.router.add_route(method, path, handler, expect_handler=self._expected)
        app.router.add_route("*", "/{path:.*}", absent)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # whoever waits for an answer hears that its client has gone
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            shutdown_timeout=1,
        )

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        """Listen. Raises CannotListen."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self.port, backlog=1024).start()
        except (OSError, UnicodeError) as error:
            await self._runner.cleanup()
            raise CannotListen(why_not(error, host=self._host, port=self.port)) from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        if self._routes is not None:
            await self._routes.aclose()

    async def drained(self, *, within_s: float) -> None:
        """Take no new calls, and let those under way end."""
        if self._routes is not None:
            try:
                async with asyncio.timeout(within_s):
                    await self._routes.drained()
            except TimeoutError:
                return  # their connections are closed with the server

    async def _healthz(self, request: web.Request) -> web.Response:
        return _json({"alive": True})

    async def _expected(self, request: web.Request) -> None:
        """Ask for a body that waits to be asked for (`Expect: 100-continue`), unless it will be refused anyway."""
        most = 0 if self._routes is None else self._routes.largest_body
        if (request.content_length or 0) <= most and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        troubles = {name: trouble for name, trouble in self._readiness().items() if trouble is not None}
        return _json({"ready": not troubles, "reasons": troubles}, status=503 if troubles else 200)


def _json(value: object, *, status: int = 200) -> web.Response:
    # Proxies must not cache the answer, because it can change at any moment.
    headers = {"Cache-Control": "no-store", "content-type": "application/json"}
    return web.Response(body=json.dumps(value).encode(), status=status, headers=headers)


def why_not(error: Exception, *, host: str, port: int, host_name: str = HOST, port_name: str = PORT) -> str:
    """Why nothing can listen on an address, and which setting helps."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        why = f"something else listens there; choose another {port_name} (0: any free one)"
    elif number == errno.EACCES:
        why = f"not allowed: ports below 1024 need a privilege; choose another {port_name}"
    else:
        why = f"{error}; is {host_name} an address of this machine?"
    return f"cannot listen on {host}:{port}: {why}"
