"""Keeps the progress of requests that clients follow as rows of a SQLite file, and reads what is polled.

A row of the table `followed` is a submission. It belongs to the row of `request` with the same identity, and is removed
together with that row.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from consumers.state import base
from consumers.state.base import EVENT, RESTART, Identity, NewEntry, Part, StoreUnavailable, Submission
from consumers.state.sqlite.file import connect, explain, inode
from consumers.state.sqlite.requests import FORGET_EVENTS, SIZES, Requests, Times, parts

ENTRIES_IN_A_LOOK: Final = 5000
"""How many entries one `look` returns for all its requests; the next returns the rest."""
T = TypeVar("T")
_PAUSES: Final = "SELECT body FROM pause WHERE until_ms IS NULL OR until_ms > ?"
_FIELDS: Final = ", ".join(Submission._fields)
_ADD: Final = (
    f"INSERT INTO followed (streams, last, events, bytes, tenant, id, {_FIELDS})"
    " VALUES (0, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?)"
)
_OF: Final = "tenant = ? AND id = ?"
_HOLDS: Final = (
    "SELECT f.key, f.last, f.events, f.bytes FROM request r LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id"
    " WHERE r.tenant = ? AND r.id = ? AND r.token = ? AND r.lease_ms > 0"
    " AND (r.status IS NULL OR r.cancelling)"
)
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


class Followed:
    """Implements `Following`, except `look` (`Reader`), on one SQLite connection, within a transaction that the caller
    opened."""

    def __init__(self, connection: sqlite3.Connection, spec: base.StoreSpec, requests: Requests) -> None:
        self._execute = connection.execute
        self._executemany = connection.executemany
        self._requests = requests
        self._events = spec.events_per_request
        self._bytes = spec.event_bytes_per_request

    def follow(
        self, at: Times, identity: Identity, submission: Submission, *, first_entry: NewEntry, keep_until_ms: int
    ) -> base.Submitted:
        row = self._requests.read(at, identity)
        if row is not None and not row.noted:
            return (
                base.Submitted.CONFLICT if row.body_hash not in (None, submission.body_hash) else base.Submitted.KNOWN
            )
        before = self.submission(identity)
        if before is not None and row is not None and row.is_deferred:
            return base.Submitted.KNOWN if before.body_hash == submission.body_hash else base.Submitted.CONFLICT
        # The request may have ended before it was claimed. Readers have seen its end as entry `last + 1`: skip that.
        ended = self._execute(
            f"DELETE FROM followed WHERE {_OF} RETURNING last + 1", (identity.tenant, identity.id)
        ).fetchone()
        self._requests.defer(at, identity, None, keep_until_ms)
        key = self._add(identity, submission)
        last, size = ended[0] if ended else 0, len(first_entry.body)
        self._write(key, last=last, events=0, size=size, entries=(first_entry,))
        return base.Submitted.NEW

    def unfollow(self, at: Times, identity: Identity) -> None:
        row = self._requests.read(at, identity)
        if row is not None and row.is_deferred:
            self._execute(f"DELETE FROM request WHERE {_OF}", (identity.tenant, identity.id))

    def submission(self, identity: Identity) -> Submission | None:
        found = self._execute(f"SELECT {_FIELDS} FROM followed WHERE {_OF}", (identity.tenant, identity.id)).fetchone()
        return None if found is None else Submission._make(found)

    def append(self, part: Part) -> base.Refused | None:
        me = part.held.identity
        found = self._execute(_HOLDS, (me.tenant, me.id, part.held.token)).fetchone()
        if found is None:
            return base.Refused.FENCED
        key, last, events, size = found
        entries = part.entries
        starts = max((at for at, entry in enumerate(entries) if entry.kind == RESTART), default=-1)
        if key is None or starts >= 0:
            events = size = 0
            entries = [entry for at, entry in enumerate(entries) if at >= starts or entry.kind != EVENT]
        new_events = sum(entry.kind == EVENT for entry in entries)
        events, size = events + new_events, size + sum(len(entry.body) for entry in entries)
        if new_events and (events > self._events or size > self._bytes):
            return base.Refused.FULL
        if key is None:
            key, last = self._add(me, part.submission), 0
        elif starts >= 0:  # another call has begun, so the events of the call before are not needed
            self._execute(FORGET_EVENTS, (key, EVENT))
        self._write(key, last=last, events=events, size=size, entries=entries)
        return None

    def _add(self, me: Identity, given: Submission) -> int:
        key = self._execute(_ADD, (me.tenant, me.id, *given)).lastrowid
        assert key is not None
        return key

    def _write(self, key: int, *, last: int, events: int, size: int, entries: Sequence[NewEntry]) -> None:
        rows = [(key, number, entry.kind, entry.body) for number, entry in enumerate(entries, last + 1)]
        self._executemany("INSERT INTO entry VALUES (?, ?, ?, ?)", rows)
        self._execute(
            "UPDATE followed SET last = ?, events = ?, bytes = ? WHERE key = ?", (last + len(rows), events, size, key)
        )


class Reader:
    """Implements `Following.look` and `StoredPauses.pauses`, over its own connection and in its own thread. So readers
    do not delay claims, and commits that wait for the disk do not delay readers. It opens the file at the first read,
    and again after an error, or when the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store reader")
        self._is_closed = False
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> list[base.Look | None]:
        return await self._do(lambda connection: _look(connection, wanted))

    async def pauses(self, today: int) -> list[base.Pause]:
        rows = await self._do(lambda connection: connection.execute(_PAUSES, (today,)).fetchall())
        return base.pauses_in(body for (body,) in rows)

    async def _do(self, read: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise StoreUnavailable(f"{self._path} is not used any more: this store was closed")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read, read)

    def close(self) -> None:
        """Return at once; the connection is closed when the read that is in progress has ended."""
        if not self._is_closed:
            self._is_closed = True
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
        if file != self._file:
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


def _look(connection: sqlite3.Connection, wanted: Sequence[tuple[Identity, int]]) -> list[base.Look | None]:
    found: list[base.Look | None] = [None] * len(wanted)
    numbered = [(at, identity, after) for at, (identity, after) in enumerate(wanted)]
    left = ENTRIES_IN_A_LOOK
    for batch in parts(numbered):
        values = [value for at, identity, after in batch for value in (at, identity.tenant, identity.id, after)]
        for at, after, key, last, ended, is_known in connection.execute(_NEWS[len(batch)], values).fetchall():
            entries: list[base.Entry] = []
            if last > after:
                read = connection.execute(_ENTRIES, (key, after, min(base.ENTRIES_AT_ONCE, left)))
                entries = [base.Entry._make(row) for row in read]
                left -= len(entries)
            found[at] = base.Look(entries=entries, last=last, ended=bool(ended), is_known=bool(is_known))
    return found
