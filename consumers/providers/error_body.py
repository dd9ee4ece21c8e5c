"""Limits how much of the body of a provider's error response is read: its first 64 KiB, decompressed."""

import zlib
from collections.abc import AsyncIterator
from typing import Final

import httpx2

_BYTES: Final = 64 * 1024
"""The most bytes that are read of the body of a provider's error."""


async def bound_error_body(response: httpx2.Response) -> None:
    """Cut the body of an error response after 64 KiB; the client would read and decompress all of it. A body that was
    cut is not valid JSON, so the error is then classified by its status."""
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        is_compressed = response.headers.pop("content-encoding", "identity") in ("gzip", "deflate")
        response.stream = _FirstBytes(response.stream, is_compressed=is_compressed)


class _FirstBytes(httpx2.AsyncByteStream):
    """The first 64 KiB of an error response's body, decompressed."""

    def __init__(self, stream: httpx2.AsyncByteStream, *, is_compressed: bool) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if is_compressed else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = _BYTES
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
