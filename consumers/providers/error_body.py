"""Limits how much of an error answer is read: its first 64 KiB, decompressed."""

import zlib
from collections.abc import AsyncIterator
from typing import Final

import httpx2

_BYTES: Final = 64 * 1024


async def bound_error_body(response: httpx2.Response) -> None:
    """Cut the body after 64 KiB, because the client would read and decompress all of it. A body that is cut off is no
    valid JSON; the error is then classified by its status."""
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        is_packed = response.headers.pop("content-encoding", "identity") in ("gzip", "deflate")
        response.stream = _FirstBytes(response.stream, is_packed=is_packed)


class _FirstBytes(httpx2.AsyncByteStream):
    """The first 64 KiB of a body, unpacked."""

    def __init__(self, stream: httpx2.AsyncByteStream, *, is_packed: bool) -> None:
        self._stream = stream
        self._unpacker = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if is_packed else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = _BYTES
        async for chunk in self._stream:
            try:
                found = chunk[:left] if self._unpacker is None else self._unpacker.decompress(chunk, left)
            except zlib.error:
                return
            yield found
            left -= len(found)
            if left <= 0:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()
