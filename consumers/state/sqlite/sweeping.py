"""Removes expired requests from a SQLite file; if the file is too large, the oldest results as well."""

import sqlite3
from typing import Final

from consumers.state.spec import StoreSpec
from consumers.state.sqlite.bounded import IS_UNSEEN, Bounded
from consumers.state.sqlite.requests import STEP_ROWS
from consumers.state.sqlite.rows import Times

ROW_BYTES: Final = 300
"""The size, in bytes, that is assumed for a row without its body."""
STEP_BYTES: Final = 32 * 1024 * 1024
"""The most bytes that one step of sweeping (removing expired rows) removes, so that claims do not wait long for it."""
_SIZE: Final = (
    "length(body) + coalesce((SELECT bytes FROM followed f WHERE f.tenant = request.tenant AND f.id = request.id), 0)"
)


class Sweeping:
    """Removes expired requests from the SQLite file, and the oldest results if the file is too large."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._max_bytes = spec.max_bytes
        self._bounded = Bounded(connection, spec)
        self._page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])

    def sweep(self, at: Times) -> int:
        """Take one step of limited size: remove expired requests. If there are none, and the file is too large, remove
        the requests by which a tenant exceeds its limit, or else the oldest results. If nothing was removed, remove
        cancellations of requests that no worker has received. Returns how many rows were removed."""
        removed = self._remove("keep_ms <= ? AND lease_ms <= ?", at.today, at.now, up_to_bytes=STEP_BYTES)
        if not removed and (beyond := self._used_bytes() - self._max_bytes) > 0:
            # results, but no cancellations of requests that no worker has received
            ended = f"status IS NOT NULL AND lease_ms <= ? AND NOT ({IS_UNSEEN})"
            removed = self._bounded.remove_surplus() or self._remove(ended, at.now, up_to_bytes=min(beyond, STEP_BYTES))
        return removed or self._bounded.sweep(at.today)

    def _used_bytes(self) -> int:
        """The size of the SQLite file without free pages, and without cancellations of requests that no worker has
        seen: these have a limit of their own."""
        (pages,) = self._execute("PRAGMA page_count").fetchone()
        (free,) = self._execute("PRAGMA freelist_count").fetchone()
        return int(pages - free) * self._page_bytes - self._bounded.unseen_bytes

    def _remove(self, which: str, *values: int, up_to_bytes: int) -> int:
        """Remove the requests that the SQL condition `which` selects, the oldest first: at most `up_to_bytes` and
        `STEP_ROWS`. The others are left for the next `sweep`."""
        found = self._execute(
            f"SELECT rowid, {_SIZE} FROM request WHERE {which} ORDER BY keep_ms LIMIT {STEP_ROWS}", values
        ).fetchall()
        size = count = 0
        for rowid, body_bytes in found:
            if size >= up_to_bytes:
                break
            self._execute("DELETE FROM request WHERE rowid = ?", (rowid,))
            size += ROW_BYTES + (body_bytes or 0)
            count += 1
        return count
