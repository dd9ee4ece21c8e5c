"""What costs its publisher nothing, and must cost nobody else a result: rows that are counted by tenant.

Cancellations of what no worker has seen: beyond a tenant's bound its oldest goes. Requests that ended before any
attempt: they are kept like all others until the store is full; then what a tenant has beyond its bound goes first.
"""

import sqlite3

from consumers.state.base import Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.shares import UNSEEN, UNTRIED, Shares

IS_UNSEEN = "body_hash IS NULL AND noted = 0 AND code = 'cancelled'"
UNSEEN_BYTES = 800
"""Of the cancellation of what no worker has seen, with what counts it."""
FORGOTTEN_AT_MOST = 10
"""Cancellations that one more pushes out: several, where fewer are kept than before."""
STEP_ROWS = 200
_FORGET_UNSEEN = f"DELETE FROM request WHERE tenant = ? AND id = ? AND {IS_UNSEEN}"
_FORGET_UNTRIED = (
    "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms <= ? AND status = 'error' AND lease_ms = 0"
)
"""A dead letter that was published again since is kept for longer than what was counted."""


class Bounded:
    """Over one connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._shares = Shares(connection)
        self._unseen_at_most = spec.unseen_per_tenant
        self._untried_at_most = spec.untried_per_tenant

    @property
    def unseen_bytes(self) -> int:
        return UNSEEN_BYTES * self._shares.used(UNSEEN)

    def count_unseen(self, identity: Identity, *, today: int, until_ms: int) -> bool:
        """Whether its tenant's oldest was removed for it."""
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
        """A bounded step: of the tenant that has most that was not tried, the oldest beyond its bound; how many, with
        those whose row has gone before."""
        tenant, used = self._shares.most(UNTRIED)
        surplus = min(used - self._untried_at_most, STEP_ROWS)
        for _ in range(surplus):
            if (oldest := self._shares.forget_oldest(UNTRIED, tenant)) is not None:
                self._execute(_FORGET_UNTRIED, (tenant, *oldest))
        return max(surplus, 0)

    def sweep(self, today: int) -> int:
        """A bounded step: those that count no more."""
        return self._shares.forget_ended(UNSEEN, today) + self._shares.forget_ended(UNTRIED, today)
