"""START HERE: the HTTP server of a process. It answers `/healthz`, `/readyz`, `/metrics`, and the gateway's paths if
the process has a gateway.

`/healthz` succeeds whenever the event loop can answer. `/readyz` succeeds if no part of the process reports a problem;
its `reasons` also name what the process can do its work without.
"""

import asyncio
import errno
import resource
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, Protocol, Self

from aiohttp import web
from aiohttp.hdrs import METH_ALL
from aiohttp.http import HttpProcessingError, WebSocketReader
from aiohttp.http_exceptions import InvalidURLError, LineTooLong

from consumers.background import background_task
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.telemetry.figures import Histogram
from service.gateway.problems import NO_SNIFFING, ApiError, answer, answer_errors, note_beginning
from topology.codec.decoding import PACKED_BYTES
from topology.codec.headers import PROVIDER_HEADER_BYTES

Readiness = Callable[[], Mapping[str, str | None]]
"""The parts of the process that must work ("consume connection"), each with its problem, or None if it works."""
HOST = "LANEKEEPER_GATEWAY__HOST"
PORT = "LANEKEEPER_GATEWAY__PORT"
KEEP_ALIVE_S: Final = 75.0
HEADERS_WITHIN_S: Final = 15.0
LINGER_S: Final = 2.0
"""For how long a body that was refused is still read: if the connection were closed at once, the client would get a TCP
reset in place of the error answer."""
HEALTH_CONNECTIONS: Final = 64
ENDLESS: Final = ("/v1/requests/{id}/events", "/v1/live", "/v1/ws")
"""Their answers do not end, so they have no HEAD."""
MOST_DESCRIPTORS: Final = 65_536
LINE_BYTES: Final = PROVIDER_HEADER_BYTES
"""So that the longest header for a provider comes over HTTP too; aiohttp's own limit is two bytes less."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Paths(Protocol):
    """What a `Server` serves besides health: the `Gateway` (`app.py`)."""

    @property
    def connections(self) -> int: ...

    def handlers(self) -> Mapping[tuple[str, str], Handler]: ...

    async def run(self) -> None: ...

    async def drained(self) -> None:
        """Refuse new calls, and return when the last one in progress has been answered."""
        ...

    async def aclose(self) -> None: ...


class CannotListen(LanekeeperError):
    """The address is in use, is none of this machine, or needs rights that this user does not have."""


class Server:
    """Serves health, metrics (`scrape`) and `paths` inside its block. `limitations`: what readiness does not need."""

    def __init__(
        self,
        readiness: Readiness,
        *,
        host: str,
        port: int,
        paths: Paths | None = None,
        limitations: Callable[[], Mapping[str, str]] = dict,
        scrape: Callable[[], Awaitable[tuple[bytes, str]]] | None = None,
    ) -> None:
        self._readiness = readiness
        self._limitations = limitations
        self._host = host
        self.port = port
        self._paths = paths
        self._scrape = scrape
        self.times: defaultdict[tuple[str, str, int], Histogram] = defaultdict(Histogram)
        app = web.Application(client_max_size=PACKED_BYTES, middlewares=[self._timed, answer_errors])
        app.on_response_prepare.append(note_beginning)
        app.router.add_get("/healthz", self._healthz, expect_handler=_send_no_100)
        app.router.add_get("/readyz", self._readyz, expect_handler=_send_no_100)
        if scrape is not None:
            app.router.add_get("/metrics", self._metrics, expect_handler=_send_no_100)
        for (method, path), handler in ({} if paths is None else paths.handlers()).items():
            app.router.add_route(method, path, handler, expect_handler=_send_no_100)
            if method == "GET" and path not in ENDLESS:
                app.router.add_route("HEAD", path, handler)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,  # if a client disconnects, its handler is cancelled
            shutdown_timeout=1,
        )
        self._listening: asyncio.Server | None = None
        self._connections = _Connections(HEALTH_CONNECTIONS if paths is None else paths.connections)
        self._beside = AsyncExitStack()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            listening = await loop.create_server(self._connection, self._host, self.port, backlog=1024)
        except (OSError, UnicodeError) as error:
            await self._runner.cleanup()
            raise CannotListen(why_not(error, host=self._host, port=self.port)) from error
        self._listening = listening
        self.port = listening.sockets[0].getsockname()[1]
        if self._paths is not None:
            await self._beside.enter_async_context(background_task(self._paths.run(), name="gateway"))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._beside.aclose()
        await self._runner.cleanup()
        if self._paths is not None:
            await self._paths.aclose()

    def _connection(self) -> "HttpConnection":
        assert self._runner.server is not None
        return HttpConnection(
            self._runner.server,
            self._connections,
            loop=asyncio.get_running_loop(),
            access_log=None,  # aiohttp then logs no access
            auto_decompress=False,  # nothing is unpacked before its caller is known
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
        )

    async def drained(self, *, within_s: float) -> None:
        if self._paths is not None:
            try:
                async with asyncio.timeout(within_s):
                    await self._paths.drained()
            except TimeoutError:
                return  # the connections of the remaining calls are closed with the server

    @property
    def is_ready(self) -> bool:
        return not any(self._readiness().values())

    @web.middleware
    async def _timed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began_s, status = time.monotonic(), 499  # the client has gone
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            method = request.method if request.method in METH_ALL else "_OTHER"
            path = "" if resource is None else resource.canonical
            self.times[method, path, status].add(time.monotonic() - began_s)

    async def _metrics(self, request: web.Request) -> web.Response:
        _require_no_body(request)
        assert self._scrape is not None
        text, content_type = await self._scrape()
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _healthz(self, request: web.Request) -> web.Response:
        _require_no_body(request)
        return answer({"alive": True})

    async def _readyz(self, request: web.Request) -> web.Response:
        _require_no_body(request)
        troubles = {name: trouble for name, trouble in self._readiness().items() if trouble is not None}
        reasons = {**self._limitations(), **troubles}
        return answer({"ready": not troubles, "reasons": reasons}, status=503 if troubles else 200)


def _require_no_body(request: web.Request) -> None:
    if request.body_exists:
        raise ApiError(413, f"{request.path} takes no body")


async def _send_no_100(request: web.Request) -> None:
    """`Expect: 100-continue` is answered when the body is wanted (`calls.py`), so only if its caller is known."""


class _Connections:
    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[HttpConnection] = set()
        self._strangers: dict[HttpConnection, None] = {}
        self._idle: dict[HttpConnection, None] = {}

    def add(self, connection: "HttpConnection") -> None:
        if len(self._open) >= self._most:
            silent = self._strangers or self._idle
            oldest = next(iter(silent), connection)
            self.remove(oldest)
            oldest.abort()
            if oldest is connection:
                return
        self._open.add(connection)
        self._strangers[connection] = None

    def is_in_use(self, connection: "HttpConnection") -> None:
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def is_idle(self, connection: "HttpConnection") -> None:
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: "HttpConnection") -> None:
        self._open.discard(connection)
        self.is_in_use(connection)


class HttpConnection(web.RequestHandler):
    """An HTTP connection.

    Until `admit` is called for a call, its caller counts as a stranger, whose connection is closed first if there are
    too many. Calls that aiohttp's parser cannot read are answered in Anthropic's format,
    whatever their path, which aiohttp does not tell; aiohttp itself answers with plain text, and logs a part of the
    call, which may be a key."""

    __slots__ = ("_connections", "_is_admitted", "before_parser")

    def __init__(self, manager: web.Server, connections: _Connections, **options: Any) -> None:
        super().__init__(manager, **options)
        self._connections = connections
        self._is_admitted = False
        self.before_parser: Callable[[WebSocketReader], Any] | None = None

    def admit(self) -> None:
        self._is_admitted = True
        self._connections.is_in_use(self)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = self._loop.time() + HEADERS_WITHIN_S
        self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def set_parser(self, parser: WebSocketReader, data_received_cb: Callable[[], None] | None = None) -> None:
        super().set_parser(parser if self.before_parser is None else self.before_parser(parser), data_received_cb)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        answered = await super().finish_response(request, resp, start_time)
        if self._is_admitted:
            self._is_admitted = False
            self._connections.is_idle(self)
        return answered

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = _parse_error(exc).response(uuid.uuid4().hex)
        response.force_close()  # the parser cannot find the next call
        response.headers[NO_SNIFFING] = "nosniff"
        response.headers["Server"] = "lanekeeper"  # in place of aiohttp's name and version
        return response


def _parse_error(error: HttpProcessingError) -> ApiError:
    match error:
        case LineTooLong():
            return ApiError(400, f"not valid HTTP: the first line or a header is too long (at most {LINE_BYTES} bytes)")
        case InvalidURLError():
            return ApiError(400, "not valid HTTP: the target is not a URL")
    # aiohttp's message quotes a part of the call after a colon; the answer contains only what precedes the colon.
    return ApiError(400, f"not valid HTTP: {error.message.partition(':')[0].rstrip('.')}")


def why_not(error: Exception, *, host: str, port: int, host_name: str = HOST, port_name: str = PORT) -> str:
    """The error text for an address on which nothing can listen. It names the setting to change."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        why = f"something else listens there; choose another {port_name} (0: any free one)"
    elif number == errno.EACCES:
        why = f"not allowed: ports below 1024 need a privilege; choose another {port_name}"
    else:
        why = f"{error}; is {host_name} an address of this machine?"
    return f"cannot listen on {host}:{port}: {why}"


def descriptors() -> int:
    """Raise the limit of open files of this process as far as it may, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (soft < hard or hard == resource.RLIM_INFINITY):
        wanted = hard if hard != resource.RLIM_INFINITY else max(soft, MOST_DESCRIPTORS)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
