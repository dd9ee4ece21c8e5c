"""Keeps the progress of requests that clients follow as rows of a SQLite file: how each was submitted, and entries for
its steps and events. Each method works within a transaction that its caller opened.

A row of the table `followed` is a submission, that is, how a client submitted a request. It belongs to the row of
`request` with the same identity, and is removed together with that row.
"""

import sqlite3
from collections.abc import Sequence
from typing import Final

from consumers.state.base import Identity
from consumers.state.following import (
    EVENT,
    RESTART,
    NewEntry,
    Part,
    Refused,
    Submission,
    Submitted,
)
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.requests import FORGET_EVENTS, Requests
from consumers.state.sqlite.rows import Times

SCHEMA = """
CREATE TABLE followed (
    key INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body_hash BLOB NOT NULL,
    lane TEXT NOT NULL,
    streams INTEGER NOT NULL, -- not used
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
_FIELDS: Final = ", ".join(Submission._fields)
_ADD: Final = (
    f"INSERT INTO followed (streams, last, events, bytes, tenant, id, {_FIELDS})"
    " VALUES (0, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?)"
)
_OF: Final = "tenant = ? AND id = ?"
_HOLDS: Final = (
    "SELECT f.key, f.last, f.events, f.bytes FROM request r LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id"
    " WHERE r.tenant = ? AND r.id = ? AND r.token = ? AND (r.status IS NULL OR r.cancelling)"
)


class Followed:
    """Keeps the progress of requests that clients follow, on one SQLite connection. Implements `Following`, except
    `look` (`reader.py`)."""

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
        return None if found is None else Submission._make(found)

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
        key = self._execute(_ADD, (me.tenant, me.id, *given)).lastrowid
        assert key is not None
        return key

    def _write(self, key: int, *, last: int, events: int, size: int, entries: Sequence[NewEntry]) -> None:
        rows = [(key, number, entry.kind, entry.body) for number, entry in enumerate(entries, last + 1)]
        self._executemany("INSERT INTO entry VALUES (?, ?, ?, ?)", rows)
        self._execute(
            "UPDATE followed SET last = ?, events = ?, bytes = ? WHERE key = ?", (last + len(rows), events, size, key)
        )
