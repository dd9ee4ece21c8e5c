"""Bodies outside the broker: one that is too large for a message is kept in a store, and the message has its address
and digest.

The store is a folder of any file system that fsspec knows: `file:///var/lib/lanekeeper/bodies`, `s3://bucket/bodies`.
Each body has a name of its own that cannot be guessed, so whoever knows an address may read what is there.
"""

import asyncio
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from lanekeeper.contract.messages import Kept
from lanekeeper.contract.problems import LanekeeperError

MIB: Final = 1024 * 1024
OVER_BYTES: Final = MIB
"""Larger bodies are kept beside the broker."""
MOST_BYTES: Final = 32 * MIB
"""The largest body: as large as Anthropic takes."""
IN_ALL_BYTES: Final = 10 * 1024 * MIB
KEEP_S: Final = 7 * 86_400.0
PIECE_BYTES: Final = MIB
THREADS: Final = 4
"""How many bodies are read or written at a time: each blocks a thread."""
LOOK_EVERY_S: Final = 60.0
_RELATIVE: Final = re.compile(r"[A-Za-z0-9_=@+-][A-Za-z0-9._=@+-]*(/[A-Za-z0-9_=@+-][A-Za-z0-9._=@+-]*)*")
_OWN: Final = re.compile(r"(?P<kept_s>[0-9]{10,12})-[0-9a-f]{32}")
T = TypeVar("T")


class BodyError(LanekeeperError):
    """A body is not there, or is not what was announced: trying again does not help. Holds no content."""


class BodyTooLarge(BodyError):
    """A body is larger than it may be."""


class BodiesUnavailable(LanekeeperError):
    """The store of bodies cannot be used at present, or is full."""


class BodyStore:
    """Keeps bodies below `url`, together at most `in_all_bytes`; those older than `keep_s` are removed.

    The sizes are looked up at most once a minute, when a body is kept. Several processes may use the same folder.
    """

    def __init__(self, url: str, *, in_all_bytes: int = IN_ALL_BYTES, keep_s: float = KEEP_S) -> None:
        self.url = url.rstrip("/")
        self._in_all_bytes = in_all_bytes
        self._keep_s = keep_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bodies")
        self._bytes = 0
        self._looked_s: float | None = None

    async def keep(self, pieces: Iterable[bytes]) -> Kept:
        """Write a body, durably where the file system can. `pieces` is read in a thread. Raises BodiesUnavailable."""
        return await self._in_thread(lambda: self._keep(pieces))

    async def fetch(self, kept: Kept, *, most_bytes: int = MOST_BYTES) -> bytes:
        """Read a body and check it. Raises BodyError, BodyTooLarge, BodiesUnavailable."""
        return await self._in_thread(lambda: self._fetch(kept, most_bytes))

    async def drop(self, kept: Kept) -> None:
        """Remove a body that was kept here; what others put here, and what is gone, is left alone. Raises
        BodiesUnavailable."""
        if self.holds(kept.address) and _OWN.fullmatch(kept.address.removeprefix(f"{self.url}/")):
            with suppress(BodyError):
                await self._in_thread(lambda: self._files.rm_file(self._path(kept.address)))

    def holds(self, address: str) -> bool:
        """Whether an address is below this store's: by its text, with neither `..` nor anything to decode in it."""
        return address.startswith(f"{self.url}/") and _RELATIVE.fullmatch(address[len(self.url) + 1 :]) is not None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _files(self) -> Any:
        import fsspec  # type: ignore[import-untyped]  # only here: an application may do without it

        return fsspec.filesystem(self.url.partition("://")[0], skip_instance_cache=True)

    @property
    def _folder(self) -> str:
        scheme, _, path = self.url.partition("://")
        return unquote(path) if scheme == "file" else path

    def _path(self, address: str) -> str:
        path = self._folder + address[len(self.url) :]
        if self.url.startswith("file:") and not os.path.realpath(path).startswith(
            os.path.join(os.path.realpath(self._folder), "")
        ):
            raise BodyError("a link leads out of the folder")
        return path

    def _keep(self, pieces: Iterable[bytes]) -> Kept:
        self._look()
        address = f"{self.url}/{int(time.time())}-{secrets.token_hex(16)}"
        path, digest, size = self._path(address), hashlib.sha256(), 0
        try:
            # object stores would take 50 MB a part
            with self._files.open(path, "wb", block_size=5 * PIECE_BYTES) as file:
                for piece in pieces:
                    size += len(piece)
                    if self._bytes + size > self._in_all_bytes:
                        raise BodiesUnavailable(f"the store of bodies is full: it holds {self._in_all_bytes} bytes")
                    digest.update(piece)
                    file.write(piece)
                if self.url.startswith("file:"):
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(path)
            raise
        self._bytes += size
        return Kept(address, digest.hexdigest())

    def _look(self) -> None:
        """Find out how much is kept, and remove what is too old."""
        now_s = time.monotonic()
        if self._looked_s is not None and now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s, self._bytes = now_s, 0
        if self.url.startswith("file:"):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        before_s = time.time() - self._keep_s
        with suppress(FileNotFoundError):
            for path, found in self._files.find(self._folder, detail=True).items():
                own = _OWN.fullmatch(path.rsplit("/", 1)[-1])
                if own is not None and int(own["kept_s"]) < before_s:
                    self._files.rm_file(path)
                else:
                    self._bytes += found.get("size") or 0

    def _fetch(self, kept: Kept, most_bytes: int) -> bytes:
        if not self.holds(kept.address):
            raise BodyError("the address is not in this store")
        path = self._path(kept.address)
        # one byte more than allowed, so that the size is bounded before anything is read
        return checked(bytes(self._files.cat_file(path, start=0, end=most_bytes + 1)), kept, most_bytes=most_bytes)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except LanekeeperError:
            raise
        except FileNotFoundError:
            raise BodyError("nothing is there (any more)") from None
        except Exception as error:  # every driver has exceptions of its own
            raise BodiesUnavailable(f"the store of bodies: {type(error).__name__}: {error}") from error


def checked(body: bytes, kept: Kept, *, most_bytes: int) -> bytes:
    """The body, if it is what was announced. Raises BodyError, BodyTooLarge."""
    if len(body) > most_bytes:
        raise BodyTooLarge(f"more than {most_bytes} bytes are there")
    if hashlib.sha256(body).hexdigest() != kept.sha256:
        raise BodyError("its SHA-256 is another one than announced")
    return body
