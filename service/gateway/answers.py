"""Sends large answers, which workers put into the store of large bodies, to HTTP clients. Each answer is first copied
into a temporary file, so that many can be sent at the same time with only a piece of each in memory."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import BinaryIO, Final, TypeVar

from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyStore
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.telemetry import logs, signals
from service.gateway.problems import ApiError, refused

AT_ONCE: Final = 64
"""How many large answers may be in temporary files at the same time. If each has 32 MiB, they take 2 GiB together."""
IN_MEMORY_AT_ONCE: Final = 2
"""How many large answers may be in memory as a whole at the same time."""
WITHIN_S: Final = 60.0
"""The time limit, in seconds, for each of two steps of sending a large answer: waiting until fewer than `AT_ONCE`
answers are in temporary files, and then fetching the answer from its store."""
PIECE_BYTES: Final = 128 * 1024
"""How many bytes of a large answer are read from its temporary file at a time."""
T = TypeVar("T")
log = logs.logger()


class Answer:
    """A large answer, copied from its store to a local file and checked against its SHA-256."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size

    async def pieces(self, *, begin: bytes = b"", end: bytes = b"") -> AsyncGenerator[bytes, None]:
        """Yield `begin`, then the whole answer in pieces, then `end`."""
        yield begin
        await asyncio.to_thread(self._file.seek, 0)
        while piece := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield piece
        yield end


class Answers:
    """Fetches large answers from `stores`: those in which workers keep them now, or kept them before a change of the
    settings. `most_bytes`: the size of the largest answer that is fetched."""

    def __init__(self, stores: Sequence[BodyStore], *, most_bytes: int) -> None:
        self._stores = stores
        self._most_bytes = most_bytes
        self._places = asyncio.Semaphore(AT_ONCE)
        self._in_memory = asyncio.Semaphore(IN_MEMORY_AT_ONCE)

    @asynccontextmanager
    async def fetched(self, kept: BodyAddress) -> AsyncIterator[Answer]:
        """Copy the answer to a temporary file, and yield it. The file exists inside this block only. Raises ApiError:
        410 if the answer is lost, 503 if it cannot be fetched at present."""
        async with self._filed() as file:
            size = await self._read(kept, lambda store: store.fetch_into(file, kept, most_bytes=self._most_bytes))
            yield Answer(file, size)

    @asynccontextmanager
    async def in_memory(self, kept: BodyAddress) -> AsyncIterator[bytes]:
        """Yield the whole answer in memory, for callers that need it in one piece. Leave the block within a bounded
        time, because only `IN_MEMORY_AT_ONCE` calls can be inside. Raises the errors of `fetched`."""
        async with _place(self._in_memory):
            yield await self._read(kept, lambda store: store.fetch(kept, most_bytes=self._most_bytes))

    @asynccontextmanager
    async def converted(self, kept: BodyAddress, make: Callable[[bytes], Iterable[bytes]]) -> AsyncIterator[Answer]:
        """Convert the stored answer with `make`, which is called in a thread, and yield the result in a temporary file,
        which exists inside this block only."""
        async with self._filed() as file:
            async with self.in_memory(kept) as body:
                await asyncio.to_thread(lambda: file.writelines(make(body)))
            yield Answer(file, file.tell())

    @asynccontextmanager
    async def _filed(self) -> AsyncIterator[BinaryIO]:
        async with _place(self._places):
            file = await asyncio.to_thread(tempfile.TemporaryFile)
            try:
                yield file
            finally:
                file.close()

    async def _read(self, kept: BodyAddress, reading: Callable[[BodyStore], Awaitable[T]]) -> T:
        store = next((store for store in self._stores if store.holds(kept.address)), None)
        if store is None:
            settings = "LANEKEEPER_BODIES__URL, LANEKEEPER_BODIES__ALLOW"
            raise refused(f"the answer lies in a store that this gateway does not know ({settings})")
        try:
            async with asyncio.timeout(WITHIN_S):
                return await reading(store)
        except BodyError as error:
            log.error(signals.BODY_UNAVAILABLE, error=str(error))
            raise ApiError(410, f"the answer was stored, and is lost: {error}", "api_error") from error
        except BodiesUnavailable as error:
            log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
            raise refused(str(error)) from error
        except TimeoutError:
            raise refused(f"the answer could not be fetched within {WITHIN_S:g} s") from None


@asynccontextmanager
async def _place(places: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WITHIN_S):
            await places.acquire()
    except TimeoutError:
        raise refused("as many large answers are under way here as fit", status=529) from None
    try:
        yield
    finally:
        places.release()
