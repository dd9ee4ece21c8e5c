"""The workers' store, with methods for faults: a shared file, or a Redis."""

import asyncio
import random
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.faults.proxy import LOOPBACK, Proxy
from tests.support.redis import RedisServer, redis_server

SIZE_MB = 64
"""The size of the separate file system for the store's file, if one can be mounted (as root)."""


class Store(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def is_a(self) -> frozenset[str]:
        """The kind of store, for faults that need one."""
        ...


@dataclass(frozen=True, slots=True)
class FileStore:
    """An SQLite file that all workers of this machine share."""

    folder: Path
    is_mounted: bool

    @property
    def is_a(self) -> frozenset[str]:
        return frozenset({"file", "mount"} if self.is_mounted else {"file"})

    @property
    def path(self) -> Path:
        return self.folder / "store.sqlite3"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    async def lock(self, lasts_s: float) -> None:
        """Hold the lock that writers need, from outside. Does nothing if the file does not exist."""
        with suppress(sqlite3.OperationalError):
            connection = await asyncio.to_thread(self._locked)
            try:
                await asyncio.sleep(lasts_s)
            finally:
                connection.close()

    async def fill(self, lasts_s: float) -> None:
        """Fill its file system."""
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 65_536)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            ballast.unlink()

    def delete(self) -> None:
        """Delete the file while it is open, as an operator might."""
        for each in self.folder.glob("store.sqlite3*"):
            each.unlink(missing_ok=True)

    def corrupt(self, rng: random.Random) -> None:
        """Overwrite the beginning of the file."""
        with self.path.open("r+b") as file:
            file.write(rng.randbytes(4096))

    def _locked(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN EXCLUSIVE")
        return connection


@dataclass(frozen=True, slots=True)
class RedisStore:
    """A Redis, and the connection to it."""

    server: RedisServer
    line: Proxy

    @property
    def is_a(self) -> frozenset[str]:
        return frozenset({"redis"})

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.line.port}/0"


@asynccontextmanager
async def redis_store() -> AsyncIterator[RedisStore]:
    """A Redis for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        async with Proxy(LOOPBACK, server.port) as line:
            yield RedisStore(server, line)


@asynccontextmanager
async def file_store() -> AsyncIterator[FileStore]:
    """A folder for the store, on a small separate file system if possible."""
    folder = Path(tempfile.mkdtemp(prefix="lanekeeper-store-"))
    is_mounted = await _mount("-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=700", "faults", str(folder))
    try:
        yield FileStore(folder, is_mounted)
    finally:
        if is_mounted:
            # Blocking, so that no cancellation interrupts it.
            subprocess.run(["umount", "--lazy", str(folder)], check=False)  # noqa: ASYNC221
        shutil.rmtree(folder, ignore_errors=True)


async def _mount(*words: str) -> bool:
    done = await asyncio.to_thread(subprocess.run, ["mount", *words], check=False, capture_output=True)
    return done.returncode == 0
