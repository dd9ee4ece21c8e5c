"""START HERE: the HTTP server of a process. It answers `/healthz`, `/readyz`, and the gateway's paths if the process
has a gateway.

`/healthz` succeeds whenever the event loop can answer. `/readyz` succeeds if no part of the process reports a problem.
"""

import asyncio
import errno
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, Self

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import ContentEncodingError, InvalidURLError, LineTooLong

from lanekeeper.contract.problems import LanekeeperError
from service.gateway.bodies import unknown_encoding
from service.gateway.documents import answer
from service.gateway.error_answers import answer_errors, note_beginning
from service.gateway.problems import ApiError
from topology.codec.decoding import PACKED_BYTES

Readiness = Callable[[], Mapping[str, str | None]]
"""A function that returns the parts of the process that must work, by name ("consume connection"), each with its
problem, or None if the part works. The function is called for every `GET /readyz`."""
HOST = "LANEKEEPER_GATEWAY__HOST"
PORT = "LANEKEEPER_GATEWAY__PORT"
KEEP_ALIVE_S = 75.0
"""How many seconds an HTTP connection may be idle, and how many seconds a client may take to send the headers of a
request."""
LINGER_S = 2.0
"""For how many seconds the server goes on reading a body that it has refused. If it closed the connection at once, the
client would get a TCP reset in place of the error answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes(Protocol):
    """What a `Server` needs to serve further paths in addition to the health checks; `Gateway` (`app.py`) implements
    it."""

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        """The functions that handle HTTP calls, by method and path."""
        ...

    @property
    def largest_body(self) -> int:
        """The maximum size of a call's body in bytes. A client that sends `Expect: 100-continue` is refused before it
        sends a larger body."""
        ...

    async def drained(self) -> None:
        """Refuse new HTTP calls, and return when the last call in progress has been answered."""
        ...

    async def aclose(self) -> None:
        """Close all connections and files that were opened for these paths."""
        ...


class CannotListen(LanekeeperError):
    """The HTTP server cannot listen on its address, because the address is in use, does not belong to this machine, or
    needs rights that this user does not have."""


class Server:
    """The HTTP server of a process: `/healthz`, `/readyz`, and the paths of `routes`. It listens inside its `async
    with` block. If `port` is 0, the server listens on a free port, and `port` is then its number."""

    def __init__(self, readiness: Readiness, *, host: str, port: int, routes: Routes | None = None) -> None:
        self._readiness = readiness
        self._host = host
        self.port = port
        self._routes = routes
        app = web.Application(client_max_size=PACKED_BYTES, middlewares=[answer_errors])
        app.on_response_prepare.append(note_beginning)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        for (method, path), handler in ({} if routes is None else routes.handlers()).items():
            app.router.add_route(method, path, handler, expect_handler=self._expected)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,  # if a client disconnects, its handler is cancelled
            shutdown_timeout=1,
        )
        self._listening: asyncio.Server | None = None

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        """Start to listen. Raises CannotListen."""
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            listening = await loop.create_server(self._connection, self._host, self.port, backlog=1024)
        except (OSError, UnicodeError) as error:
            await self._runner.cleanup()
            raise CannotListen(why_not(error, host=self._host, port=self.port)) from error
        self._listening = listening
        self.port = listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()
        if self._routes is not None:
            await self._routes.aclose()

    def _connection(self) -> "_Connection":
        assert self._runner.server is not None
        return _Connection(
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp then logs no access
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
        )

    async def drained(self, *, within_s: float) -> None:
        """Refuse new calls, and wait up to `within_s` until the calls in progress have been answered."""
        if self._routes is not None:
            try:
                async with asyncio.timeout(within_s):
                    await self._routes.drained()
            except TimeoutError:
                return  # the connections of the remaining calls are closed with the server

    async def _healthz(self, request: web.Request) -> web.Response:
        return answer({"alive": True})

    async def _expected(self, request: web.Request) -> None:
        """Answer `Expect: 100-continue` with 100, so that the client sends the body, unless the body is too large."""
        most = 0 if self._routes is None else self._routes.largest_body
        if (request.content_length or 0) <= most and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        troubles = {name: trouble for name, trouble in self._readiness().items() if trouble is not None}
        return answer({"ready": not troubles, "reasons": troubles}, status=503 if troubles else 200)


class _Connection(web.RequestHandler):
    """An HTTP connection. It answers calls that aiohttp's parser cannot read with an error in Anthropic's format;
    aiohttp itself answers them with plain text, and logs them with a part of the call, which may be a key."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a call that aiohttp could not parse. aiohttp does not tell the path of such a call, so the
        answer has the same format for all paths."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = _parse_error(exc).response(uuid.uuid4().hex)
        response.force_close()  # the parser cannot find the next call
        return response


def _parse_error(error: HttpProcessingError) -> ApiError:
    match error:
        case ContentEncodingError():
            return unknown_encoding()
        case LineTooLong():
            return ApiError(400, "not valid HTTP: the first line or a header is too long (at most 8190 bytes)")
        case InvalidURLError():
            return ApiError(400, "not valid HTTP: the target is not a URL")
    # aiohttp's message quotes a part of the call after a colon; the answer contains only what precedes the colon.
    return ApiError(400, f"not valid HTTP: {error.message.partition(':')[0].rstrip('.')}")


def why_not(error: Exception, *, host: str, port: int, host_name: str = HOST, port_name: str = PORT) -> str:
    """The error text for an address on which the server cannot listen. It names the setting to change."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        why = f"something else listens there; choose another {port_name} (0: any free one)"
    elif number == errno.EACCES:
        why = f"not allowed: ports below 1024 need a privilege; choose another {port_name}"
    else:
        why = f"{error}; is {host_name} an address of this machine?"
    return f"cannot listen on {host}:{port}: {why}"
