"""New claims, completions by their holders, renewals: those of one transaction are written by one statement each.

Nearly every request is new, and is completed by whoever claimed it. So the usual case is written without reading the
row before. Operations that such a statement did not write are done one by one, by `Requests`. sqlite3 gives up the
interpreter's lock at each step of each statement, and gets it back only when the event loop lets go of it: one
statement instead of two or three an operation saves these waits, and a third of the work.

The operations of a transaction were all asked for before one of them was answered. So their order is free, also
between claims and completions: each caller sees what it could have seen.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from consumers.state.base import Completion, Copy, Granted, Held, Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.requests import Times, as_json

SIZES: Final = (32, 16, 8, 4, 2, 1)
"""How many rows one statement writes. Few sizes, so that each stays prepared."""
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
"""A claim that was forgotten is completed all the same, as `Requests.complete` does it."""
_COMPLETE_ROW: Final = "(?1, ?2, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)"
_RENEW: Final = (
    "UPDATE request SET lease_ms = ?1 FROM (VALUES {}) AS held"
    " WHERE tenant = held.column1 AND id = held.column2 AND token = held.column3 AND status IS NULL"
)
"""Not with `IN (VALUES …)`: for that SQLite reads the whole table."""


def _by_size(statement: str, row: str) -> dict[int, str]:
    return {size: statement.format(", ".join([row] * size)) for size in SIZES}


_CLAIMS: Final = _by_size(_CLAIM, _CLAIM_ROW)
_COMPLETIONS: Final = _by_size(_COMPLETE, _COMPLETE_ROW)
_RENEWALS: Final = _by_size(_RENEW, "(?, ?, ?)")


class Claim(NamedTuple):
    """Asks for the claim of a request."""

    identity: Identity
    copy: Copy


class Complete(NamedTuple):
    """Completes a claim that the caller holds, of a request that was attempted."""

    identity: Identity
    copy: Copy
    completion: Completion
    token: int


class Together:
    """Writes these, over one connection. `claim` and `complete` take as many as one of `SIZES`, see `parts`, and return
    the results in order; None: not written; do that operation by itself. If an error of one of them is raised, none is
    written."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)

    def claim(self, at: Times, asked: Sequence[Claim]) -> list[Granted | None]:
        """Grant the claims of requests that have no row."""
        values: list[object] = [at.today, at.now + self._lease_ms, at.now, at.today + self._keep_ms]
        for me, copy in asked:
            values += (me.tenant, me.id, copy.body_hash, copy.mark, copy.nonce)
        written = self._execute(_CLAIMS[len(asked)], values)
        granted = Granted(token=at.today)
        if written.rowcount == len(asked):
            return [granted] * len(asked)
        new: set[tuple[str, str]] = set()
        if written.rowcount and written.lastrowid:  # the new rows have the highest numbers
            new.update(self._execute(_WRITTEN, (written.lastrowid - written.rowcount,)))
        found: list[Granted | None] = []
        for me, _ in asked:
            found.append(granted if (me.tenant, me.id) in new else None)
            new.discard((me.tenant, me.id))  # a second claim of the same request comes after the first
        return found

    def complete(self, at: Times, asked: Sequence[Complete]) -> list[Completion | None]:
        """Complete the claims that are held by their token."""
        values: list[object] = [at.now, at.today + self._keep_ms]
        for me, copy, ending, token in asked:
            values += (me.tenant, me.id, copy.body_hash, copy.mark, token, ending.status, ending.code)
            values += (as_json(dict(ending.headers)), ending.ended_ms, ending.body)
        written = self._execute(_COMPLETIONS[len(asked)], values)
        is_all = written.rowcount == len(asked)
        return [each.completion if is_all else None for each in asked]

    def renew(self, at: Times, held: Sequence[Held]) -> bool:
        """Renew leases. Whether there is no more to do: no holder has to stop, and none was forgotten."""
        renewed = 0
        for some in parts(held):
            values: list[object] = [at.now + self._lease_ms]
            for me, token in ((each.identity, each.token) for each in some):
                values += (me.tenant, me.id, token)
            renewed += self._execute(_RENEWALS[len(some)], values).rowcount
        return renewed == len(held)


def parts(wanted: Sequence[T]) -> Iterator[Sequence[T]]:
    """As few parts as there can be, each of one of the sizes."""
    begin = 0
    for size in SIZES:
        while len(wanted) - begin >= size:
            yield wanted[begin : begin + size]
            begin += size
