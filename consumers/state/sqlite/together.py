"""Writes many claims, completions or renewals by one statement, without reading the rows first.

This covers the usual case: a claim of a new request, and a completion or a renewal by the holder of the claim.
Operations that such a statement does not write are done one by one, by `Requests`. Writing many rows by one statement
takes a third less work than writing them one by one. The thread also waits less for the interpreter's lock, because
sqlite3 releases the lock at each step of each statement, and the event loop may take it then.

The operations of one transaction may be done in any order, because all of them were requested before the first one was
answered.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from consumers.state.base import Completion, Fingerprint, Granted, Held, Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.rows import Times, as_json

SIZES: Final = (32, 16, 8, 4, 2, 1)
"""The numbers of rows that one SQL statement can write. There are few of them, because there is one prepared statement
for each number, and SQLite's connection keeps only a limited number of prepared statements."""
T = TypeVar("T")

_CLAIM: Final = (
    "INSERT INTO request (token, lease_ms, claimed_ms, keep_ms, tenant, id, body_hash, mark, nonce,"
    " attempts, noted, cancelling, deaths) VALUES {} ON CONFLICT (tenant, id) DO NOTHING"
)
_CLAIM_ROW: Final = "(?1, ?2, ?3, ?4, ?, ?, ?, ?, ?, 0, 0, 0, 0)"
_WRITTEN: Final = "SELECT tenant, id FROM request WHERE rowid > ?"
_COMPLETE: Final = (
    "INSERT INTO request (claimed_ms, keep_ms, tenant, id, body_hash, mark, token, status, code, headers, ended_ms,"
    " body, lease_ms, attempts, noted, cancelling, deaths) VALUES {} ON CONFLICT (tenant, id) DO UPDATE SET"
    " lease_ms = 0, keep_ms = excluded.keep_ms, cancelling = 0, status = excluded.status, code = excluded.code,"
    " headers = excluded.headers, ended_ms = excluded.ended_ms, body = excluded.body"
    " WHERE request.token = excluded.token AND (request.status IS NULL OR request.cancelling)"
)
"""The SQL statement that stores how requests ended. Like `Requests.complete`, it inserts a row for the request if the
store has lost the claim."""
_COMPLETE_ROW: Final = "(?1, ?2, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)"
_RENEW: Final = (
    "UPDATE request SET lease_ms = ?1 FROM (VALUES {}) AS held"
    " WHERE tenant = held.column1 AND id = held.column2 AND token = held.column3 AND status IS NULL"
)
"""The SQL statement that renews claims. `IN (VALUES …)` in place of the join would make SQLite read the whole table."""


def _by_size(statement: str, row: str) -> dict[int, str]:
    return {size: statement.format(", ".join([row] * size)) for size in SIZES}


_CLAIMS: Final = _by_size(_CLAIM, _CLAIM_ROW)
_COMPLETIONS: Final = _by_size(_COMPLETE, _COMPLETE_ROW)
_RENEWALS: Final = _by_size(_RENEW, "(?, ?, ?)")


class Claim(NamedTuple):
    """A request's claim that waits to be written together with others: the arguments of `Requests.claim`."""

    identity: Identity
    fingerprint: Fingerprint


class Complete(NamedTuple):
    """A request's completion that waits to be written together with others: the arguments of `Requests.complete`. It is
    used only if the caller holds the claim, and a call to a provider was attempted."""

    identity: Identity
    fingerprint: Fingerprint
    completion: Completion
    token: int


class Together:
    """Writes many claims, completions or renewals with one SQL statement, over one connection to the SQLite file.

    The number of operations that `claim` and `complete` take at once must be one of `SIZES` (see `parts`). They return
    the results in order. The result None means that the operation must be done by `Requests`. If one operation raises
    an error, none is written.
    """

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)

    def claim(self, at: Times, asked: Sequence[Claim]) -> list[Granted | None]:
        """Grant the claims of requests that have no row in the table, by one statement. Returns the grants in order,
        with None for each request that has a row, because `Requests` must decide about its claim."""
        values: list[object] = [at.today, at.now + self._lease_ms, at.now, at.today + self._keep_ms]
        for identity, fingerprint in asked:
            values += (identity.tenant, identity.id, fingerprint.body_hash, fingerprint.mark, fingerprint.nonce)
        written = self._execute(_CLAIMS[len(asked)], values)
        granted = Granted(token=at.today)
        if written.rowcount == len(asked):
            return [granted] * len(asked)
        new: set[tuple[str, str]] = set()
        if written.rowcount and written.lastrowid:  # the new rows have the highest numbers
            new.update(self._execute(_WRITTEN, (written.lastrowid - written.rowcount,)))
        found: list[Granted | None] = []
        for identity, _ in asked:
            found.append(granted if (identity.tenant, identity.id) in new else None)
            new.discard((identity.tenant, identity.id))  # a second claim of the same request comes after the first
        return found

    def complete(self, at: Times, asked: Sequence[Complete]) -> list[Completion | None]:
        """Store how several requests ended, by one statement, if the tokens of their claims are valid. Returns the
        completions in order. If one of them could not be stored, the result for each of them is None, and `Requests`
        must store them one by one."""
        values: list[object] = [at.now, at.today + self._keep_ms]
        for identity, fingerprint, ending, token in asked:
            values += (identity.tenant, identity.id, fingerprint.body_hash, fingerprint.mark, token)
            values += (ending.status, ending.code, as_json(dict(ending.headers)), ending.ended_ms, ending.body)
        written = self._execute(_COMPLETIONS[len(asked)], values)
        is_all = written.rowcount == len(asked)
        return [complete.completion if is_all else None for complete in asked]

    def renew(self, at: Times, held: Sequence[Held]) -> bool:
        """Renew several claims, by a few SQL statements. Returns True if all were renewed. Returns False if some claims
        are lost or their workers must stop, so that `Requests` must renew the claims one by one."""
        renewed = 0
        for part in parts(held):
            values: list[object] = [at.now + self._lease_ms]
            for claim in part:
                values += (claim.identity.tenant, claim.identity.id, claim.token)
            renewed += self._execute(_RENEWALS[len(part)], values).rowcount
        return renewed == len(held)


def parts(wanted: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a sequence into as few parts as possible, each with one of `SIZES` as its length, because there are SQL
    statements for these numbers of rows only."""
    begin = 0
    for size in SIZES:
        while len(wanted) - begin >= size:
            yield wanted[begin : begin + size]
            begin += size
