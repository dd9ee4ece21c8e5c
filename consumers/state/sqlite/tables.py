"""What the store keeps, as rows of a SQLite file: claims and results, the progress of requests that clients follow,
allowances, leases, messages that wait in the broker, and pauses. Each method works within a transaction that its caller
opened."""

import json
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

from consumers.state import base
from consumers.state.base import (
    EVENT,
    RESTART,
    Completion,
    Fingerprint,
    Firing,
    Granted,
    Held,
    Identity,
    NewEntry,
    Part,
    Pause,
    Submission,
    WaitingLimit,
)
from consumers.state.shedding import LOW_WATER, STEP_ROWS, SURPLUS_ROWS, Kind, Share, Surplus, cuts, next_step, oldest
from lanekeeper.contract.names import ATTEMPT

CANCELLED = "cancelled"
DISPLACED_AT_MOST = 10
as_json = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make an encoder for each call


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The time of a transaction, in ms by both clocks of the store."""

    now: int
    today: int


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
    def step(self) -> str:
        """Where the pipeline of a request that has not ended stands. (Its column has the headers of one that has.)"""
        return self.headers or "" if self.status is None else ""

    @property
    def is_deferred(self) -> bool:
        """True if the request was deferred or submitted (`follow`), and no worker has claimed it yet."""
        return bool(self.noted) and self.status is None

    def runs_again(self, message: Fingerprint) -> bool:
        """True if the message is the dead letter of the stored error, and was published again."""
        return self.ended and self.status == "error" and message.dead_at_ms == self.ended_ms

    @property
    def is_waiting(self) -> bool:
        """Whether its holder has noted that the request waits: the first letter of the nonce is large then."""
        return (self.nonce or b"")[:1].isupper()

    @property
    def all_deaths(self) -> int:
        """With that of its holder, if this has not released the claim."""
        return self.deaths + (self.lease_ms > 0 and not self.is_waiting)

    def is_held_against(self, message: Fingerprint, now: int) -> bool:
        """True if a worker holds the claim for another message, and the lease is valid. A message that was redelivered
        may take over its own earlier claim."""
        is_own = self.mark == message.mark and (self.nonce or b"")[:1].lower() == message.nonce[:1]
        return self.lease_ms > now and not (message.redelivered and is_own)

    def ended_by(self, completion: Completion) -> "Row":
        status, code, headers, ended_ms, body = _of_completion(completion)
        return self._replace(status=status, code=code, headers=headers, ended_ms=ended_ms, body=body)

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
_READ = f"SELECT {', '.join(Row._fields)} FROM request WHERE tenant = ? AND id = ?"
_WRITE = (
    f"INSERT INTO request (tenant, id, {', '.join(Row._fields)}) VALUES (?, ?{', ?' * len(Row._fields)}) "
    f"ON CONFLICT (tenant, id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in Row._fields)}"
)
_OF: Final = "WHERE tenant = ? AND id = ?"
_FOLLOWED = f"SELECT 1 FROM followed {_OF}"
_AGAIN = "UPDATE followed SET last = last + 2, events = 0, bytes = 0 WHERE tenant = ? AND id = ? RETURNING key, last"
FORGET_EVENTS = "DELETE FROM entry WHERE followed = ? AND kind = ?"
_COUNT_UNSEEN = f"SELECT count(*) {_UNSEEN}"
_FORGET_UNSEEN = f"DELETE FROM request WHERE rowid IN (SELECT rowid {_UNSEEN} ORDER BY keep_ms LIMIT ?)"
_MARK = "UPDATE request SET mark = ? WHERE tenant = ? AND id = ?"
_CLAIMS: Final = (
    "(SELECT key, json_extract(value, '$[0]') AS tenant, json_extract(value, '$[1]') AS id,"
    " json_extract(value, '$[2]') AS token, json_extract(value, '$[3]') AS item_of FROM json_each(?)) AS held"
)
_STOPPED: Final = (
    f"SELECT held.key, request.token <> held.token FROM {_CLAIMS} CROSS JOIN request"
    " ON request.tenant = held.tenant AND request.id = held.id"
    f" WHERE (request.token <> held.token OR cancelling OR code = '{CANCELLED}') AND (keep_ms > ? OR lease_ms > ?)"
)
_ITEMS_OF_ENDED: Final = (
    f"SELECT held.key, 0 FROM {_CLAIMS} CROSS JOIN request ON request.tenant = held.tenant"
    " AND request.id = held.item_of WHERE status IS NOT NULL AND (keep_ms > ? OR lease_ms > ?)"
)
_ENDINGS: Final = (
    "SELECT held.key, status, code, coalesce(ended_ms, 0), coalesce(length(body), 0), cancelling"
    f" FROM {_CLAIMS} CROSS JOIN request ON request.tenant = held.tenant AND request.id = held.id"
    " WHERE keep_ms > ? OR lease_ms > ?"
)
_RENEW: Final = (
    f"UPDATE request SET lease_ms = ? FROM {_CLAIMS}"
    " WHERE request.tenant = held.tenant AND request.id = held.id AND request.token = held.token"
    " AND (status IS NULL AND lease_ms > 0 OR cancelling)"
)
TOGETHER_AT_MOST: Final = 32
"""How many claims, or completions, one statement writes: sqlite3 gives the interpreter's lock away several times for
each statement, and waits for it again. A connection keeps a prepared statement for each number (`connect`)."""


@cache
def _claim_new(count: int) -> str:
    row = "(?1, ?2, ?3, max(?4, ?), ?, ?, ?, ?, ?, 0, 0, 0, 0)"
    return (
        "INSERT INTO request (token, lease_ms, claimed_ms, keep_ms, tenant, id, body_hash, mark, nonce, attempts,"
        f" noted, cancelling, deaths) VALUES {', '.join([row] * count)} ON CONFLICT (tenant, id) DO NOTHING"
    )


_CLAIMED: Final = "SELECT tenant, id FROM request WHERE rowid > ?"


@cache
def _complete_held(count: int) -> str:
    row = "(?1, max(?2, ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)"  # inserted if the store has lost the claim
    return (
        "INSERT INTO request (claimed_ms, keep_ms, tenant, id, body_hash, mark, token, status, code, headers, ended_ms,"
        f" body, lease_ms, attempts, noted, cancelling, deaths) VALUES {', '.join([row] * count)}"
        " ON CONFLICT (tenant, id) DO UPDATE SET"
        " lease_ms = 0, keep_ms = excluded.keep_ms, cancelling = 0, status = excluded.status, code = excluded.code,"
        " headers = excluded.headers, ended_ms = excluded.ended_ms, body = excluded.body"
        " WHERE request.token = excluded.token AND (request.status IS NULL OR request.cancelling)"
    )


_FIELDS: Final = ", ".join(Submission._fields)
_ADD: Final = (
    f"INSERT INTO followed (streams, last, events, bytes, tenant, id, {_FIELDS})"
    " VALUES (0, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?)"
)
_HOLDS: Final = (
    "SELECT f.key, f.last, f.events, f.bytes FROM request r LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id"
    " WHERE r.tenant = ? AND r.id = ? AND r.token = ? AND r.lease_ms > 0"
    " AND (r.status IS NULL OR r.cancelling)"
)
_PROGRESS: Final = (
    "SELECT f.key, coalesce(f.last, 0), r.status IS NOT NULL AND NOT r.cancelling FROM request r"
    " LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id WHERE r.tenant = ? AND r.id = ?"
)
_ENTRIES: Final = "SELECT number, kind, body FROM entry WHERE followed = ? AND number > ? ORDER BY number LIMIT ?"
ENTRIES_IN_A_LOOK: Final = 5000
KEPT_AFTER_MS = 86_400_000
"""How long what was used in a period is kept after its end, in case the calendar time is set back into it."""
_USED_IN: Final = "SELECT used FROM allowance WHERE name = ? AND period_s = ? AND period = ?"
_SET_USED: Final = "INSERT OR REPLACE INTO allowance VALUES (?, ?, ?, ?, ?)"
_EXPIRED_ALLOWANCES: Final = (
    "DELETE FROM allowance WHERE (name, period_s, period) IN "
    f"(SELECT name, period_s, period FROM allowance WHERE ends_ms < ? LIMIT {STEP_ROWS})"
)
_EXPIRED_KEPT: Final = (
    "DELETE FROM kept WHERE (kind, tenant, key) IN "
    f"(SELECT kind, tenant, key FROM kept WHERE until_ms <= ? LIMIT {STEP_ROWS})"
)
_SURPLUS_WEBHOOKS: Final = (
    "DELETE FROM kept WHERE (kind, tenant, key) IN (SELECT kind, tenant, key FROM kept WHERE kind = 'webhook' "
    f"ORDER BY until_ms DESC LIMIT {STEP_ROWS} OFFSET ?)"
)
_WEBHOOKS: Final = "FROM kept WHERE kind = 'webhook' AND until_ms > ?"
_DEBOUNCE: Final = (
    "INSERT INTO kept VALUES ('debounce', ?, ?, ?, ?, ?, NULL) ON CONFLICT DO UPDATE "
    "SET at_ms = excluded.at_ms, id = excluded.id, until_ms = max(until_ms, excluded.until_ms) "
    "WHERE (excluded.at_ms, excluded.id) > (at_ms, id) OR until_ms <= ?"
)
_LAST_UPDATE: Final = "SELECT id FROM kept WHERE (kind, tenant, key) = ('debounce', ?, ?)"
_GATHER: Final = (
    "INSERT INTO batched VALUES (?, ?, ?, 0, ?) ON CONFLICT DO UPDATE "
    "SET ticket = excluded.ticket, submitted = 0, until_ms = excluded.until_ms "
    "WHERE NOT submitted OR until_ms <= ? OR ticket = ?"
)
_IN_TICKET: Final = "SELECT ticket, submitted FROM batched WHERE (tenant, id) = (?, ?)"
_SUBMIT: Final = "UPDATE batched SET ticket = ?, submitted = 1, until_ms = ? WHERE (tenant, id) = (?, ?)"
_LEFT: Final = "UPDATE batched SET until_ms = min(until_ms, ?) WHERE (tenant, id, ticket) = (?, ?, ?)"
_EXPIRED_BATCHED: Final = (
    f"DELETE FROM batched WHERE (tenant, id) IN (SELECT tenant, id FROM batched WHERE until_ms <= ? LIMIT {STEP_ROWS})"
)
_EXPIRED_LEASES: Final = (
    f"DELETE FROM lease WHERE name IN (SELECT name FROM lease WHERE lease_ms <= ? LIMIT {STEP_ROWS})"
)
_ENQUEUED: Final = (
    "SELECT count(*), total(requests), total(tokens) FROM enqueued WHERE account = ? AND ticket <> ? AND until_ms > ?"
)
FIRINGS_KEPT_MS: Final = 10 * 365 * 86_400_000
_FIRED: Final = (
    "INSERT INTO kept VALUES ('schedule', '', ?, ?, ?, ?, NULL) ON CONFLICT DO UPDATE "
    "SET at_ms = excluded.at_ms, id = excluded.id, until_ms = excluded.until_ms "
    "WHERE excluded.at_ms > at_ms OR at_ms = ?"
)
_IS_WAITING: Final = "SELECT 1 FROM share WHERE (kind, tenant, member) = ('waiting', ?, ?)"
_ADD_WAITING: Final = "INSERT INTO share VALUES ('waiting', ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_WAITING: Final = "SELECT weight FROM share_sum WHERE kind = 'waiting' AND tenant IS ?"
_COUNT_WAITING: Final = "UPDATE share_sum SET weight = weight + ? WHERE kind = 'waiting' AND tenant IS ?"
_EXPIRED_WAITING: Final = (
    "DELETE FROM share WHERE (kind, tenant, member) IN "
    f"(SELECT kind, tenant, member FROM share WHERE kind = 'waiting' AND until_ms <= ? LIMIT {STEP_ROWS}) "
    "RETURNING tenant, weight"
)


# Sizes that are assumed, in bytes: of a request's row with its entries in indexes, but without headers and body; of the
# submission of a followed request; of an entry of its progress, without its content; of a row of the table `share`.
ROW_BYTES: Final = 400
FOLLOWED_BYTES: Final = 300
ENTRY_BYTES: Final = 30
COUNTED_BYTES: Final = 400
_SIZE: Final = (
    f"{ROW_BYTES} + coalesce(length(headers), 0) + coalesce(length(body), 0)"
    f" + coalesce((SELECT {FOLLOWED_BYTES} + bytes + {ENTRY_BYTES} * last"
    # an entry of over a quarter of a page takes pages of its own
    f" + (bytes > 900 * last) * 4096 * last FROM followed f"
    " WHERE f.tenant = request.tenant AND f.id = request.id), 0)"
)
_KIND: Final = (
    f"CASE WHEN lease_ms > ? THEN '{Kind.KEPT}'"
    # an id with # is of a step or item of a pipeline, whose request's id is before it
    f" WHEN instr(id, '#') AND NOT EXISTS (SELECT 1 FROM request p WHERE p.tenant = request.tenant"
    " AND p.id = substr(request.id, 1, instr(request.id, '#') - 1) AND p.status IS NOT NULL AND NOT p.cancelling)"
    f" THEN '{Kind.FLOW}'"
    f" WHEN status IS NULL OR cancelling THEN '{Kind.LIVE}'"
    f" WHEN body_hash IS NULL AND NOT noted THEN '{Kind.CANCELLED}'"
    f" WHEN status = 'error' AND (noted OR instr(headers, '\"{ATTEMPT}\": 0')) THEN '{Kind.FREE}'"
    f" ELSE '{Kind.PAID}' END"
)
_USED: Final = (
    f"SELECT tenant, {_KIND} AS kind, sum({_SIZE}) FROM request NOT INDEXED GROUP BY tenant, kind UNION ALL"
    f" SELECT tenant, '{Kind.KEPT}', count(*) * {COUNTED_BYTES} FROM share GROUP BY tenant UNION ALL"
    f" SELECT tenant, '{Kind.KEPT}', sum({COUNTED_BYTES} + coalesce(length(body), 0)) FROM kept GROUP BY tenant"
)
_EXPIRED: Final = (
    f"SELECT tenant, id, {_SIZE}, keep_ms FROM request WHERE keep_ms <= ? AND lease_ms <= ?"
    f" ORDER BY keep_ms LIMIT {STEP_ROWS}"
)
_OLDEST: Final = f"SELECT id, {_SIZE}, keep_ms FROM request WHERE tenant = ? AND {_KIND} = ? ORDER BY keep_ms LIMIT ?"
_REMOVE: Final = "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms = ? AND lease_ms <= ?"


_Ended = tuple[Identity, Fingerprint, Completion, int]
"""The arguments of `complete` for a request whose claim its worker holds."""


class Tables:
    """Implements the methods of `FollowedStore` on one connection."""

    def __init__(self, connection: sqlite3.Connection, spec: base.StoreSpec) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._spec = spec
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)
        self._cancelled_ms = round(spec.cancelled_s * 1000)

    def claim_new(self, at: Times, claims: Sequence[tuple[Identity, Fingerprint]]) -> Sequence[Granted | None]:
        """Grant, by one statement, those claims whose requests have no row; None for the others."""
        values: list[object] = [at.today, at.now + self._lease_ms, at.now, at.today + self._keep_ms]
        for identity, message in claims:
            keep_ms = message.keep_until_ms
            values += (keep_ms, identity.tenant, identity.id, message.body_hash, message.mark, message.nonce)
        written = self._execute(_claim_new(len(claims)), values)
        granted = Granted(token=at.today)
        if written.rowcount == len(claims):
            return [granted] * len(claims)
        new: set[tuple[str, str]] = set()
        if written.rowcount and written.lastrowid:  # the new rows have the highest numbers
            new.update(self._execute(_CLAIMED, (written.lastrowid - written.rowcount,)))
        answers: list[Granted | None] = []
        for identity, _ in claims:
            key = (identity.tenant, identity.id)
            answers.append(granted if key in new else None)
            new.discard(key)  # a second claim of the same request comes after the first
        return answers

    def claim(self, at: Times, identity: Identity, fingerprint: Fingerprint) -> base.ClaimAnswer:
        message = fingerprint
        if (new := self.claim_new(at, [(identity, message)])[0]) is not None:
            return new
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
        return self._grant(at, identity, message, row, attempts=row.attempts, deaths=row.all_deaths)

    def renew(self, at: Times, held: Sequence[Held]) -> Mapping[Held, base.Stop]:
        claims = as_json([(claim.identity.tenant, claim.identity.id, claim.token, claim.item_of) for claim in held])
        stopped = self._execute(_STOPPED, (claims, at.today, at.now)).fetchall()
        if any(claim.item_of for claim in held):
            stopped = [*self._execute(_ITEMS_OF_ENDED, (claims, at.today, at.now)), *stopped]
        self._execute(_RENEW, (at.now + self._lease_ms, claims))
        return {held[key]: base.Stop.FENCED if is_lost else base.Stop.CANCELLED for key, is_lost in stopped}

    def shelter(self, at: Times, held: Held) -> None:
        row = self.read(at, held.identity)
        if row is not None and row.token == held.token and row.lease_ms:
            self._write(held.identity, row._replace(nonce=None))

    def note_waiting(self, at: Times, held: Held, *, is_waiting: bool) -> None:
        row = self.read(at, held.identity)
        if row is not None and row.token == held.token and row.lease_ms and row.nonce:
            kind = row.nonce[:1].upper() if is_waiting else row.nonce[:1].lower()
            self._write(held.identity, row._replace(nonce=kind + row.nonce[1:]))

    def release(
        self,
        at: Times,
        held: Held,
        *,
        attempts: int = 0,
        due_ms: int | None = None,
        is_survived: bool = True,
        step: str = "",
    ) -> None:
        row = self.read(at, held.identity)
        if row is None or row.ended:
            return
        if row.token != held.token:
            self._write(held.identity, row._replace(deaths=max(0, row.deaths - 1)))
        elif row.cancelling:
            self._end_as_cancelled(at, held.identity, row)
        else:
            keep_ms = max(row.keep_ms, at.today + self._keep_ms)
            deaths = 0 if is_survived else row.deaths
            released = row._replace(lease_ms=0, attempts=attempts, keep_ms=keep_ms, due_ms=due_ms, deaths=deaths)
            self._write(held.identity, released._replace(headers=step or None))

    def defer(self, at: Times, identity: Identity, *, due_ms: int | None, keep_until_ms: int) -> bool:
        """Implements `Store.defer`. `due_ms` is None if the request was only submitted (`follow`)."""
        row = self.read(at, identity)
        if row is None or row.noted:
            waiting = Row(token=_next_token(at, row), keep_ms=keep_until_ms, noted=True, due_ms=due_ms)
            self._write(identity, waiting)
            return True
        return not row.ended

    def complete_held(self, at: Times, ended: Sequence[_Ended]) -> Sequence[Completion | None]:
        """Store, by one statement, how requests ended whose claims are held; None for all of them if one is not."""
        values: list[object] = [at.now, at.today + self._keep_ms]
        for identity, message, completion, token in ended:
            values += (message.keep_until_ms, identity.tenant, identity.id, message.body_hash, message.mark, token)
            values += _of_completion(completion)
        is_all = self._execute(_complete_held(len(ended)), values).rowcount == len(ended)
        return [completion if is_all else None for _, _, completion, _ in ended]

    def complete(
        self, at: Times, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        message, keep_ms = fingerprint, max(fingerprint.keep_until_ms, at.today + self._keep_ms)
        if token is not None and self.complete_held(at, [(identity, message, completion, token)])[0] is not None:
            return completion
        row = self.read(at, identity)
        if row is not None and row.token == token:
            return row.completion()  # `complete_held` has found that it has ended
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

    def note(self, at: Times, identity: Identity, completion: Completion, *, keep_until_ms: int = 0) -> None:
        row = self.read(at, identity)
        if row is not None and (not row.noted or (row.is_deferred and row.due_ms is not None)):
            return
        keep_ms = max(keep_until_ms, at.today + self._keep_ms)
        noted = Row(token=_next_token(at, row), keep_ms=keep_ms, noted=True)
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
            unseen = Row(token=_next_token(at, row), keep_ms=at.today if row is None else row.keep_ms)
            self._end_as_cancelled(at, identity, unseen.ended_by(completion))
            return base.Cancelling.DISPLACED if self._displace_unseen(identity.tenant) else base.Cancelling.UNSEEN
        if row.ended:
            return base.Cancelling.ENDED
        if row.lease_ms > at.now:
            if not row.cancelling:
                self._write(identity, row._replace(cancelling=True).ended_by(completion))
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
            completion=None,
            running=is_running,
            attempts=row.attempts,
            due_ms=None if is_running else row.due_ms,
            step=row.step,
        )

    def endings(self, at: Times, requests: Sequence[Identity]) -> list[base.Ending | None]:
        found: list[base.Ending | None] = [None] * len(requests)
        asked = as_json([(each.tenant, each.id) for each in requests])
        for key, status, code, ended_ms, size, cancelling in self._execute(_ENDINGS, (asked, at.today, at.now)):
            if cancelling:
                status, code, ended_ms, size = None, None, 0, 0
            found[key] = base.Ending(status, code or "", ended_ms, size, bool(cancelling))
        return found

    # ---- progress of requests that clients follow --------------------------------------------------------------------

    def follow(
        self, at: Times, identity: Identity, submission: Submission, *, first_entry: NewEntry, keep_until_ms: int
    ) -> base.Submitted:
        row = self.read(at, identity)
        if row is not None and not row.noted:
            return (
                base.Submitted.CONFLICT if row.body_hash not in (None, submission.body_hash) else base.Submitted.KNOWN
            )
        before = self.submission(at, identity)
        if before is not None and row is not None and row.is_deferred:
            return base.Submitted.KNOWN if before.body_hash == submission.body_hash else base.Submitted.CONFLICT
        # The request may have ended before it was claimed. Readers have seen its end as entry `last + 1`: skip that.
        ended = self._execute(
            f"DELETE FROM followed {_OF} RETURNING last + 1", (identity.tenant, identity.id)
        ).fetchone()
        self.defer(at, identity, due_ms=None, keep_until_ms=keep_until_ms)
        key = self._add(identity, submission)
        last, size = ended[0] if ended else 0, len(first_entry.body)
        self._write_entries(key, last=last, events=0, size=size, entries=(first_entry,))
        return base.Submitted.NEW

    def unfollow(self, at: Times, identity: Identity) -> None:
        row = self.read(at, identity)
        if row is not None and row.is_deferred:
            self._execute(f"DELETE FROM request {_OF}", (identity.tenant, identity.id))

    def submission(self, _: Times, identity: Identity) -> Submission | None:
        found = self._execute(f"SELECT {_FIELDS} FROM followed {_OF}", (identity.tenant, identity.id)).fetchone()
        return None if found is None else Submission._make(found)

    def append(self, _: Times, parts: Sequence[Part]) -> Sequence[base.Refused | None]:
        return [self._append(part) for part in parts]

    def _append(self, part: Part) -> base.Refused | None:
        me = part.held.identity
        found = self._execute(_HOLDS, (me.tenant, me.id, part.held.token)).fetchone()
        if found is None:
            return base.Refused.FENCED
        key, last, events, size = found
        entries: list[NewEntry] = []
        restarts = False
        for entry in part.entries:
            if entry.kind == RESTART:  # another call has begun, so the events of the call before are not needed
                restarts, entries = True, [each for each in entries if each.kind != EVENT]
            entries.append(entry)
        if key is None or restarts:
            events = size = 0
        new_events = sum(entry.kind == EVENT for entry in entries)
        events, size = events + new_events, size + sum(len(entry.body) for entry in entries)
        if new_events and (events > self._spec.events_per_request or size > self._spec.event_bytes_per_request):
            return base.Refused.FULL
        if key is None:
            key, last = self._add(me, part.submission), 0
        elif restarts:
            self._execute(FORGET_EVENTS, (key, EVENT))
        self._write_entries(key, last=last, events=events, size=size, entries=entries)
        return None

    def _add(self, me: Identity, given: Submission) -> int:
        key = self._execute(_ADD, (me.tenant, me.id, *given)).lastrowid
        assert key is not None
        return key

    def _write_entries(self, key: int, *, last: int, events: int, size: int, entries: Sequence[NewEntry]) -> None:
        rows = [(key, number, entry.kind, entry.body) for number, entry in enumerate(entries, last + 1)]
        self.connection.executemany("INSERT INTO entry VALUES (?, ?, ?, ?)", rows)
        self._execute(
            "UPDATE followed SET last = ?, events = ?, bytes = ? WHERE key = ?", (last + len(rows), events, size, key)
        )

    def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[base.Look | None]:
        found: list[base.Look | None] = []
        left = ENTRIES_IN_A_LOOK
        for identity, after in wanted:
            row = self._execute(_PROGRESS, (identity.tenant, identity.id)).fetchone()
            if row is None:
                found.append(base.Look(is_known=False))
                continue
            key, last, ended = row
            if last <= after and not ended:
                found.append(None)
                continue
            read = self._execute(_ENTRIES, (key, after, min(base.ENTRIES_AT_ONCE, left)))
            entries = [base.Entry._make(each) for each in read]
            left -= len(entries)
            found.append(base.Look(entries=entries, last=last, ended=bool(ended)))
        return found

    # ---- counters and pauses -----------------------------------------------------------------------------------------

    def take(self, at: Times, name: str, amount: float, *, limit: float, period: base.Period) -> base.Taken:
        used = self._used_in(name, period)
        if granted := used + amount <= limit:
            used += amount
            self._execute(_SET_USED, (name, period.length_s, period.number, period.ends_ms, used))
        return base.Taken(granted=granted, used=used)

    def give_back(self, at: Times, name: str, amount: float, *, period: base.Period) -> None:
        # not below 0: the amount may have been taken in the period before
        used = max(0.0, self._used_in(name, period) - amount)
        self._execute(_SET_USED, (name, period.length_s, period.number, period.ends_ms, used))

    def hold(self, at: Times, name: str, owner: str, *, for_s: float) -> bool:
        held = self._execute(
            "INSERT INTO lease VALUES (?, ?, 0, ?) ON CONFLICT (name) DO UPDATE "
            "SET owner = excluded.owner, lease_ms = excluded.lease_ms "
            "WHERE lease.owner = excluded.owner OR lease.lease_ms <= ?",
            (name, owner, at.now + round(for_s * 1000), at.now),
        )
        return held.rowcount == 1

    def let_go(self, _: Times, name: str, owner: str) -> None:
        self._execute("UPDATE lease SET lease_ms = 0 WHERE name = ? AND owner = ?", (name, owner))

    def _used_in(self, name: str, period: base.Period) -> float:
        found = self._execute(_USED_IN, (name, period.length_s, period.number)).fetchone()
        return 0.0 if found is None else float(found[0])

    def reserve(
        self, at: Times, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        while self._expire_waiting(at):
            pass
        tenant, member = identity.tenant, f"{identity.id} {fingerprint.mark.hex()}"
        if is_repeated := self._execute(_IS_WAITING, (tenant, member)).fetchone() is not None:
            if fingerprint.redelivered:
                return WaitingLimit.WITHIN
            member += f" {fingerprint.nonce.hex()}"
        if self._waiting(tenant) + weight > self._spec.waiting_per_tenant:
            return WaitingLimit.REPEATED if is_repeated else WaitingLimit.TENANT
        if self._waiting(None) + weight > self._spec.waiting_in_all:
            return WaitingLimit.REPEATED if is_repeated else WaitingLimit.TOTAL
        if self._execute(_ADD_WAITING, (tenant, member, until_ms, weight)).rowcount:
            self._count_waiting(tenant, weight)
        return WaitingLimit.WITHIN

    def _expire_waiting(self, at: Times) -> int:
        ended = self._execute(_EXPIRED_WAITING, (at.today,)).fetchall()
        for tenant, weight in ended:
            self._count_waiting(tenant, -weight)
        return len(ended)

    def _waiting(self, tenant: str | None) -> int:
        found = self._execute(_WAITING, (tenant,)).fetchone()
        return 0 if found is None else int(found[0])

    def _count_waiting(self, tenant: str, by: int) -> None:
        for whose in (tenant, None):  # None: the sum of all tenants
            if not self._execute(_COUNT_WAITING, (by, whose)).rowcount:
                self._execute("INSERT INTO share_sum VALUES ('waiting', ?, ?)", (whose, by))
        if by < 0:
            self._execute("DELETE FROM share_sum WHERE kind = 'waiting' AND tenant = ? AND weight <= 0", (tenant,))

    def debounce(self, at: Times, identity: Identity, key: str, *, published_ms: int, until_ms: int) -> bool:
        self._execute(_DEBOUNCE, (identity.tenant, key, published_ms, identity.id, until_ms, at.today))
        return bool(self._execute(_LAST_UPDATE, (identity.tenant, key)).fetchone() == (identity.id,))

    def gather(
        self,
        at: Times,
        ticket: str,
        requests: Sequence[Identity],
        *,
        until_ms: int,
        former: Mapping[Identity, str] | None = None,
    ) -> set[Identity]:
        left = former or {}
        return {
            each
            for each in requests
            if self._execute(_GATHER, (each.tenant, each.id, ticket, until_ms, at.today, left.get(each, ""))).rowcount
        }

    def submit(self, at: Times, ticket: str, requests: Sequence[Identity], *, until_ms: int) -> dict[Identity, bool]:
        found: dict[Identity, bool] = {}
        for each in requests:
            row = self._execute(_IN_TICKET, (each.tenant, each.id)).fetchone()
            if row is None:
                self._execute(_GATHER, (each.tenant, each.id, ticket, until_ms, at.today, ""))
            if row is None or ticket.startswith(row[0]):
                found[each] = row in (None, (ticket, 1))
                self._execute(_SUBMIT, (ticket, until_ms, each.tenant, each.id))
        return found

    def clear(self, at: Times, ticket: str, requests: Sequence[Identity]) -> None:
        until_ms = at.today + base.LEFT_MS
        self.connection.executemany(_LEFT, [(until_ms, each.tenant, each.id, ticket) for each in requests])

    def enqueue(
        self,
        at: Times,
        ticket: str,
        account: str,
        *,
        requests: int,
        tokens: int,
        most_requests: int,
        most_tokens: int | None,
        until_ms: int,
    ) -> bool:
        others, in_all, tokens_in_all = self._execute(_ENQUEUED, (account, ticket, at.today)).fetchone()
        is_above = in_all + requests > most_requests
        if others and (is_above or (most_tokens is not None and tokens_in_all + tokens > most_tokens)):
            return False
        row = (ticket, account, requests, tokens, until_ms)
        self._execute("INSERT OR REPLACE INTO enqueued VALUES (?, ?, ?, ?, ?)", row)
        return True

    def dequeue(self, _: Times, ticket: str, account: str) -> None:
        self._execute("DELETE FROM enqueued WHERE ticket = ?", (ticket,))

    def note_webhook(self, at: Times, identity: Identity, row: bytes, *, until_ms: int) -> None:
        values = (identity.tenant, identity.id, at.today, identity.id, until_ms, row)
        self._execute("INSERT OR REPLACE INTO kept VALUES ('webhook', ?, ?, ?, ?, ?, ?)", values)

    def webhook(self, today: int, identity: Identity) -> bytes | None:
        found = self._execute(
            f"SELECT body {_WEBHOOKS} AND (tenant, key) = (?, ?)", (today, identity.tenant, identity.id)
        )
        return next((body for (body,) in found), None)

    def webhooks(self, today: int, *, most: int) -> Sequence[tuple[Identity, bytes]]:
        rows = self._execute(f"SELECT tenant, id, body {_WEBHOOKS} ORDER BY until_ms DESC LIMIT ?", (today, most))
        return [(Identity(tenant, id), body) for tenant, id, body in rows]

    def pause(self, at: Times, pause: Pause) -> bool:
        self._execute("DELETE FROM pause WHERE until_ms <= ?", (at.today,))
        (others,) = self._execute("SELECT count(*) FROM pause WHERE id <> ?", (pause.id,)).fetchone()
        if others >= base.PAUSES_AT_MOST:
            return False
        row = (pause.id, pause.until_ms, json.dumps(pause.as_json()))
        self._execute("INSERT OR REPLACE INTO pause VALUES (?, ?, ?)", row)
        return True

    def resume(self, at: Times, id: str) -> Pause | None:
        removed = self._execute(
            "DELETE FROM pause WHERE id = ? AND (until_ms IS NULL OR until_ms > ?) RETURNING body", (id, at.today)
        )
        return next(iter(base.pauses_in(body for (body,) in removed)), None)

    def pauses(self, today: int) -> list[Pause]:
        rows = self._execute("SELECT body FROM pause WHERE until_ms IS NULL OR until_ms > ?", (today,))
        return base.pauses_in(body for (body,) in rows)

    def fired(self, _: Times, schedule: str, firing: Firing, *, instead_of_ms: int = 0) -> None:
        self._execute(_FIRED, (schedule, *firing, firing.at_ms + FIRINGS_KEPT_MS, instead_of_ms))

    def firings(self, _: Times) -> dict[str, Firing]:
        rows = self._execute("SELECT key, at_ms, id FROM kept WHERE kind = 'schedule'")
        return {schedule: Firing(at_ms, id) for schedule, at_ms, id in rows}

    # ---- what is removed ---------------------------------------------------------------------------------------------

    def remove_expired(self, at: Times) -> int:
        found = self._execute(_EXPIRED, (at.today, at.now)).fetchall()
        others = (
            (_EXPIRED_ALLOWANCES, at.today - KEPT_AFTER_MS),
            (_EXPIRED_KEPT, at.today),
            (_SURPLUS_WEBHOOKS, base.WEBHOOKS_KEPT),
            (_EXPIRED_BATCHED, at.today),
            (_EXPIRED_LEASES, at.now),
            ("DELETE FROM enqueued WHERE until_ms <= ?", at.today),
        )
        removed = sum(self._execute(statement, (value,)).rowcount for statement, value in others)
        return removed + self.remove(at, next_step(deque(map(Surplus._make, found)))) + self._expire_waiting(at)

    def remove(self, at: Times, rows: Iterable[Surplus]) -> int:
        return sum(self._execute(_REMOVE, (row.tenant, row.id, row.state, at.now)).rowcount for row in rows)

    def used_bytes(self) -> int:
        pages, free, page_bytes = (
            int(self._execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * page_bytes

    def used_by_share(self, now: int) -> dict[Share, int]:
        found: dict[Share, int] = {}
        for tenant, kind, size in self._execute(_USED, (now,)):
            share = (tenant, Kind(kind))
            found[share] = found.get(share, 0) + size
        return found

    def surplus(self, now: int) -> list[Surplus]:
        """Returns rows to remove, the oldest of each share first, if the file is above its limit."""
        if (in_file := self.used_bytes()) <= self._spec.max_bytes:
            return []
        used = self.used_by_share(now)
        found: list[Surplus] = []
        for (tenant, kind), cut in cuts(used, sum(used.values()) * LOW_WATER * self._spec.max_bytes / in_file):
            rows = self._execute(_OLDEST, (tenant, now, kind, SURPLUS_ROWS - len(found)))
            found += oldest((Surplus(tenant, *row) for row in rows), cut)
        return found

    # ---- rows --------------------------------------------------------------------------------------------------------

    def read(self, at: Times, identity: Identity) -> Row | None:
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
        if (surplus := min(count - self._spec.unseen_per_tenant, DISPLACED_AT_MOST)) <= 0:
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
            keep_ms=max(message.keep_until_ms, at.today + self._keep_ms),
            nonce=message.nonce,
            deaths=deaths,
            headers=None if row is None else row.step or None,
        )
        self._write(identity, held)
        return Granted(token=held.token, deaths=deaths, followed=self._is_followed(identity))

    def _end_as_cancelled(self, at: Times, identity: Identity, row: Row) -> None:
        """End a request with the completion in `row`, and keep it for as long as a message of the request can wait in
        the broker."""
        keep_ms = max(row.keep_ms, at.today + self._cancelled_ms)
        self._write(identity, row._replace(lease_ms=0, keep_ms=keep_ms, cancelling=False))

    def _write(self, identity: Identity, row: Row) -> None:
        self._execute(_WRITE, (identity.tenant, identity.id, *row))


def _next_token(at: Times, row: Row | None) -> int:
    # Without a row, the time is higher than all tokens that the request may have had in a row that was removed or lost.
    return at.today if row is None else row.token + 1


def _of_completion(completion: Completion) -> tuple[Literal["ok", "error"], str, str, int, bytes]:
    headers = as_json(dict(completion.headers))
    return completion.status, completion.code, headers, completion.ended_ms, completion.body
