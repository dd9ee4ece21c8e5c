"""Keeps the progress of requests that clients follow as rows of a SQLite file: how each was submitted, and entries for
its steps and events. Each method works within a transaction that its caller opened.

A row of `followed` holds a submission. It belongs to the row of `request` with the same identity, and is removed with
that row.
"""

import sqlite3
from collections.abc import Sequence
from typing import Final

from consumers.state.base import Identity
from consumers.state.following import (
    ENTRIES_AT_ONCE,
    EVENT,
    RESTART,
    Entry,
    Look,
    NewEntry,
    Part,
    Refused,
    Submission,
    Submitted,
)
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.requests import FORGET_EVENTS, Requests
from consumers.state.sqlite.rows import Times
from consumers.state.sqlite.together import SIZES, parts

SCHEMA = """
CREATE TABLE followed (
    key INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body_hash BLOB NOT NULL,
    lane TEXT NOT NULL,
    streams INTEGER NOT NULL,
    submitted_ms INTEGER NOT NULL,
    due_ms INTEGER,
    deadline_ms INTEGER NOT NULL,
    last INTEGER NOT NULL,   -- number of the last entry
    events INTEGER NOT NULL, -- number of events since the last restart
    bytes INTEGER NOT NULL,  -- their size
    UNIQUE (tenant, id)
) STRICT;
CREATE TABLE entry (
    followed INTEGER NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (followed, number)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER followed_removed AFTER DELETE ON followed BEGIN DELETE FROM entry WHERE followed = old.key; END;
CREATE TRIGGER request_removed AFTER DELETE ON request
    BEGIN DELETE FROM followed WHERE tenant = old.tenant AND id = old.id; END;
"""
ENTRIES_IN_A_LOOK: Final = 5000
"""The most entries (steps and events) that one call of `look` returns for all its requests together; the next call
returns the rest."""
_FIELDS: Final = "body_hash, lane, streams, submitted_ms, due_ms, deadline_ms"
_ADD: Final = (
    f"INSERT INTO followed (tenant, id, {_FIELDS}, last, events, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0)"
)
_OF: Final = "tenant = ? AND id = ?"
_HOLDS: Final = (
    "SELECT f.key, f.last, f.events, f.bytes FROM request r LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id"
    " WHERE r.tenant = ? AND r.id = ? AND r.token = ? AND (r.status IS NULL OR r.cancelling)"
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
    """Keeps the progress of requests that clients follow, on one SQLite connection. Implements `Following`."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec, requests: Requests) -> None:
        self._execute = connection.execute
        self._executemany = connection.executemany
        self._requests = requests
        self._events = spec.events_per_request
        self._bytes = spec.event_bytes_per_request

    def follow(
        self, at: Times, identity: Identity, submission: Submission, *, first_entry: NewEntry, keep_until_ms: int
    ) -> Submitted:
        row = self._requests.read(at, identity)
        if row is not None and not row.noted:
            return Submitted.CONFLICT if row.body_hash not in (None, submission.body_hash) else Submitted.KNOWN
        before = self.submission(identity)
        if before is not None and row is not None and row.is_deferred:
            return Submitted.KNOWN if before.body_hash == submission.body_hash else Submitted.CONFLICT
        # The request may have ended before it was claimed. Readers have seen its end as entry `last + 1`: skip that.
        ended = self._execute(
            f"DELETE FROM followed WHERE {_OF} RETURNING last + 1", (identity.tenant, identity.id)
        ).fetchone()
        self._requests.defer(at, identity, None, keep_until_ms)
        key = self._add(identity, submission)
        self._write(key, last=ended[0] if ended else 0, events=0, size=0, entries=(first_entry,))
        return Submitted.NEW

    def unfollow(self, at: Times, identity: Identity) -> None:
        row = self._requests.read(at, identity)
        if row is not None and row.is_deferred:
            self._execute(f"DELETE FROM request WHERE {_OF}", (identity.tenant, identity.id))

    def submission(self, identity: Identity) -> Submission | None:
        found = self._execute(f"SELECT {_FIELDS} FROM followed WHERE {_OF}", (identity.tenant, identity.id)).fetchone()
        if found is None:
            return None
        body_hash, lane, streams, submitted_ms, due_ms, deadline_ms = found
        return Submission(
            body_hash=body_hash,
            lane=lane,
            streams=bool(streams),
            submitted_ms=submitted_ms,
            due_ms=due_ms,
            deadline_ms=deadline_ms,
        )

    def append(self, given: Sequence[Part]) -> list[Refused | None]:
        return [self._append(part) for part in given]

    def _append(self, part: Part) -> Refused | None:
        me = part.held.identity
        found = self._execute(_HOLDS, (me.tenant, me.id, part.held.token)).fetchone()
        if found is None:
            return Refused.FENCED
        key, last, events, size = found
        entries = part.entries
        starts = max((at for at, entry in enumerate(entries) if entry.kind == RESTART), default=-1)
        if key is None or starts >= 0:
            events = size = 0
            entries = [entry for at, entry in enumerate(entries) if at >= starts or entry.kind != EVENT]
        events += sum(entry.kind == EVENT for entry in entries)
        size += sum(len(entry.body) for entry in entries)
        if (events > self._events or size > self._bytes) and any(entry.kind == EVENT for entry in entries):
            return Refused.FULL
        if key is None:
            key, last = self._add(me, part.submission), 0
        elif starts >= 0:  # another call has begun, so the events of the call before are not needed
            self._execute(FORGET_EVENTS, (key, EVENT))
        self._write(key, last=last, events=events, size=size, entries=entries)
        return None

    def _add(self, me: Identity, given: Submission) -> int:
        """Store a request as it was submitted, so that clients can follow it. Returns the key of its row."""
        values = (given.body_hash, given.lane, given.streams, given.submitted_ms, given.due_ms, given.deadline_ms)
        key = self._execute(_ADD, (me.tenant, me.id, *values)).lastrowid
        assert key is not None
        return key

    def _write(self, key: int, *, last: int, events: int, size: int, entries: Sequence[NewEntry]) -> None:
        rows = [(key, number, entry.kind, entry.body) for number, entry in enumerate(entries, last + 1)]
        self._executemany("INSERT INTO entry VALUES (?, ?, ?, ?)", rows)
        self._execute(
            "UPDATE followed SET last = ?, events = ?, bytes = ? WHERE key = ?", (last + len(rows), events, size, key)
        )


def look(connection: sqlite3.Connection, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
    """For each request, given with the number of the entry that its client has read last: the entries after it; None if
    there is no news. It only reads, so that the connection may be another than the writer's."""
    found: list[Look | None] = [None] * len(wanted)
    numbered = [(at, identity, after) for at, (identity, after) in enumerate(wanted)]
    left = ENTRIES_IN_A_LOOK
    for batch in parts(numbered):
        values = [value for at, identity, after in batch for value in (at, identity.tenant, identity.id, after)]
        for at, after, key, last, ended, is_known in connection.execute(_NEWS[len(batch)], values).fetchall():
            entries: list[Entry] = []
            if key is not None and last > after:
                read = connection.execute(_ENTRIES, (key, after, max(0, min(ENTRIES_AT_ONCE, left))))
                entries = [Entry._make(row) for row in read]
                left -= len(entries)
            found[at] = Look(entries=entries, last=last, ended=bool(ended), is_known=bool(is_known))
    return found
