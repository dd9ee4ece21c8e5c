"""Limits the rows that a tenant can create without paying for a call, so that they do not displace other results.

There are two kinds. Unseen cancellations, of requests that no worker has seen: above a tenant's limit, its oldest one
is removed. Untried requests, which ended before any attempt: they are kept like others until the store is full; then
those above a tenant's limit are removed first.
"""

import sqlite3

from consumers.state.base import Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.shares import UNSEEN, UNTRIED, Shares

IS_UNSEEN = "body_hash IS NULL AND noted = 0 AND code = 'cancelled'"
UNSEEN_BYTES = 800
"""The size, in bytes, that is assumed for the cancellation of a request that no worker has seen, including the row that
counts it."""
FORGOTTEN_AT_MOST = 10
"""One call of `count_unseen` removes at most this many cancellations of requests that no worker has seen. It removes
more than one only after the tenant's limit was lowered."""
STEP_ROWS = 200
"""The most results of untried requests that one step of sweeping removes."""
_FORGET_UNSEEN = f"DELETE FROM request WHERE tenant = ? AND id = ? AND {IS_UNSEEN}"
_FORGET_UNTRIED = (
    "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms <= ? AND status = 'error' AND lease_ms = 0"
)
"""The SQL statement that removes one result of an untried request (one that ended before any attempt). Its condition
`keep_ms <= ?` excludes a request that ran again since it was counted, because its dead letter was published again: its
row is kept for longer."""


class Bounded:
    """Limits two kinds of rows for each tenant, over one SQLite connection: cancellations of requests that no worker
    has seen (unseen), and results of requests that ended before any attempt (untried)."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._shares = Shares(connection)
        self._unseen_at_most = spec.unseen_per_tenant
        self._untried_at_most = spec.untried_per_tenant

    @property
    def unseen_bytes(self) -> int:
        return UNSEEN_BYTES * self._shares.used(UNSEEN)

    def count_unseen(self, identity: Identity, *, today: int, until_ms: int) -> bool:
        """Count the cancellation of a request that no worker has seen. Returns True if the tenant was at its limit, so
        that its oldest such cancellation was removed."""
        self._shares.forget_ended(UNSEEN, today)
        self._add(UNSEEN, identity, until_ms)
        displaces = False
        for _ in range(FORGOTTEN_AT_MOST):
            if self._shares.used(UNSEEN, identity.tenant) <= self._unseen_at_most:
                break
            if (oldest := self._shares.forget_oldest(UNSEEN, identity.tenant)) is not None:
                self._execute(_FORGET_UNSEEN, (identity.tenant, oldest[0]))
            displaces = True
        return displaces

    def count_untried(self, identity: Identity, *, until_ms: int) -> None:
        self._add(UNTRIED, identity, until_ms)

    def _add(self, kind: str, identity: Identity, until_ms: int) -> None:
        if not self._shares.has(kind, identity.tenant, identity.id):
            self._shares.add(kind, identity.tenant, identity.id, until_ms=until_ms)

    def remove_surplus(self) -> int:
        """Remove results of untried requests, the oldest first, of the tenant that has the most of them, down to the
        tenant's limit, at most `STEP_ROWS`. Returns how many, including those whose row no longer existed."""
        tenant, used = self._shares.most(UNTRIED)
        surplus = min(used - self._untried_at_most, STEP_ROWS)
        for _ in range(surplus):
            if (oldest := self._shares.forget_oldest(UNTRIED, tenant)) is not None:
                self._execute(_FORGET_UNTRIED, (tenant, *oldest))
        return max(surplus, 0)

    def sweep(self, today: int) -> int:
        """Stop counting cancellations and results (rows of this SQLite file) whose retention time is over, a limited
        number at a time. Returns how many."""
        return self._shares.forget_ended(UNSEEN, today) + self._shares.forget_ended(UNTRIED, today)
