"""The HTTP client under all calls of providers: httpx2's interface, which Anthropic's SDK uses too, over aiohttp."""

import select
import zlib
from collections.abc import AsyncIterator
from functools import cache
from ipaddress import ip_address
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakSet

import aiohttp
import httpx2
from aiohttp.connector import Connection
from typing_extensions import override

from consumers.providers.errors import ERROR_BYTES

SLICE_BYTES: Final = 16 * 1024
"""A stream is parsed in pieces of this size, between which other tasks get the event loop."""
CONNECT_TIMEOUT_S: Final = 5.0
CONNECTIONS: Final = 1000
KEPT_FOR_S: Final = 5.0


def http_client(base_url: str) -> httpx2.AsyncClient:
    """A client for the provider at this URL."""
    # Calls to this machine do not use the proxy that the environment names.
    trust_env = not _is_here(base_url)
    return httpx2.AsyncClient(
        event_hooks={"response": [bound_error_body]},
        transport=AioHttpTransport(
            _certificates(trust_env=trust_env), proxy=_proxy_to(base_url) if trust_env else None
        ),
        trust_env=trust_env,
        # A redirect would send the prompt to an address that is in no setting.
        follow_redirects=False,
    )


def client_options(base_url: str) -> dict[str, Any]:
    """The options of all clients of Anthropic's SDK: no retries, no spans, and this client."""
    return {
        "max_retries": 0,
        "open_telemetry": False,
        "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        "http_client": http_client(base_url),
    }


@cache
def _certificates(*, trust_env: bool) -> SSLContext:
    """All clients share it, because reading the certificates takes 25 ms."""
    return httpx2.create_ssl_context(trust_env=trust_env)


def _proxy_to(url: str) -> str | None:
    """The proxy that the environment (HTTPS_PROXY, NO_PROXY, …) names for this URL."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def bound_error_body(response: httpx2.Response) -> None:
    """Cut the body of an error response, because the client would read and decompress all of it."""
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        is_compressed = response.headers.pop("content-encoding", "identity") in ("gzip", "deflate")
        response.stream = _FirstBytes(response.stream, is_compressed=is_compressed)


class AioHttpTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of an httpx2 client through aiohttp, with less than half the CPU time of httpx2's own
    transport (docs/decisions/0030)."""

    def __init__(self, certificates: SSLContext, *, proxy: str | None) -> None:
        self._certificates = certificates
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._session is None:  # it needs a running event loop
            pool = _Pool(ssl=self._certificates, limit=CONNECTIONS, keepalive_timeout=KEPT_FOR_S)
            self._session = aiohttp.ClientSession(connector=pool)
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        headers = request.headers.multi_items()
        data: bytes | httpx2.AsyncByteStream | None = request.stream
        if isinstance(request.stream, httpx2.SyncByteStream):  # it is in memory
            data = b"".join([piece async for piece in request.stream]) or None
        else:
            headers = [each for each in headers if each[0].lower() != "transfer-encoding"]  # which aiohttp adds itself
        try:
            response = await self._session.request(
                request.method,
                str(request.url),
                data=data,
                headers=headers,
                allow_redirects=False,
                auto_decompress=False,
                proxy=self._proxy,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout("no connection in time") from error
        return httpx2.Response(response.status, headers=response.raw_headers, stream=_Body(response))

    @override
    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Body(httpx2.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @override
    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._response.content.iter_chunked(SLICE_BYTES))

    @override
    async def aclose(self) -> None:
        await self._response.__aexit__(None, None, None)


class _Pool(aiohttp.TCPConnector):
    """Uses a connection again only if nothing has arrived since its last answer: the next call, perhaps of another
    tenant, would take that for its answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: WeakSet[object] = WeakSet()

    @override
    async def connect(self, *args: Any, **options: Any) -> Connection:
        while True:
            found = await super().connect(*args, **options)
            protocol, transport = found.protocol, found.transport
            assert protocol is not None
            assert transport is not None
            if protocol not in self._used:
                self._used.add(protocol)
                return found
            if not protocol.should_close and not _is_readable(transport.get_extra_info("socket").fileno()):
                return found
            found.close()


def _is_readable(file: int) -> bool:
    polled = select.poll()
    polled.register(file, select.POLLIN)
    return bool(polled.poll(0))


class _FirstBytes(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, *, is_compressed: bool) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if is_compressed else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = ERROR_BYTES
        async for chunk in self._stream:
            try:
                found = chunk[:left] if self._decompressor is None else self._decompressor.decompress(chunk, left)
            except zlib.error:
                return
            yield found
            left -= len(found)
            if left <= 0:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()
