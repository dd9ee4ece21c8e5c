"""The store for bodies that are too large for a message; the message then contains only the body's address and digest.
The body of a request is removed when the request has ended, the body of an answer when the stored result expires.

The store is a folder of any file system that fsspec knows: `file:///var/lib/lanekeeper/bodies`, `s3://bucket/bodies`.
Each body has a random name, so that nobody can guess its address.
"""

import asyncio
import hashlib
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import unquote

from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import LanekeeperError

MIB: Final = 1024 * 1024
OVER_BYTES: Final = MIB
MOST_BYTES: Final = 32 * MIB
IN_ALL_BYTES: Final = 10 * 1024 * MIB
KEEP_S: Final = 7 * 86_400.0
PIECE_BYTES: Final = MIB
THREADS: Final = 4
"""How many bodies a process reads or writes at the same time; each of them blocks one thread."""
SCAN_EVERY_S: Final = 60.0
RESCAN_EVERY_S: Final = 2.0
OWNER_DIGITS: Final = 8
"""The name of a body ends with 32 hexadecimal digits. So many of them are a hash of the tenant, the others random."""
LONGEST_CAUSE: Final = 1000
_IN_URL: Final = re.compile(r"(://)[^\s\"'<>]*(@)|(?<=\?)[^\s\"'<>]+")
_NAMED_SECRET: Final = re.compile(
    r"""((?:key|secret|token|sig|signature|passw[a-z]*|credentials?|authorization)[a-z_-]*["']?\s*[=:>]\s*["']?)"""
    r"""(?:(?:basic|bearer|aws4\S*|sharedkey)\s+)?[^\s"'<>,;&]+""",
    re.IGNORECASE,
)
_RELATIVE_PATH: Final = re.compile(r"[A-Za-z0-9_=@+-][A-Za-z0-9._=@+-]*(/[A-Za-z0-9_=@+-][A-Za-z0-9._=@+-]*)*")
_REQUEST_NAME: Final = re.compile(r"(?P<kept_s>[0-9]{10,12})-(?P<random>[0-9a-f]{32})")
_ANSWER_NAME: Final = re.compile(r"answer-(?P<until_s>[0-9]{10,12})-(?P<random>[0-9a-f]{32})")
T = TypeVar("T")


class BodyError(LanekeeperError):
    """A stored body is missing, or its SHA-256 is not the announced one: trying again does not help. The text never
    quotes the body."""


class BodyTooLarge(BodyError):
    """A stored body has more bytes than its reader accepts."""


class BodiesUnavailable(LanekeeperError):
    """The store for large bodies cannot be used at present, or is full. `cause` is the file system driver's error; it
    is for logs only, because it may name files and hosts of this machine."""

    def __init__(self, detail: str, *, cause: str | None = None) -> None:
        super().__init__(detail)
        self.cause = detail if cause is None else cause


class BodiesFull(BodiesUnavailable):
    """The tenant's share of the store for large bodies is full: try again when some of its requests have ended."""


class BodyStore:
    """A folder or bucket for bodies of requests and answers that are too large for a message. It holds at most
    `in_all_bytes` bytes in total, and keeps the body of a request for at most `keep_s` seconds.

    A tenant may fill it only as far as at least as much as it has stays free: one alone may use half, of several that
    take what they can, each gets the same, and there is always room for another one.

    The folder is scanned for sizes and expired bodies at most once a minute, when a body is added. Several processes
    may use the same folder.
    """

    def __init__(self, url: str, *, in_all_bytes: int = IN_ALL_BYTES, keep_s: float = KEEP_S) -> None:
        self.url = url.rstrip("/")
        self._in_all_bytes = in_all_bytes
        self._keep_s = keep_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bodies")
        self._free_threads = asyncio.Semaphore(THREADS)
        self._used = Counter[str]()
        self._writing: set[str] = set()
        self._scanned_s: float | None = None

    async def keep(self, pieces: Iterable[bytes], *, tenant: str = "") -> BodyAddress:
        """Write the body of a tenant's request, and return its address. In a local folder the file is synced to disk.
        `pieces` are read in another thread. Raises BodiesFull, BodiesUnavailable."""
        return await self._written(pieces, str(int(time.time())), tenant)

    async def keep_answer(self, body: bytes, *, for_s: float, tenant: str = "") -> BodyAddress:
        """Write the body of an answer, and return its address. The body is removed after `for_s` seconds. Raises
        BodiesFull, BodiesUnavailable."""
        return await self._written([body], f"answer-{int(time.time() + for_s)}", tenant)

    async def size(self, kept: BodyAddress) -> int:
        return await self._in_thread(lambda: int(self._files.size(self._path(kept.address)) or 0))

    async def fetch(self, kept: BodyAddress, *, most_bytes: int = MOST_BYTES) -> bytes:
        """Read a body and check its digest. Raises BodyError, BodyTooLarge, BodiesUnavailable."""
        return await self._in_thread(lambda: self._fetch(kept, most_bytes))

    async def fetch_into(self, file: BinaryIO, kept: BodyAddress, *, most_bytes: int = MOST_BYTES) -> int:
        """Copy a body into a file, in pieces, and check its digest. Returns its size in bytes. Raises the errors of
        `fetch`; the file then contains what was copied so far."""
        return await self._in_thread(lambda: self._fetch_into(file, kept, most_bytes))

    async def drop(self, kept: BodyAddress) -> None:
        """Remove the body of a request, if it is in this store. Raises BodiesUnavailable."""
        await self._drop(kept, _REQUEST_NAME)

    async def drop_answer(self, kept: BodyAddress) -> None:
        """Remove the body of an answer, if it is in this store. Raises BodiesUnavailable."""
        await self._drop(kept, _ANSWER_NAME)

    async def sweep(self) -> None:
        self._scanned_s = None
        await self._in_thread(self._scan)

    def holds(self, address: str) -> bool:
        """Whether an address is below the store's URL. One with `..` or with %-encoded characters never is."""
        path = address.removeprefix(f"{self.url}/")
        return path != address and _RELATIVE_PATH.fullmatch(path) is not None

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    @cached_property
    def _files(self) -> Any:
        import fsspec  # type: ignore[import-untyped]  # only here: an application may do without it

        return fsspec.filesystem(self.url.partition("://")[0], skip_instance_cache=True)

    @property
    def _folder(self) -> str:
        scheme, _, path = self.url.partition("://")
        return unquote(path) if scheme == "file" else path

    def _path(self, address: str) -> str:
        if not self.holds(address):
            raise BodyError("the address is not in this store")
        path = self._folder + address[len(self.url) :]
        if self.url.startswith("file:") and not os.path.realpath(path).startswith(
            os.path.join(os.path.realpath(self._folder), "")
        ):
            raise BodyError("a link leads out of the folder")
        return path

    async def _drop(self, kept: BodyAddress, name: re.Pattern[str]) -> None:
        if name.fullmatch(kept.address.removeprefix(f"{self.url}/")):
            with suppress(BodyError):
                await self._in_thread(lambda: self._files.rm_file(self._path(kept.address)))

    async def _written(self, pieces: Iterable[bytes], begin: str, tenant: str) -> BodyAddress:
        try:
            return await self._in_thread(lambda: self._keep(pieces, begin, tenant))
        except BodyError as error:  # nothing was to be found there: so drivers say that there is no such bucket
            raise BodiesUnavailable(
                "the store of bodies cannot be used at present (its folder or bucket is not there)", cause=str(error)
            ) from None

    def _keep(self, pieces: Iterable[bytes], begin: str, tenant: str) -> BodyAddress:
        owner = hashlib.sha256(tenant.encode()).hexdigest()[:OWNER_DIGITS]
        self._scan()
        if self._is_local:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        address = f"{self.url}/{begin}-{owner}{secrets.token_hex(12)}"
        path, digest, size = self._path(address), hashlib.sha256(), 0
        self._writing.add(path)
        try:
            with self._created(path) as file:
                for piece in pieces:
                    size += len(piece)
                    self._check_room(owner, size)
                    digest.update(piece)
                    file.write(piece)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
            if self._is_local:
                sync_folder(self._folder)
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(path)
            raise
        finally:
            self._writing.discard(path)
        self._used[owner] += size
        return BodyAddress(address, digest.hexdigest())

    @property
    def _is_local(self) -> bool:
        return self.url.startswith("file:")

    def _created(self, path: str) -> Any:
        if self._is_local:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        # without a block size, drivers of object stores would collect 50 MB for each part that they upload
        return self._files.open(path, "wb", block_size=5 * PIECE_BYTES)

    def _check_room(self, owner: str, size: int) -> None:
        for every_s in (SCAN_EVERY_S, RESCAN_EVERY_S):  # what was removed since the last scan may make room
            self._scan(every_s)
            free = self._in_all_bytes - self._used.total() - size
            if free >= self._used[owner] + size:
                return
        if free < 0:
            raise BodiesUnavailable(f"the store of bodies is full: it holds {self._in_all_bytes} bytes")
        raise BodiesFull(
            f"the tenant's share of the store for large bodies is full: with this one it would have "
            f"{self._used[owner] + size} bytes there, and {free} of {self._in_all_bytes} would be left for others; "
            "try again when some of its requests with large bodies have ended"
        )

    def _scan(self, every_s: float = SCAN_EVERY_S) -> None:
        now_s = time.monotonic()
        if self._scanned_s is not None and now_s < self._scanned_s + every_s:
            return
        self._scanned_s, used = now_s, Counter[str]()
        with suppress(FileNotFoundError):
            for path, found in self._files.find(self._folder, detail=True).items():
                name = path.rpartition("/")[2]
                if self._is_expired(name):
                    with suppress(FileNotFoundError):  # another process was quicker
                        self._files.rm_file(path)
                elif path not in self._writing:
                    used[_owner_of(name)] += found.get("size") or 0
        self._used = used

    def _is_expired(self, name: str) -> bool:
        now_s = time.time()
        if (request := _REQUEST_NAME.fullmatch(name)) is not None:
            return int(request["kept_s"]) < now_s - self._keep_s
        answer = _ANSWER_NAME.fullmatch(name)
        return answer is not None and int(answer["until_s"]) < now_s

    def _fetch_into(self, file: BinaryIO, kept: BodyAddress, most_bytes: int) -> int:
        digest, size = hashlib.sha256(), 0
        with self._files.open(self._path(kept.address), "rb", block_size=5 * PIECE_BYTES) as source:
            while piece := source.read(PIECE_BYTES):
                size += len(piece)
                if size > most_bytes:
                    raise BodyTooLarge(f"more than {most_bytes} bytes are there")
                digest.update(piece)
                file.write(piece)
        _check_digest(digest.hexdigest(), kept)
        return size

    def _fetch(self, kept: BodyAddress, most_bytes: int) -> bytes:
        path = self._path(kept.address)
        # one byte more than allowed, so that the size is bounded before anything is read
        return verified_body(
            bytes(self._files.cat_file(path, start=0, end=most_bytes + 1)), kept, most_bytes=most_bytes
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # A file system call that hangs occupies its thread even after its caller was cancelled. Further calls wait for
        # the semaphore, not in the executor's queue, because a call that is cancelled there would stay in that queue,
        # and keep its body in memory.
        await self._free_threads.acquire()
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work)
            future.add_done_callback(partial(_release, self._free_threads, loop))
            try:
                return await asyncio.wrap_future(future)
            finally:
                del future  # its error's traceback holds this frame: a circle that would keep the body
        except LanekeeperError:
            raise
        except FileNotFoundError:
            raise BodyError("nothing is there (any more)") from None
        except Exception as error:  # every driver has exceptions of its own
            kind = type(error).__name__
            raise BodiesUnavailable(
                f"the store of bodies cannot be used at present ({kind})",
                cause=f"{kind}: {without_secrets(str(error))}",
            ) from None  # a log of the exception would have the driver's text


def _owner_of(name: str) -> str:
    found = _REQUEST_NAME.fullmatch(name) or _ANSWER_NAME.fullmatch(name)
    return "" if found is None else found["random"][:OWNER_DIGITS]


def verified_body(body: bytes, kept: BodyAddress, *, most_bytes: int) -> bytes:
    """Return a fetched body if it is as announced. Raises BodyError, BodyTooLarge."""
    if len(body) > most_bytes:
        raise BodyTooLarge(f"more than {most_bytes} bytes are there")
    _check_digest(hashlib.sha256(body).hexdigest(), kept)
    return body


def without_secrets(text: str) -> str:
    """Remove from an error's text everything that may be a password, key or signature, and cut it."""
    return _NAMED_SECRET.sub(r"\1…", _IN_URL.sub(r"\1…\2", text[:LONGEST_CAUSE]))


def _check_digest(sha256: str, kept: BodyAddress) -> None:
    if sha256 != kept.sha256:
        raise BodyError("its SHA-256 is another one than announced")


def _release(free: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _: "Future[Any]") -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(free.release)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync a folder to disk, so that the name of a new file in it survives a power failure."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
