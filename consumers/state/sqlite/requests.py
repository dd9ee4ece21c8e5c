"""Claims and results as rows of a SQLite file. Each method works within a transaction that its caller opened.

A method reads the row of a request once and writes it at most once.
"""

import sqlite3
from collections.abc import Sequence

from consumers.state.base import (
    Cancelling,
    ClaimAnswer,
    Completion,
    Conflict,
    Ended,
    Fingerprint,
    Found,
    Granted,
    Held,
    Identity,
    Running,
    Stop,
)
from consumers.state.following import EVENT, RESTART
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.rows import Row, Times
from consumers.state.sqlite.shares import UNSEEN, UNTRIED, Shares

CANCELLED = "cancelled"
"""The error code with which a cancelled request ends."""
DISPLACED_AT_MOST = 10
"""When the cancellation of a request that no worker has seen is stored, at most this many earlier such cancellations of
its tenant are removed. More than one is removed only after the tenant's limit was lowered."""
IS_UNSEEN = "body_hash IS NULL AND noted = 0 AND code = 'cancelled'"
_READ = f"SELECT {', '.join(Row._fields)} FROM request WHERE tenant = ? AND id = ?"
_WRITE = (
    f"INSERT INTO request (tenant, id, {', '.join(Row._fields)}) VALUES (?, ?{', ?' * len(Row._fields)}) "
    f"ON CONFLICT (tenant, id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in Row._fields)}"
)
_FOLLOWED = "SELECT 1 FROM followed WHERE tenant = ? AND id = ?"
_AGAIN = "UPDATE followed SET last = last + 2, events = 0, bytes = 0 WHERE tenant = ? AND id = ? RETURNING key, last"
FORGET_EVENTS = "DELETE FROM entry WHERE followed = ? AND kind = ?"
_FORGET_UNSEEN = f"DELETE FROM request WHERE tenant = ? AND id = ? AND {IS_UNSEEN}"
_MARK = "UPDATE request SET mark = ? WHERE tenant = ? AND id = ?"
_RENEW = "UPDATE request SET lease_ms = ? WHERE tenant = ? AND id = ?"


class Requests:
    """Implements the methods of `Store` that concern one request (claim, renew, complete, cancel, …), on one SQLite
    connection. The methods' argument `at` is the time of the transaction."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)
        self._cancelled_ms = round(spec.cancelled_s * 1000)
        self._unseen_at_most = spec.unseen_per_tenant
        self._unseen = Shares(connection, UNSEEN)
        self._untried = Shares(connection, UNTRIED)

    def claim(self, at: Times, identity: Identity, message: Fingerprint) -> ClaimAnswer:
        row = self.read(at, identity)
        if row is None or row.noted or _runs_again(row, message):
            if row is not None and row.ended:
                self._restart_entries(identity)
            return self._grant(at, identity, message, row)
        if row.body_hash not in (None, message.body_hash):
            return Conflict()
        if row.ended:
            completion = self._completion_for(identity, row, message)
            return Ended(completion=completion, is_same_message=row.mark in (None, message.mark))
        if row.lease_ms and message.nonce and row.nonce == message.nonce:  # granted before, and the answer was lost
            return Granted(token=row.token, deaths=row.deaths, followed=self._is_followed(identity))
        if row.is_held_against(message, at.now):
            return Running(for_ms=at.now - row.claimed_ms)
        if row.cancelling:  # the holder died before it could end the request
            self._end_as_cancelled(at, identity, row)
            return Ended(completion=row.completion(), is_same_message=True)
        return self._grant(at, identity, message, row, attempts=row.attempts, deaths=row.deaths + bool(row.lease_ms))

    def renew(self, at: Times, held: Sequence[Held]) -> dict[Held, Stop]:
        stops = {}
        for claim in held:
            row = self.read(at, claim.identity)
            if row is None:  # the store has lost the claim, so no other worker holds it
                continue
            if row.token != claim.token:
                stops[claim] = Stop.FENCED
                continue
            if row.cancelling or (row.ended and row.code == CANCELLED):
                stops[claim] = Stop.CANCELLED
            if not row.ended:
                self._execute(_RENEW, (at.now + self._lease_ms, claim.identity.tenant, claim.identity.id))
        return stops

    def release(self, at: Times, held: Held, attempts: int, due_ms: int | None = None) -> None:
        row = self.read(at, held.identity)
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
        """Implements `Store.defer`. `due_ms` is None if the request was only submitted (`follow`), so that no worker
        has seen it."""
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
            self._end(at, identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=0), completion)
            return completion
        if row is not None and not row.noted and not (token is None and _runs_again(row, message)):
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
        self._end(at, identity, ours, completion)
        return completion

    def _completion_for(self, identity: Identity, row: Row, message: Fingerprint) -> Completion:
        """The completion of a request that ended before this message came. If the request was cancelled before any
        message of it came, store this message's mark."""
        if row.mark is None:
            self._execute(_MARK, (message.mark, identity.tenant, identity.id))
        return row.completion()

    def _end(self, at: Times, identity: Identity, row: Row, completion: Completion) -> None:
        self._write(identity, row.ended_by(completion))
        if completion.is_untried:
            self._untried.add(identity.tenant, identity.id, until_ms=row.keep_ms)

    def note(self, at: Times, identity: Identity, completion: Completion) -> None:
        row = self.read(at, identity)
        if row is not None and (not row.noted or (row.is_deferred and row.due_ms is not None)):
            return
        noted = Row(token=_next_token(at, row), keep_ms=at.today + self._keep_ms, noted=1)
        self._write(identity, noted.ended_by(completion))

    def cancel(self, at: Times, identity: Identity, completion: Completion) -> Cancelling:
        row = self.read(at, identity)
        if row is None or row.noted:
            keep_ms = 0 if row is None else row.keep_ms
            unseen = Row(token=_next_token(at, row), keep_ms=keep_ms)
            self._end_as_cancelled(at, identity, unseen.ended_by(completion))
            return Cancelling.RECORDED if row is not None and row.is_deferred else self._count_unseen(at, identity)
        if row.ended:
            return Cancelling.ENDED
        if row.lease_ms > at.now:
            if not row.cancelling:
                self._write(identity, row._replace(cancelling=1).ended_by(completion))
            return Cancelling.TOLD
        # The token stays the same, so that a holder whose lease has expired learns that it was cancelled, not fenced.
        self._end_as_cancelled(at, identity, row.ended_by(completion))
        return Cancelling.RECORDED

    def _count_unseen(self, at: Times, identity: Identity) -> Cancelling:
        """Count the cancellation of a request that no worker has seen. If the tenant now has more such cancellations
        than its limit, remove the oldest of them."""
        self._unseen.forget_ended(at.today)
        self._unseen.add(identity.tenant, identity.id, until_ms=at.today + self._cancelled_ms)
        result = Cancelling.UNSEEN
        for _ in range(DISPLACED_AT_MOST):
            if self._unseen.used(identity.tenant) <= self._unseen_at_most:
                break
            if (oldest := self._unseen.forget_oldest(identity.tenant)) is not None:
                self._execute(_FORGET_UNSEEN, (identity.tenant, oldest[0]))
            result = Cancelling.DISPLACED
        return result

    def find(self, at: Times, identity: Identity) -> Found | None:
        row = self.read(at, identity)
        if row is None:
            return None
        if row.ended:
            return Found(completion=row.completion(), running=False, attempts=row.attempts)
        is_running = row.lease_ms > at.now
        return Found(
            completion=None, running=is_running, attempts=row.attempts, due_ms=None if is_running else row.due_ms
        )

    def read(self, at: Times, identity: Identity) -> Row | None:
        """Returns the row of a request; None if it has no row, or if the row need no longer be kept."""
        found = self._execute(_READ, (identity.tenant, identity.id)).fetchone()
        if found is None:
            return None
        row = Row._make(found)
        return None if row.keep_ms <= at.today and row.lease_ms <= at.now else row

    def _is_followed(self, identity: Identity) -> bool:
        return self._execute(_FOLLOWED, (identity.tenant, identity.id)).fetchone() is not None

    def _restart_entries(self, identity: Identity) -> None:
        """Add an entry `restart` to the progress of a request that had ended and now runs again, because its dead
        letter was published again, or because only a refusal was stored (`note`). Clients that follow the request have
        seen its end as entry `last + 1`, so that number is left out."""
        again = self._execute(_AGAIN, (identity.tenant, identity.id)).fetchone()
        if again is not None:
            key, last = again
            self._execute(FORGET_EVENTS, (key, EVENT))
            self._execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (key, last, RESTART, b"{}"))

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
        """End a request as cancelled, with the completion in `row`. Its row is kept for as long as a message of the
        request can wait in the broker."""
        keep_ms = max(row.keep_ms, at.today + self._cancelled_ms)
        self._write(identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=0))

    def _write(self, identity: Identity, row: Row) -> None:
        self._execute(_WRITE, (identity.tenant, identity.id, *row))


def _next_token(at: Times, row: Row | None) -> int:
    """The fencing token for the next claim of a request. If the request has no row, the token is the time in ms since
    1970, because that is higher than all tokens that the request may have had in an earlier row, which was removed or
    was lost with an earlier file."""
    return at.today if row is None else row.token + 1


def _runs_again(row: Row, message: Fingerprint) -> bool:
    """True if the message is the dead letter of the error that is stored for the request, and was published again, so
    that the request may run once more."""
    return row.ended and row.status == "error" and message.dead_at_ms is not None and message.dead_at_ms == row.ended_ms
