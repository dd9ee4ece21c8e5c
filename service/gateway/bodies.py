"""Reads the bodies of HTTP calls to the gateway. A large body is written to a temporary file while it arrives, and from
there to the store of large bodies, so that many can arrive at the same time with only a piece of each in memory."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import BinaryIO, Final

from aiohttp import web

from service.config.gateway_section import GatewayKey
from service.gateway.call_limit import CallLimit
from service.gateway.call_reader import CallReader, CheckedCall
from service.gateway.problems import ApiError, refused
from topology.codec.decoding import UNPACKED_TIMES

BODY_WITHIN_S: Final = 30.0
"""How many seconds the body of an HTTP call may take to arrive; a large body may take longer."""
HELD_BYTES: Final = 128 * 1024
"""How many bytes of a large body are collected in memory, while it arrives, before they are written to its temporary
file."""
FILED_BYTES: Final = 2 * 1024 * 1024 * 1024
"""The maximum size, in bytes, of all temporary files with the bodies of HTTP calls together."""
ENCODINGS: Final = ("identity", "gzip", "deflate")
LEAST_BYTES_PER_S: Final = 256 * 1024
"""The lowest accepted rate, in bytes a second, at which a large body arrives: the time that its part above `over_bytes`
takes at this rate is added to `BODY_WITHIN_S`."""


class Bodies:
    """Receives the bodies of HTTP calls, and counts these calls in `limit` until they have been answered. Bodies larger
    than `over_bytes` are written to temporary files; those larger than `most_bytes` are refused."""

    def __init__(self, call_reader: CallReader, limit: CallLimit, *, over_bytes: int, most_bytes: int) -> None:
        self._call_reader = call_reader
        self._limit = limit
        self._over_bytes = over_bytes
        self.most_bytes = most_bytes
        self._checking = asyncio.Lock()
        self._filed_bytes = 0
        # One thread for all large bodies, because each thread keeps some of the memory that it has used.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="large body")

    @asynccontextmanager
    async def checked_call(
        self, request: web.Request, caller: GatewayKey, *, request_id: str, chose_id: bool, task: str = "messages"
    ) -> AsyncIterator[CheckedCall]:
        """Receive the body of an HTTP call, and yield the checked call (see `CallReader.read`). A temporary file with a
        large body exists until the end of the block. Raises ApiError, RequestProblem."""
        read = partial(
            self._call_reader.read, request.headers, caller=caller, request_id=request_id, chose_id=chose_id, task=task
        )
        size = self._size_of(request)
        filed_bytes = size if size > self._over_bytes else 0
        with self._limit.counted(min(size, self._over_bytes)), ExitStack() as stack:
            if self._filed_bytes + filed_bytes > FILED_BYTES:
                raise refused("as many large bodies are under way here as fit", status=529)
            self._filed_bytes += filed_bytes
            try:
                async with self._arriving(BODY_WITHIN_S + max(0, size - self._over_bytes) / LEAST_BYTES_PER_S):
                    body = await self._received(request, stack)
                if isinstance(body, bytearray):
                    call = read(bytes(body))
                else:
                    async with self._checking:  # only one large body at a time is whole in memory
                        call = await asyncio.get_running_loop().run_in_executor(self._reader, _read_whole, body, read)
                yield call
            finally:
                self._filed_bytes -= filed_bytes

    @asynccontextmanager
    async def in_memory(self, request: web.Request) -> AsyncIterator[bytes]:
        """Receive the body of an HTTP call that is passed on to the provider (a token count), and yield it. The call
        counts as in progress until the end of the block. Raises ApiError."""
        with self._limit.counted(self._size_of(request)):
            async with self._arriving(BODY_WITHIN_S):
                body = await request.read()
            yield body

    def _size_of(self, request: web.BaseRequest) -> int:
        """The largest size that a call's body can have after decompression. Raises ApiError if the header
        `content-length` says that it is too large, or if its encoding is unknown."""
        packed = request.headers.get("content-encoding", "identity").lower()
        if packed not in ENCODINGS:
            raise unknown_encoding()
        size = request.content_length
        if size is not None and size > self.most_bytes:
            raise self._too_large()
        times = 1 if packed == "identity" else UNPACKED_TIMES
        return self.most_bytes if size is None else min(self.most_bytes, times * size)

    @asynccontextmanager
    async def _arriving(self, within_s: float) -> AsyncIterator[None]:
        """A context manager for a block that reads a body. It raises ApiError if this takes longer than `within_s`, or
        if the body is too large or cannot be decompressed."""
        try:
            async with asyncio.timeout(within_s):
                yield
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {within_s:g} s", "timeout_error") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError:
            message = "body: not as its headers content-encoding and transfer-encoding say"
            raise ApiError(400, message) from None

    async def _received(self, request: web.BaseRequest, stack: ExitStack) -> bytearray | BinaryIO:
        """Receive the whole body of a call. A large body is returned as an unnamed file, which `stack` closes."""
        file: BinaryIO | None = None
        held, size = bytearray(), 0
        async for piece in request.content.iter_any():
            size += len(piece)
            if size > self.most_bytes:
                raise self._too_large()
            held += piece
            if file is None and max(size, request.content_length or 0) > self._over_bytes:
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


def unknown_encoding() -> ApiError:
    """The error for a body whose `content-encoding` is one that the gateway cannot decompress."""
    return ApiError(415, f"header content-encoding: allowed are {', '.join(ENCODINGS)}")


def _read_whole(file: BinaryIO, read: Callable[[bytes], CheckedCall]) -> CheckedCall:
    """Check a call whose large body is in a file. It runs in a thread, because parsing 30 MiB takes up to 0.3 s."""
    file.seek(0)
    whole = file.read()
    call = read(whole)
    file.seek(0)
    sha256 = hashlib.sha256(whole).hexdigest()
    return replace(call, body=file, sha256=sha256, request=replace(call.request, body=b""))
