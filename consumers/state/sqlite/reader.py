"""Reads the SQLite file for clients that follow requests, over its own connection and in its own thread. So readers do
not delay claims, and commits that wait for the disk do not delay readers."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from consumers.state.base import StoreUnavailable
from consumers.state.sqlite.file import connect, explain, inode

T = TypeVar("T")


class Reader:
    """Reads the SQLite file in a thread of its own, so that reads do not wait for writes. It opens the file at the
    first read, and again after an error, or when the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store reader")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    async def do(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Run `read` within one transaction, on the latest state of the file, and return its result. Raises
        StoreUnavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read, read)

    def close(self) -> None:
        """Have the connection closed after the read in progress, and return at once."""
        self._executor.submit(self._shut)
        self._executor.shutdown(wait=False)

    # ---- in the thread ----

    def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = self._usable()
            connection.execute("BEGIN")
            found = read(connection)
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self._shut()
            raise StoreUnavailable(explain(error, self._path)) from error
        except BaseException:
            self._shut()
            raise
        return found

    def _usable(self) -> sqlite3.Connection:
        file = inode(self._path)
        if self._connection is not None and file != self._file:
            self._shut()
        if self._connection is None:
            self._connection, self._file = connect(self._path), file
            self._connection.execute("PRAGMA query_only=1")
        return self._connection

    def _shut(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
