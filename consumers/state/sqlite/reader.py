"""Reads the progress of followed requests from the SQLite file, over its own connection and in its own thread. So
readers do not delay claims, and commits that wait for the disk do not delay readers."""

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from consumers.state.base import Identity, StoreUnavailable
from consumers.state.following import ENTRIES_AT_ONCE, Entry, Look
from consumers.state.sqlite.file import connect, explain, inode
from consumers.state.sqlite.together import SIZES, parts

ENTRIES_IN_A_LOOK: Final = 5000
"""The maximum number of entries (steps and events) that one call of `look` returns for all its requests together; the
next call returns the rest."""
_NEWS: Final = {
    size: (
        "SELECT asked.column1, asked.column4, f.key, coalesce(f.last, 0),"
        " r.status IS NOT NULL AND NOT r.cancelling, r.token IS NOT NULL"
        f" FROM (VALUES {', '.join(['(?, ?, ?, ?)'] * size)}) AS asked"
        " LEFT JOIN request r ON r.tenant = asked.column2 AND r.id = asked.column3"
        " LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id"
        " WHERE f.last > asked.column4 OR r.token IS NULL OR (r.status IS NOT NULL AND NOT r.cancelling)"
    )
    for size in SIZES
}
_ENTRIES: Final = "SELECT number, kind, body FROM entry WHERE followed = ? AND number > ? ORDER BY number LIMIT ?"


class Reader:
    """Reads the progress of followed requests from the SQLite file. It opens the file at the first read, and opens it
    again after an error, or when the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store reader")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
        """Implements `Following.look`."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._look, wanted)

    def close(self) -> None:
        """Return at once; the connection is closed when the read that is in progress has ended."""
        self._executor.submit(self._shut)
        self._executor.shutdown(wait=False)

    # ---- in the thread ----

    def _look(self, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
        try:
            connection = self._usable()
            connection.execute("BEGIN")
            found = _look(connection, wanted)
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


def _look(connection: sqlite3.Connection, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
    found: list[Look | None] = [None] * len(wanted)
    numbered = [(at, identity, after) for at, (identity, after) in enumerate(wanted)]
    left = ENTRIES_IN_A_LOOK
    for batch in parts(numbered):
        values = [value for at, identity, after in batch for value in (at, identity.tenant, identity.id, after)]
        for at, after, key, last, ended, is_known in connection.execute(_NEWS[len(batch)], values).fetchall():
            entries: list[Entry] = []
            if last > after:
                read = connection.execute(_ENTRIES, (key, after, min(ENTRIES_AT_ONCE, left)))
                entries = [Entry._make(row) for row in read]
                left -= len(entries)
            found[at] = Look(entries=entries, last=last, ended=bool(ended), is_known=bool(is_known))
    return found
