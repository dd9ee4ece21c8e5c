"""Removes expired requests from a SQLite file; if the file is too large, the oldest results as well."""

import sqlite3
from typing import Final

from consumers.state.spec import StoreSpec
from consumers.state.sqlite.requests import IS_UNSEEN
from consumers.state.sqlite.rows import Times
from consumers.state.sqlite.shares import UNSEEN, UNTRIED, Shares

STEP_ROWS: Final = 200
"""The maximum number of rows that one step of sweeping (the removal of expired rows) removes."""
ROW_BYTES: Final = 300
"""The size, in bytes, that is assumed for a request's row, not counting its body."""
STEP_BYTES: Final = 32 * 1024 * 1024
"""One step of sweeping (the removal of expired rows) ends when the removed rows have this size, in bytes, so that
claims do not wait long for it."""
UNSEEN_BYTES: Final = 800
"""The size, in bytes, that is assumed for the cancellation of a request that no worker has seen, including the row that
counts it."""
_SIZE: Final = (
    "length(body) + coalesce((SELECT bytes FROM followed f WHERE f.tenant = request.tenant AND f.id = request.id), 0)"
)
_FORGET_UNTRIED: Final = (
    "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms <= ? AND status = 'error' AND lease_ms = 0"
)
"""Removes one result of an untried request (one that ended before any attempt). The condition `keep_ms <= ?` excludes a
request that has run again since its result was counted, because its dead letter was published again. The row of such a
request is kept for longer."""


class Sweeping:
    """Removes expired requests from the SQLite file, and the oldest results if the file is too large."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._max_bytes = spec.max_bytes
        self._untried_at_most = spec.untried_per_tenant
        self._unseen = Shares(connection, UNSEEN)
        self._untried = Shares(connection, UNTRIED)
        self._page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])

    def sweep(self, at: Times) -> int:
        """Take one step of limited size: remove expired requests. If there are none, and the file is too large: if a
        tenant has more results of untried requests (which ended before any attempt) than its limit, remove those above
        the limit; otherwise remove the oldest results. If nothing was removed in this step, remove from the table
        `share`, which counts cancellations and untried results, the items whose time is over. Returns how many rows
        were removed."""
        removed = self._remove("keep_ms <= ? AND lease_ms <= ?", at.today, at.now, up_to_bytes=STEP_BYTES)
        if not removed and (beyond := self._used_bytes() - self._max_bytes) > 0:
            # results, but no cancellations of requests that no worker has received
            ended = f"status IS NOT NULL AND lease_ms <= ? AND NOT ({IS_UNSEEN})"
            removed = self._remove_untried() or self._remove(ended, at.now, up_to_bytes=min(beyond, STEP_BYTES))
        return removed or self._unseen.forget_ended(at.today) + self._untried.forget_ended(at.today)

    def _used_bytes(self) -> int:
        """The size of the SQLite file without free pages, and without cancellations of requests that no worker has
        seen: these have a limit of their own."""
        (pages,) = self._execute("PRAGMA page_count").fetchone()
        (free,) = self._execute("PRAGMA freelist_count").fetchone()
        return int(pages - free) * self._page_bytes - UNSEEN_BYTES * self._unseen.used()

    def _remove_untried(self) -> int:
        """Look for the tenant that has the most results of untried requests (ended before any attempt). If it has more
        than its limit, remove the oldest of them, down to the limit, but at most `STEP_ROWS`. Returns their number,
        including those whose row no longer existed."""
        tenant, used = self._untried.most()
        surplus = min(used - self._untried_at_most, STEP_ROWS)
        for _ in range(surplus):
            if (oldest := self._untried.forget_oldest(tenant)) is not None:
                self._execute(_FORGET_UNTRIED, (tenant, *oldest))
        return max(surplus, 0)

    def _remove(self, which: str, *values: int, up_to_bytes: int) -> int:
        """Remove the requests that the SQL condition `which` selects, the oldest first. At most `STEP_ROWS` are
        removed, and none after their size has reached `up_to_bytes`. The others are left for the next `sweep`. Returns
        how many were removed."""
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
