"""Claims and results as rows of a SQLite file. Each method works within a transaction that its caller opened; its
argument `at` is the time of the transaction.

A method reads the row of a request once and writes it at most once. Many claims, completions and renewals are written
by one statement (`claim_new`, `complete_held`, `renew`), which takes a third less work than one by one. The thread also
waits less for the interpreter's lock, because sqlite3 releases the lock at each step of each statement, and the event
loop may take it then.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

from consumers.state import base
from consumers.state.base import Completion, Fingerprint, Granted, Held, Identity

T = TypeVar("T")
CANCELLED = "cancelled"
DISPLACED_AT_MOST = 10
"""How many unseen cancellations one more removes; more than one only after the limit was lowered."""
SIZES: Final = (32, 16, 8, 4, 2, 1)
"""How many rows one statement can write; few, because a connection keeps only so many prepared statements."""
as_json = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make an encoder for each call


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The time of a transaction, in ms by both clocks of the store."""

    now: int
    """Since the machine was booted; leases are compared with it."""
    today: int
    """Since 1970; retention times are compared with it."""


class Claim(NamedTuple):
    """The arguments of `Requests.claim`."""

    identity: Identity
    message: Fingerprint


class Complete(NamedTuple):
    """The arguments of `Requests.complete` from a caller that has a claim."""

    identity: Identity
    message: Fingerprint
    completion: Completion
    token: int


class Row(NamedTuple):
    """One row of the table `request`, which `file.py` explains; the order here is the order in SQL."""

    token: int
    keep_ms: int
    body_hash: bytes | None = None
    mark: bytes | None = None
    lease_ms: int = 0
    claimed_ms: int = 0
    attempts: int = 0
    noted: int = 0
    cancelling: int = 0
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
        """True if the request was deferred or submitted (`follow`), and no worker has claimed it yet."""
        return bool(self.noted) and self.status is None

    def runs_again(self, message: Fingerprint) -> bool:
        """True if the message is the dead letter of the stored error, and was published again."""
        dead_at_ms = message.dead_at_ms
        return self.ended and self.status == "error" and dead_at_ms is not None and dead_at_ms == self.ended_ms

    def is_held_against(self, message: Fingerprint, now: int) -> bool:
        """True if a worker holds the claim for another message, and the lease is valid. A message that was redelivered
        may take over its own earlier claim."""
        is_own = self.mark == message.mark and (self.nonce or b"")[:1] == message.nonce[:1]
        return self.lease_ms > now and not (message.redelivered and is_own)

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
            mark=self.mark,
        )


_UNSEEN = "FROM request WHERE body_hash IS NULL AND noted = 0 AND due_ms IS NULL AND code = 'cancelled' AND tenant = ?"
"""The cancellations of a tenant's requests that no worker has seen. The conditions are those of the index `unseen`."""
_READ = f"SELECT {', '.join(Row._fields)} FROM request WHERE tenant = ? AND id = ?"
_WRITE = (
    f"INSERT INTO request (tenant, id, {', '.join(Row._fields)}) VALUES (?, ?{', ?' * len(Row._fields)}) "
    f"ON CONFLICT (tenant, id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in Row._fields)}"
)
_FOLLOWED = "SELECT 1 FROM followed WHERE tenant = ? AND id = ?"
_AGAIN = "UPDATE followed SET last = last + 2, events = 0, bytes = 0 WHERE tenant = ? AND id = ? RETURNING key, last"
FORGET_EVENTS = "DELETE FROM entry WHERE followed = ? AND kind = ?"
_COUNT_UNSEEN = f"SELECT count(*) {_UNSEEN}"
_FORGET_UNSEEN = f"DELETE FROM request WHERE rowid IN (SELECT rowid {_UNSEEN} ORDER BY keep_ms LIMIT ?)"
_MARK = "UPDATE request SET mark = ? WHERE tenant = ? AND id = ?"
_RENEW = "UPDATE request SET lease_ms = ? WHERE tenant = ? AND id = ?"


def _by_size(statement: str, row: str) -> dict[int, str]:
    return {size: statement.format(", ".join([row] * size)) for size in SIZES}


_CLAIM_NEW: Final = _by_size(
    "INSERT INTO request (token, lease_ms, claimed_ms, keep_ms, tenant, id, body_hash, mark, nonce,"
    " attempts, noted, cancelling, deaths) VALUES {} ON CONFLICT (tenant, id) DO NOTHING",
    "(?1, ?2, ?3, ?4, ?, ?, ?, ?, ?, 0, 0, 0, 0)",
)
_NEW: Final = "SELECT tenant, id FROM request WHERE rowid > ?"
_COMPLETE_HELD: Final = _by_size(  # like `complete`, it inserts a row if the store has lost the claim
    "INSERT INTO request (claimed_ms, keep_ms, tenant, id, body_hash, mark, token, status, code, headers, ended_ms,"
    " body, lease_ms, attempts, noted, cancelling, deaths) VALUES {} ON CONFLICT (tenant, id) DO UPDATE SET"
    " lease_ms = 0, keep_ms = excluded.keep_ms, cancelling = 0, status = excluded.status, code = excluded.code,"
    " headers = excluded.headers, ended_ms = excluded.ended_ms, body = excluded.body"
    " WHERE request.token = excluded.token AND (request.status IS NULL OR request.cancelling)",
    "(?1, ?2, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)",
)
_RENEW_HELD: Final = _by_size(  # `IN (VALUES …)` in place of the join would make SQLite read the whole table
    "UPDATE request SET lease_ms = ?1 FROM (VALUES {}) AS held WHERE tenant = held.column1 AND id = held.column2"
    " AND token = held.column3 AND status IS NULL AND lease_ms > 0",
    "(?, ?, ?)",
)


class Requests:
    """Implements the methods of `Store` that concern one request."""

    def __init__(self, connection: sqlite3.Connection, spec: base.StoreSpec) -> None:
        self._execute = connection.execute
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)
        self._cancelled_ms = round(spec.cancelled_s * 1000)
        self._unseen_at_most = spec.unseen_per_tenant

    def claim(self, at: Times, identity: Identity, message: Fingerprint) -> base.ClaimAnswer:
        row = self.read(at, identity)
        if row is None or row.noted or row.runs_again(message):
            if row is not None and row.ended:
                self._restart_entries(identity)
            return self._grant(at, identity, message, row)
        if row.body_hash not in (None, message.body_hash):
            return base.Conflict()
        if row.ended:
            completion = self._completion_for(identity, row, message)
            return base.Ended(completion=completion, is_same_message=row.mark in (None, message.mark))
        if message.nonce and row.nonce == message.nonce:  # asked again, because the answer was lost
            if not row.lease_ms:  # its worker had the answer after all, and has released the claim
                return base.Running(for_ms=at.now - row.claimed_ms)
            return Granted(token=row.token, deaths=row.deaths, followed=self._is_followed(identity))
        if row.is_held_against(message, at.now):
            return base.Running(for_ms=at.now - row.claimed_ms)
        if row.cancelling:  # the holder died before it could end the request
            self._end_as_cancelled(at, identity, row)
            return base.Ended(completion=row.completion(), is_same_message=True)
        return self._grant(at, identity, message, row, attempts=row.attempts, deaths=row.deaths + bool(row.lease_ms))

    def claim_new(self, at: Times, asked: Sequence[Claim]) -> list[Granted | None]:
        """Grant the claims of requests that have no row, by one statement (for a number in `SIZES`). Returns None for
        each of the others, about which `claim` must decide."""
        values: list[object] = [at.today, at.now + self._lease_ms, at.now, at.today + self._keep_ms]
        for identity, message in asked:
            values += (identity.tenant, identity.id, message.body_hash, message.mark, message.nonce)
        written = self._execute(_CLAIM_NEW[len(asked)], values)
        granted = Granted(token=at.today)
        if written.rowcount == len(asked):
            return [granted] * len(asked)
        new: set[tuple[str, str]] = set()
        if written.rowcount and written.lastrowid:  # the new rows have the highest numbers
            new.update(self._execute(_NEW, (written.lastrowid - written.rowcount,)))
        found: list[Granted | None] = []
        for identity, _ in asked:
            found.append(granted if (identity.tenant, identity.id) in new else None)
            new.discard((identity.tenant, identity.id))  # a second claim of the same request comes after the first
        return found

    def renew(self, at: Times, held: Sequence[Held]) -> dict[Held, base.Stop]:
        if self._renew_held(at, held):
            return {}
        stops = {}
        for claim in held:
            row = self.read(at, claim.identity)
            if row is None:  # the store has lost the claim, so no other worker holds it
                continue
            if row.token != claim.token:
                stops[claim] = base.Stop.FENCED
                continue
            if row.cancelling or (row.ended and row.code == CANCELLED):
                stops[claim] = base.Stop.CANCELLED
            if not row.ended and row.lease_ms:
                self._execute(_RENEW, (at.now + self._lease_ms, claim.identity.tenant, claim.identity.id))
        return stops

    def _renew_held(self, at: Times, held: Sequence[Held]) -> bool:
        """Returns whether all of them are still held."""
        renewed = 0
        for part in parts(held):
            values: list[object] = [at.now + self._lease_ms]
            for claim in part:
                values += (claim.identity.tenant, claim.identity.id, claim.token)
            renewed += self._execute(_RENEW_HELD[len(part)], values).rowcount
        return renewed == len(held)

    def shelter(self, at: Times, held: Held) -> None:
        row = self.read(at, held.identity)
        if row is not None and row.token == held.token and row.lease_ms and not row.ended:
            self._write(held.identity, row._replace(nonce=None))

    def release(
        self, at: Times, held: Held, attempts: int, due_ms: int | None = None, *, is_survived: bool = True
    ) -> None:
        row = self.read(at, held.identity)
        if row is None or row.ended:
            return
        if row.token != held.token:
            self._write(held.identity, row._replace(deaths=max(0, row.deaths - 1)))
        elif row.cancelling:
            self._end_as_cancelled(at, held.identity, row)
        else:
            keep_ms = at.today + self._keep_ms
            deaths = 0 if is_survived else row.deaths
            released = row._replace(lease_ms=0, attempts=attempts, keep_ms=keep_ms, due_ms=due_ms, deaths=deaths)
            self._write(held.identity, released)

    def defer(self, at: Times, identity: Identity, due_ms: int | None, keep_until_ms: int) -> bool:
        """Implements `Store.defer`. `due_ms` is None if the request was only submitted (`follow`)."""
        row = self.read(at, identity)
        if row is None or row.noted:
            waiting = Row(token=_next_token(at, row), keep_ms=keep_until_ms, noted=1, due_ms=due_ms)
            self._write(identity, waiting)
            return True
        return not row.ended

    def complete(
        self, at: Times, identity: Identity, message: Fingerprint, completion: Completion, token: int | None
    ) -> Completion | None:
        row = self.read(at, identity)
        keep_ms = at.today + self._keep_ms
        if row is not None and row.token == token:
            if row.ended:
                return row.completion()
            self._write(identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=0).ended_by(completion))
            return completion
        if row is not None and not row.noted and not (token is None and row.runs_again(message)):
            if row.body_hash not in (None, message.body_hash):
                return completion if token is None else None
            if row.ended:
                return self._completion_for(identity, row, message)
            if token is not None or row.is_held_against(message, at.now):
                return None
        if row is not None and row.ended:
            self._restart_entries(identity)
        ours = Row(
            body_hash=message.body_hash,
            mark=message.mark,
            token=_next_token(at, row),
            claimed_ms=at.now,
            keep_ms=keep_ms,
        )
        self._write(identity, ours.ended_by(completion))
        return completion

    def complete_held(self, at: Times, asked: Sequence[Complete]) -> list[Completion | None]:
        """Store how requests ended whose claims are still held, by one statement (for a number in `SIZES`). Returns
        None for all if it could not store one of them; `complete` must then store each."""
        values: list[object] = [at.now, at.today + self._keep_ms]
        for identity, message, ending, token in asked:
            values += (identity.tenant, identity.id, message.body_hash, message.mark, token)
            values += (ending.status, ending.code, as_json(dict(ending.headers)), ending.ended_ms, ending.body)
        written = self._execute(_COMPLETE_HELD[len(asked)], values)
        is_all = written.rowcount == len(asked)
        return [complete.completion if is_all else None for complete in asked]

    def note(self, at: Times, identity: Identity, completion: Completion) -> None:
        row = self.read(at, identity)
        if row is not None and (not row.noted or (row.is_deferred and row.due_ms is not None)):
            return
        noted = Row(token=_next_token(at, row), keep_ms=at.today + self._keep_ms, noted=1)
        self._write(identity, noted.ended_by(completion))

    def cancel(self, at: Times, identity: Identity, completion: Completion) -> base.Cancelling:
        row = self.read(at, identity)
        if row is not None and row.is_deferred:  # kept like a result, and as long as its message waits in the broker
            keep_ms = max(row.keep_ms, at.today + self._keep_ms)
            waited = Row(token=_next_token(at, row), keep_ms=keep_ms, due_ms=row.due_ms)
            self._write(identity, waited.ended_by(completion))
            self._displace_unseen(identity.tenant)
            return base.Cancelling.RECORDED
        if row is None or row.noted:
            unseen = Row(token=_next_token(at, row), keep_ms=0 if row is None else row.keep_ms)
            self._end_as_cancelled(at, identity, unseen.ended_by(completion))
            return base.Cancelling.DISPLACED if self._displace_unseen(identity.tenant) else base.Cancelling.UNSEEN
        if row.ended:
            return base.Cancelling.ENDED
        if row.lease_ms > at.now:
            if not row.cancelling:
                self._write(identity, row._replace(cancelling=1).ended_by(completion))
            return base.Cancelling.TOLD
        # The token stays the same, so that a holder whose lease has expired learns that it was cancelled, not fenced.
        self._end_as_cancelled(at, identity, row.ended_by(completion))
        return base.Cancelling.RECORDED

    def find(self, at: Times, identity: Identity) -> base.Found | None:
        row = self.read(at, identity)
        if row is None:
            return None
        if row.ended:
            return base.Found(completion=row.completion(), running=False, attempts=row.attempts)
        is_running = row.lease_ms > at.now
        return base.Found(
            completion=None, running=is_running, attempts=row.attempts, due_ms=None if is_running else row.due_ms
        )

    def read(self, at: Times, identity: Identity) -> Row | None:
        """Returns None also if the row need no longer be kept."""
        found = self._execute(_READ, (identity.tenant, identity.id)).fetchone()
        if found is None:
            return None
        row = Row._make(found)
        return None if row.keep_ms <= at.today and row.lease_ms <= at.now else row

    def _completion_for(self, identity: Identity, row: Row, message: Fingerprint) -> Completion:
        if row.mark is None:  # cancelled before any message of the request came; this is the first one
            self._execute(_MARK, (message.mark, identity.tenant, identity.id))
        return row.completion()

    def _displace_unseen(self, tenant: str) -> bool:
        (count,) = self._execute(_COUNT_UNSEEN, (tenant,)).fetchone()
        if (surplus := min(count - self._unseen_at_most, DISPLACED_AT_MOST)) <= 0:
            return False
        self._execute(_FORGET_UNSEEN, (tenant, surplus))
        return True

    def _is_followed(self, identity: Identity) -> bool:
        return self._execute(_FOLLOWED, (identity.tenant, identity.id)).fetchone() is not None

    def _restart_entries(self, identity: Identity) -> None:
        """Add an entry `restart` to the progress of a request that had ended and now runs again, because its dead
        letter was published again, or because only a refusal was stored (`note`). Clients that follow the request have
        seen its end as entry `last + 1`, so that number is left out."""
        again = self._execute(_AGAIN, (identity.tenant, identity.id)).fetchone()
        if again is not None:
            key, last = again
            self._execute(FORGET_EVENTS, (key, base.EVENT))
            self._execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (key, last, base.RESTART, b"{}"))

    def _grant(
        self,
        at: Times,
        identity: Identity,
        message: Fingerprint,
        row: Row | None,
        *,
        attempts: int = 0,
        deaths: int = 0,
    ) -> Granted:
        held = Row(
            body_hash=message.body_hash,
            mark=message.mark,
            token=_next_token(at, row),
            lease_ms=at.now + self._lease_ms,
            claimed_ms=at.now,
            attempts=attempts,
            keep_ms=at.today + self._keep_ms,
            nonce=message.nonce,
            deaths=deaths,
        )
        self._write(identity, held)
        return Granted(token=held.token, deaths=deaths, followed=row is not None and self._is_followed(identity))

    def _end_as_cancelled(self, at: Times, identity: Identity, row: Row) -> None:
        """End a request with the completion in `row`, and keep it for as long as a message of the request can wait in
        the broker."""
        keep_ms = max(row.keep_ms, at.today + self._cancelled_ms)
        self._write(identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=0))

    def _write(self, identity: Identity, row: Row) -> None:
        self._execute(_WRITE, (identity.tenant, identity.id, *row))


def _next_token(at: Times, row: Row | None) -> int:
    # Without a row, the time is higher than all tokens that the request may have had in a row that was removed or lost.
    return at.today if row is None else row.token + 1


def parts(wanted: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a sequence into as few parts as possible, each with one of `SIZES` as its length."""
    begin = 0
    for size in SIZES:
        while len(wanted) - begin >= size:
            yield wanted[begin : begin + size]
            begin += size
