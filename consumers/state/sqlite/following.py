"""Submissions and entries as rows of a SQLite file: functions over an open transaction.

A `followed` row belongs to the `request` row of the same identity, and is removed with it.
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
    Part,
    Refused,
    Submission,
    Submitted,
    Told,
)
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.requests import Requests, Times
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
    events INTEGER NOT NULL, -- since the last restart; their bytes
    bytes INTEGER NOT NULL,
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
"""In all: what is left out comes with the next look."""
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
    """Implements `Following` on one SQLite connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec, requests: Requests) -> None:
        self._execute = connection.execute
        self._executemany = connection.executemany
        self._requests = requests
        self._events = spec.events_per_request
        self._bytes = spec.event_bytes_per_request

    def follow(
        self, at: Times, identity: Identity, submission: Submission, *, told: Told, keep_until_ms: int
    ) -> Submitted:
        known, body_hash = self._requests.body_hash(at, identity)
        if known:
            return Submitted.CONFLICT if body_hash not in (None, submission.body_hash) else Submitted.KNOWN
        me = (identity.tenant, identity.id)
        before = self.submission(identity)
        if before is not None and self._requests.is_deferred(at, identity):
            return Submitted.KNOWN if before.body_hash == submission.body_hash else Submitted.CONFLICT
        self._execute(f"DELETE FROM followed WHERE {_OF}", me)
        self._requests.defer(at, identity, None, keep_until_ms)
        key = self._add(identity, submission)
        self._write(key, last=0, events=0, size=0, told=(told,))
        return Submitted.NEW

    def unfollow(self, at: Times, identity: Identity) -> None:
        if self._requests.is_deferred(at, identity):
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
        return [self._append(each) for each in given]

    def look(self, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
        found: list[Look | None] = [None] * len(wanted)
        numbered = [(at, me, after) for at, (me, after) in enumerate(wanted)]
        left = ENTRIES_IN_A_LOOK
        for some in parts(numbered):
            values = [value for at, me, after in some for value in (at, me.tenant, me.id, after)]
            for at, after, key, last, ended, is_known in self._execute(_NEWS[len(some)], values).fetchall():
                entries: list[Entry] = []
                if key is not None and last > after:
                    read = self._execute(_ENTRIES, (key, after, max(0, min(ENTRIES_AT_ONCE, left))))
                    entries = [Entry._make(each) for each in read]
                    left -= len(entries)
                found[at] = Look(entries=entries, last=last, ended=bool(ended), is_known=bool(is_known))
        return found

    def _append(self, part: Part) -> Refused | None:
        me = part.held.identity
        found = self._execute(_HOLDS, (me.tenant, me.id, part.held.token)).fetchone()
        if found is None:
            return Refused.FENCED
        key, last, events, size = found
        if key is None:
            key, last, events, size = self._add(me, part.submission), 0, 0, 0
        told = part.told
        starts = max((at for at, each in enumerate(told) if each.kind == RESTART), default=-1)
        if starts >= 0:  # nobody needs the events before it
            self._execute("DELETE FROM entry WHERE followed = ? AND kind = ?", (key, EVENT))
            told = [each for at, each in enumerate(told) if at >= starts or each.kind != EVENT]
            events = size = 0
        events += sum(each.kind == EVENT for each in told)
        size += sum(len(each.body) for each in told)
        if (events > self._events or size > self._bytes) and any(each.kind == EVENT for each in told):
            return Refused.FULL
        self._write(key, last=last, events=events, size=size, told=told)
        return None

    def _add(self, me: Identity, said: Submission) -> int:
        values = (said.body_hash, said.lane, said.streams, said.submitted_ms, said.due_ms, said.deadline_ms)
        key = self._execute(_ADD, (me.tenant, me.id, *values)).lastrowid
        assert key is not None
        return key

    def _write(self, key: int, *, last: int, events: int, size: int, told: Sequence[Told]) -> None:
        rows = [(key, number, each.kind, each.body) for number, each in enumerate(told, last + 1)]
        self._executemany("INSERT INTO entry VALUES (?, ?, ?, ?)", rows)
        self._execute(
            "UPDATE followed SET last = ?, events = ?, bytes = ? WHERE key = ?", (last + len(rows), events, size, key)
        )
