"""Claims and results as rows of a SQLite file: functions over an open transaction, which never wait.

Each function reads a row once and writes it at most once. Times: `now` is since boot, `today` since 1970, both in ms.
"""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from consumers.state.base import (
    Cancelling,
    Completion,
    Conflict,
    Copy,
    Ended,
    Found,
    Granted,
    Held,
    Identity,
    Running,
    Stop,
)
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.bounded import Bounded

CANCELLED = "cancelled"
"""The code of `PROBLEMS`."""
as_json = json.JSONEncoder(ensure_ascii=False).encode
"""Made once: `json.dumps` makes an encoder for each call with an option."""
STEP_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Read once for all operations of a transaction."""

    now: int
    today: int


class Row(NamedTuple):
    """One request."""

    body_hash: bytes | None
    mark: bytes | None
    token: int
    lease_ms: int
    claimed_ms: int
    attempts: int
    keep_ms: int
    noted: int
    cancelling: int
    nonce: bytes | None = None
    deaths: int = 0
    due_ms: int | None = None
    status: Literal["ok", "error"] | None = None
    code: str | None = None
    headers: str | None = None
    ended_ms: int | None = None
    body: bytes | None = None

    @property
    def ended(self) -> bool:
        return self.status is not None and not self.cancelling

    @property
    def is_deferred(self) -> bool:
        """It waits until it is due, and no worker has claimed it yet."""
        return bool(self.noted) and self.status is None

    def is_held_against(self, copy: Copy, now: int) -> bool:
        """True if a live lease holds the request, unless this copy is the holder's own message, redelivered."""
        return self.lease_ms > now and not (copy.redelivered and self.mark == copy.mark)

    def ended_by(self, completion: Completion) -> "Row":
        return self._replace(
            status=completion.status,
            code=completion.code,
            headers=as_json(dict(completion.headers)),
            ended_ms=completion.ended_ms,
            body=completion.body,
        )

    def completion(self) -> Completion:
        assert self.status is not None
        assert self.ended_ms is not None
        return Completion(
            status=self.status,
            code=self.code or "",
            body=self.body or b"",
            headers=json.loads(self.headers or "{}"),
            ended_ms=self.ended_ms,
        )


_READ = f"SELECT {', '.join(Row._fields)} FROM request WHERE tenant = ? AND id = ?"
_WRITE = (
    f"INSERT INTO request (tenant, id, {', '.join(Row._fields)}) VALUES (?, ?{', ?' * len(Row._fields)}) "
    f"ON CONFLICT (tenant, id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in Row._fields)}"
)
_FOLLOWED = "SELECT 1 FROM followed WHERE tenant = ? AND id = ?"
_RENEW = "UPDATE request SET lease_ms = ? WHERE tenant = ? AND id = ?"


class Requests:
    """Implements `Claims` and `Results` on one SQLite connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)
        self._cancelled_ms = round(spec.cancelled_s * 1000)
        self._bounded = Bounded(connection, spec)

    def claim(self, at: Times, identity: Identity, copy: Copy) -> Granted | Running | Ended | Conflict:
        row = self._read(at, identity)
        if row is None or row.noted or _runs_again(row, copy):
            followed = row is not None and self._is_followed(identity)
            return self._grant(at, identity, copy, token=_next_token(at, row), followed=followed)
        if row.body_hash not in (None, copy.body_hash):
            return Conflict()
        if row.ended:
            return Ended(completion=row.completion(), same_copy=row.mark in (None, copy.mark))
        if row.lease_ms and copy.nonce and row.nonce == copy.nonce:  # granted before, and the answer was lost
            return Granted(token=row.token, deaths=row.deaths, followed=self._is_followed(identity))
        if row.is_held_against(copy, at.now):
            return Running(for_ms=at.now - row.claimed_ms)
        if row.cancelling:  # its holder died before it ended the request
            self._end_as_cancelled(at, identity, row)
            return Ended(completion=row.completion(), same_copy=True)
        deaths = row.deaths + bool(row.lease_ms)
        followed = self._is_followed(identity)
        return self._grant(
            at, identity, copy, token=row.token + 1, attempts=row.attempts, deaths=deaths, followed=followed
        )

    def renew(self, at: Times, held: Sequence[Held]) -> dict[Held, Stop]:
        stops = {}
        for each in held:
            row = self._read(at, each.identity)
            if row is None:  # the store has forgotten the claim: nobody else holds it
                continue
            if row.token != each.token:
                stops[each] = Stop.FENCED
                continue
            if row.cancelling or (row.ended and row.code == CANCELLED):
                stops[each] = Stop.CANCELLED
            if not row.ended:
                self._execute(_RENEW, (at.now + self._lease_ms, each.identity.tenant, each.identity.id))
        return stops

    def release(self, at: Times, held: Held, attempts: int, due_ms: int | None = None) -> None:
        row = self._read(at, held.identity)
        if row is None or row.ended:
            return
        if row.token != held.token:
            self._write(held.identity, row._replace(deaths=max(0, row.deaths - 1)))
        elif row.cancelling:
            self._end_as_cancelled(at, held.identity, row)
        else:
            keep_ms = at.today + self._keep_ms
            self._write(held.identity, row._replace(lease_ms=0, attempts=attempts, keep_ms=keep_ms, due_ms=due_ms))

    def defer(self, at: Times, identity: Identity, due_ms: int | None, keep_until_ms: int) -> bool:
        """`due_ms` None: it was submitted, and no worker has seen it."""
        row = self._read(at, identity)
        if row is None or row.noted:
            waiting = Row(None, None, _next_token(at, row), 0, 0, 0, keep_until_ms, 1, 0, due_ms=due_ms)
            self._write(identity, waiting)
            return True
        return not row.ended

    def complete(
        self, at: Times, identity: Identity, copy: Copy, completion: Completion, token: int | None
    ) -> Completion | None:
        row = self._read(at, identity)
        keep_ms = at.today + self._keep_ms
        if row is not None and row.token == token:
            if row.ended:
                return row.completion()
            self._end(at, identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=0), completion)
            return completion
        if row is not None and not row.noted and not (token is None and _runs_again(row, copy)):
            if row.body_hash not in (None, copy.body_hash):
                return completion if token is None else None
            if row.ended:
                return row.completion()
            if token is not None or row.is_held_against(copy, at.now):
                return None
        ours = Row(copy.body_hash, copy.mark, _next_token(at, row), 0, at.now, 0, keep_ms, 0, 0)
        self._end(at, identity, ours, completion)
        return completion

    def _end(self, at: Times, identity: Identity, row: Row, completion: Completion) -> None:
        self._write(identity, row.ended_by(completion))
        if completion.is_untried:
            self._bounded.count_untried(identity, until_ms=row.keep_ms)

    def note(self, at: Times, identity: Identity, completion: Completion) -> None:
        row = self._read(at, identity)
        if row is None or (row.noted and not (row.is_deferred and row.due_ms is not None)):
            noted = Row(None, None, _next_token(at, row), 0, 0, 0, at.today + self._keep_ms, 1, 0)
            self._write(identity, noted.ended_by(completion))

    def cancel(self, at: Times, identity: Identity, completion: Completion) -> Cancelling:
        row = self._read(at, identity)
        if row is None or row.noted:
            keep_ms = 0 if row is None else row.keep_ms
            unseen = Row(None, None, _next_token(at, row), 0, 0, 0, keep_ms, 0, 0)
            self._end_as_cancelled(at, identity, unseen.ended_by(completion))
            return Cancelling.RECORDED if row is not None and row.is_deferred else self._kept_unseen(at, identity)
        if row.ended:
            return Cancelling.ENDED
        if row.lease_ms > at.now:
            if not row.cancelling:
                self._write(identity, row._replace(cancelling=1).ended_by(completion))
            return Cancelling.TOLD
        # The token stays: an earlier holder that is still alive learns of a cancellation, not of a takeover.
        self._end_as_cancelled(at, identity, row.ended_by(completion))
        return Cancelling.RECORDED

    def _kept_unseen(self, at: Times, identity: Identity) -> Cancelling:
        until_ms = at.today + self._cancelled_ms
        displaces = self._bounded.count_unseen(identity, today=at.today, until_ms=until_ms)
        return Cancelling.DISPLACED if displaces else Cancelling.UNSEEN

    def find(self, at: Times, identity: Identity) -> Found | None:
        row = self._read(at, identity)
        if row is None:
            return None
        if row.ended:
            return Found(completion=row.completion(), running=False, attempts=row.attempts)
        is_running = row.lease_ms > at.now
        return Found(
            completion=None, running=is_running, attempts=row.attempts, due_ms=None if is_running else row.due_ms
        )

    def _read(self, at: Times, identity: Identity) -> Row | None:
        """The row of a request; None if there is none, or if its keeping time is over."""
        found = self._execute(_READ, (identity.tenant, identity.id)).fetchone()
        if found is None:
            return None
        row = Row._make(found)
        return None if row.keep_ms <= at.today and row.lease_ms <= at.now else row

    def body_hash(self, at: Times, identity: Identity) -> tuple[bool, bytes | None]:
        """Whether a worker has seen a request, or it was cancelled before; and the hash of its body, if known."""
        row = self._read(at, identity)
        return (False, None) if row is None or row.noted else (True, row.body_hash)

    def is_deferred(self, at: Times, identity: Identity) -> bool:
        """Whether it waits, and no worker has claimed it yet."""
        row = self._read(at, identity)
        return row is not None and row.is_deferred

    def _is_followed(self, identity: Identity) -> bool:
        return self._execute(_FOLLOWED, (identity.tenant, identity.id)).fetchone() is not None

    def _grant(
        self,
        at: Times,
        identity: Identity,
        copy: Copy,
        *,
        token: int,
        attempts: int = 0,
        deaths: int = 0,
        followed: bool = False,
    ) -> Granted:
        lease_ms, keep_ms = at.now + self._lease_ms, at.today + self._keep_ms
        held = Row(copy.body_hash, copy.mark, token, lease_ms, at.now, attempts, keep_ms, 0, 0, copy.nonce, deaths)
        self._write(identity, held)
        return Granted(token=token, deaths=deaths, followed=followed)

    def _end_as_cancelled(self, at: Times, identity: Identity, row: Row) -> None:
        """End with the row's completion, and keep it for as long as the request's message can wait in the broker."""
        keep_ms = max(row.keep_ms, at.today + self._cancelled_ms)
        self._write(identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=0))

    def _write(self, identity: Identity, row: Row) -> None:
        self._execute(_WRITE, (identity.tenant, identity.id, *row))


def _next_token(at: Times, row: Row | None) -> int:
    """The first token is the time: higher than any token of a row that was removed, or lost with the store."""
    return at.today if row is None else row.token + 1


def _runs_again(row: Row, copy: Copy) -> bool:
    """True if the dead letter of exactly this ending was published again."""
    return row.ended and row.status == "error" and copy.dead_at_ms is not None and copy.dead_at_ms == row.ended_ms
