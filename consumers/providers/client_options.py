"""Defines the options of all clients of Anthropic's SDK that a worker uses: no retries, no spans, and the fastest
transport (aiohttp)."""

import zlib
from collections.abc import AsyncIterator
from functools import cache
from ipaddress import ip_address
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from anthropic import DefaultAioHttpClient

CONNECT_TIMEOUT_S: Final = 5.0
"""The time limit, in seconds, for connecting to a provider."""
_ERROR_BYTES: Final = 64 * 1024
"""How much of the body of a provider's error response is read, in bytes after decompression."""


def client_options(base_url: str) -> dict[str, Any]:
    """The options of an Anthropic SDK client for the API at this address."""
    # Calls to this machine do not use the proxy that the environment names.
    trust_env = not _is_here(base_url)
    return {
        "max_retries": 0,
        "open_telemetry": False,
        "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        # A redirect would send the prompt to an address that is in no setting.
        "http_client": DefaultAioHttpClient(
            event_hooks={"response": [bound_error_body]},
            verify=_certificates(trust_env=trust_env),
            trust_env=trust_env,
            follow_redirects=False,
        ),
    }


@cache
def _certificates(*, trust_env: bool) -> SSLContext:
    """An SSL context with the trusted TLS certificates. All clients share it, because reading the certificates takes 25
    ms."""
    return httpx2.create_ssl_context(trust_env=trust_env)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def bound_error_body(response: httpx2.Response) -> None:
    """Cut the body of an error response after 64 KiB, because the client would read and decompress all of it. A body
    that was cut is not valid JSON, so the error is then classified by its status."""
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        is_compressed = response.headers.pop("content-encoding", "identity") in ("gzip", "deflate")
        response.stream = _FirstBytes(response.stream, is_compressed=is_compressed)


class _FirstBytes(httpx2.AsyncByteStream):
    """The first 64 KiB of an error response's body, decompressed."""

    def __init__(self, stream: httpx2.AsyncByteStream, *, is_compressed: bool) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if is_compressed else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = _ERROR_BYTES
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
