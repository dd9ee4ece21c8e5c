"""Removes from a SQLite file what is no longer kept, in steps."""

import sqlite3
from typing import Final

from consumers.state.spec import StoreSpec
from consumers.state.sqlite.bounded import IS_UNSEEN, Bounded
from consumers.state.sqlite.requests import STEP_ROWS, Times

ROW_BYTES: Final = 300  # the rough size of a row without its body
STEP_BYTES: Final = 32 * 1024 * 1024
"""The most that one step of sweeping removes, so that claims do not wait long for it."""
_SIZE: Final = (
    "length(body) + coalesce((SELECT bytes FROM followed f WHERE f.tenant = request.tenant AND f.id = request.id), 0)"
)


class Sweeping:
    """Sweeps the requests, over one connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._max_bytes = spec.max_bytes
        self._bounded = Bounded(connection, spec)
        self._page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])

    def sweep(self, at: Times) -> int:
        """One step: remove results whose keeping time is over; else, if the file is too large, a tenant's surplus or
        the oldest."""
        removed = self._remove("keep_ms <= ? AND lease_ms <= ?", at.today, at.now, up_to_bytes=STEP_BYTES)
        if not removed and (beyond := self._used_bytes() - self._max_bytes) > 0:
            ended = f"status IS NOT NULL AND lease_ms <= ? AND NOT ({IS_UNSEEN})"  # not cancellations
            removed = self._bounded.remove_surplus() or self._remove(ended, at.now, up_to_bytes=min(beyond, STEP_BYTES))
        return removed or self._bounded.sweep(at.today)

    def _used_bytes(self) -> int:
        """The used bytes without unseen cancellations, which have their own limit and must not displace results."""
        (pages,) = self._execute("PRAGMA page_count").fetchone()
        (free,) = self._execute("PRAGMA freelist_count").fetchone()
        return int(pages - free) * self._page_bytes - self._bounded.unseen_bytes

    def _remove(self, which: str, *values: int, up_to_bytes: int) -> int:
        """Remove the oldest first, up to a number of bytes and rows; the rest is left for the next step."""
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
