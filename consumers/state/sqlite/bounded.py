"""Rows of which each tenant has a bounded number: what costs its publisher nothing, and must cost nobody else a result.

Beyond the bound a tenant's own oldest goes. Their bytes do not count towards the store's bound.
"""

import sqlite3
from typing import Literal

from consumers.state.base import Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.shares import UNSEEN, UNTRIED, Shares

Kind = Literal["unseen", "untried"]
IS_UNSEEN = "body_hash IS NULL AND noted = 0 AND code = 'cancelled'"
FORGOTTEN_AT_MOST = 10
"""Those that one more pushes out: several, where fewer are kept than before."""
_ROW_BYTES: dict[Kind, int] = {UNSEEN: 800, UNTRIED: 1000}
"""Of a row, with what counts it."""
_FORGET: dict[Kind, str] = {
    UNSEEN: f"DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms <= ? AND {IS_UNSEEN}",
    # A dead letter that was published again since is kept for longer than what is counted here.
    UNTRIED: "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms <= ? AND status = 'error' AND lease_ms = 0",
}


class Bounded:
    """Over one connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._shares = Shares(connection)
        self._at_most: dict[Kind, int] = {UNSEEN: spec.unseen_per_tenant, UNTRIED: spec.untried_per_tenant}

    @property
    def used_bytes(self) -> int:
        """Roughly."""
        return sum(each * self._shares.used(kind) for kind, each in _ROW_BYTES.items())

    def count(self, kind: Kind, identity: Identity, *, today: int, until_ms: int) -> bool:
        """Count a row that was written; whether its tenant's oldest of that kind was removed for it."""
        self._shares.forget_ended(kind, today)
        if not self._shares.has(kind, identity.tenant, identity.id):
            self._shares.add(kind, identity.tenant, identity.id, until_ms=until_ms)
        for removed in range(FORGOTTEN_AT_MOST):
            oldest = None
            if self._shares.used(kind, identity.tenant) > self._at_most[kind]:
                oldest = self._shares.forget_oldest(kind, identity.tenant)
            if oldest is None:
                return removed > 0
            self._execute(_FORGET[kind], (identity.tenant, *oldest))
        return True

    def removed(self, tenant: str, id: str) -> None:
        """A row was removed: what counted it goes too."""
        for kind in self._at_most:
            self._shares.forget(kind, tenant, id)

    def sweep(self, today: int) -> int:
        """A bounded step: those that count no more."""
        return sum(self._shares.forget_ended(kind, today) for kind in self._at_most)
