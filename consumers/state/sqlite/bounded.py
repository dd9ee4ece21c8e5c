"""Limits, by tenant, the rows that cost their publisher nothing, so that they displace no results of other tenants.

Cancellations of requests that no worker has seen: above a tenant's limit, its oldest is removed. Requests that ended
before any attempt: kept like all others until the store is full; then what a tenant has above its limit is removed
first.
"""

import sqlite3

from consumers.state.base import Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.shares import UNSEEN, UNTRIED, Shares

IS_UNSEEN = "body_hash IS NULL AND noted = 0 AND code = 'cancelled'"
UNSEEN_BYTES = 800
"""The size of an unseen cancellation, including the row that counts it."""
FORGOTTEN_AT_MOST = 10
"""The most cancellations that a new one displaces: more than one only after the limit was lowered."""
STEP_ROWS = 200
_FORGET_UNSEEN = f"DELETE FROM request WHERE tenant = ? AND id = ? AND {IS_UNSEEN}"
_FORGET_UNTRIED = (
    "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms <= ? AND status = 'error' AND lease_ms = 0"
)
"""`keep_ms <= ?` spares a request whose dead letter was published again: it is kept for longer than was counted."""


class Bounded:
    """Counts and removes these rows, over one connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._shares = Shares(connection)
        self._unseen_at_most = spec.unseen_per_tenant
        self._untried_at_most = spec.untried_per_tenant

    @property
    def unseen_bytes(self) -> int:
        return UNSEEN_BYTES * self._shares.used(UNSEEN)

    def count_unseen(self, identity: Identity, *, today: int, until_ms: int) -> bool:
        """Count an unseen cancellation. True if its tenant's oldest was removed for it."""
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
        """One bounded step: of the tenant with the most untried requests, remove the oldest above its limit. Returns
        how many, including those whose row was gone already."""
        tenant, used = self._shares.most(UNTRIED)
        surplus = min(used - self._untried_at_most, STEP_ROWS)
        for _ in range(surplus):
            if (oldest := self._shares.forget_oldest(UNTRIED, tenant)) is not None:
                self._execute(_FORGET_UNTRIED, (tenant, *oldest))
        return max(surplus, 0)

    def sweep(self, today: int) -> int:
        """One bounded step: remove members whose time is over. Returns how many."""
        return self._shares.forget_ended(UNSEEN, today) + self._shares.forget_ended(UNTRIED, today)
