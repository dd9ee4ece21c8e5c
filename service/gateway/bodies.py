"""The bodies of calls. A large one goes into a file while it comes, and from there beside the broker, so that however
many come at once, hardly any of them is in memory."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import BinaryIO, Final

from aiohttp import web

from lanekeeper.bodies import PIECE_BYTES
from service.gateway.asking import Asked
from service.gateway.problems import ApiError, refused

BODY_WITHIN_S: Final = 30.0
FILED_BYTES: Final = 2 * 1024 * 1024 * 1024
"""What these files may hold together."""
LEAST_BYTES_PER_S: Final = 256 * 1024
"""A large body may take as much longer as it takes at this rate."""


class Bodies:
    """Reads the bodies of calls. `over_bytes`: larger ones go into files; `most_bytes`: still larger ones are
    refused."""

    def __init__(self, *, over_bytes: int, most_bytes: int) -> None:
        self.over_bytes = over_bytes
        self.most_bytes = most_bytes
        self._checking = asyncio.Lock()
        self._filed_bytes = 0

    def memory_of(self, request: web.BaseRequest) -> int:
        """How many bytes of memory a call's body takes while it is under way. Raises ApiError if the body is announced
        as too large: it is refused before it is read."""
        size = request.content_length
        if size is not None and size > self.most_bytes:
            raise self._too_large()
        return min(self.over_bytes, self.most_bytes if size is None else size)

    @asynccontextmanager
    async def asked(self, request: web.BaseRequest, read: Callable[[bytes], Asked]) -> AsyncIterator[Asked]:
        """What a call asks for, by `read`, which gets its whole body. Raises ApiError."""
        size = self.most_bytes if request.content_length is None else request.content_length
        within_s = BODY_WITHIN_S + max(0, size - self.over_bytes) / LEAST_BYTES_PER_S
        file: BinaryIO | None = None
        filed_bytes = size if size > self.over_bytes else 0
        if self._filed_bytes + filed_bytes > FILED_BYTES:
            raise refused("as many large bodies are under way here as fit", status=529)
        self._filed_bytes += filed_bytes
        try:
            try:
                async with asyncio.timeout(within_s):
                    start = await self._start(request)
                    if len(start) > self.over_bytes:
                        file = await self._filed(start, request)
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {within_s:g} s", "timeout_error") from None
            if file is None:
                yield read(bytes(start))
                return
            del start
            async with self._checking:  # one at a time is in memory
                raw, sha256 = await asyncio.to_thread(_whole, file)
                asked = read(raw)
                del raw
            file.seek(0)
            yield replace(asked, body=file, sha256=sha256, request=replace(asked.request, body=b""))
        finally:
            self._filed_bytes -= filed_bytes
            if file is not None:
                file.close()

    async def _start(self, request: web.BaseRequest) -> bytearray:
        """The whole body, or what came until it was large."""
        found = bytearray()
        async for piece in request.content.iter_any():
            found += piece
            if len(found) > self.over_bytes:
                break
        return found

    async def _filed(self, start: bytearray, request: web.BaseRequest) -> BinaryIO:
        """A file, without a name, of the whole body."""
        if len(start) > self.most_bytes:
            raise self._too_large()
        file: BinaryIO = await asyncio.to_thread(tempfile.TemporaryFile)
        try:
            size, held = len(start), start
            async for piece in request.content.iter_any():
                size += len(piece)
                if size > self.most_bytes:
                    raise self._too_large()
                held += piece
                if len(held) >= PIECE_BYTES:
                    await asyncio.to_thread(file.write, held)
                    held = bytearray()
            await asyncio.to_thread(file.write, held)
        except BaseException:
            file.close()
            raise
        return file

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: larger than {self.most_bytes} bytes")


def _whole(file: BinaryIO) -> tuple[bytes, str]:
    file.seek(0)
    found = file.read()
    return found, hashlib.sha256(found).hexdigest()
