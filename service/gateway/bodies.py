"""The bodies of calls. A large one goes into a file while it comes, and from there beside the broker, so that however
many come at once, hardly any of them is in memory."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import BinaryIO, Final

from aiohttp import web

from service.gateway.asking import Asked
from service.gateway.problems import ApiError, refused

BODY_WITHIN_S: Final = 30.0
HELD_BYTES: Final = 128 * 1024
"""So much of a large body is in memory while it comes."""
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
        # a thread keeps some of the memory that it has used once, so it is always the same one
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="large body")

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
        filed_bytes = size if size > self.over_bytes else 0
        if self._filed_bytes + filed_bytes > FILED_BYTES:
            raise refused("as many large bodies are under way here as fit", status=529)
        self._filed_bytes += filed_bytes
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(within_s):
                        body = await self._received(request, stack)
                except TimeoutError:
                    raise ApiError(408, f"the body did not come within {within_s:g} s", "timeout_error") from None
                if isinstance(body, bytearray):
                    yield read(bytes(body))
                    return
                async with self._checking:  # one at a time is in memory
                    loop = asyncio.get_running_loop()
                    raw, sha256 = await loop.run_in_executor(self._reader, _whole, body)
                    asked = _without_body(read(raw))
                    del raw
                body.seek(0)
                yield replace(asked, body=body, sha256=sha256)
        finally:
            self._filed_bytes -= filed_bytes

    async def _received(self, request: web.BaseRequest, stack: AsyncExitStack) -> bytearray | BinaryIO:
        """The whole body; if it is large, in a file without a name, which `stack` closes."""
        file: BinaryIO | None = None
        held, size = bytearray(), 0
        async for piece in request.content.iter_any():
            size += len(piece)
            if size > self.most_bytes:
                raise self._too_large()
            held += piece
            if file is None and max(size, request.content_length or 0) > self.over_bytes:
                file = stack.enter_context(await asyncio.to_thread(tempfile.TemporaryFile))
            if file is not None and len(held) >= HELD_BYTES:
                await asyncio.to_thread(file.write, held)
                held = bytearray()
        if file is None:
            return held
        await asyncio.to_thread(file.write, held)
        return file

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: larger than {self.most_bytes} bytes")


def _without_body(asked: Asked) -> Asked:
    return replace(asked, body=b"", request=replace(asked.request, body=b""))


def _whole(file: BinaryIO) -> tuple[bytes, str]:
    file.seek(0)
    found = file.read()
    return found, hashlib.sha256(found).hexdigest()
