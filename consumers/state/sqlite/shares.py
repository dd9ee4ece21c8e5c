"""Counts what each tenant has of each limited kind of row, in a SQLite file, with sums that are kept up to date."""

import sqlite3
from typing import Final

from consumers.state.base import Copy, Identity, Room
from consumers.state.spec import StoreSpec

STEP_ROWS = 100
UNSEEN: Final = "unseen"
"""Cancellations of requests that no worker has seen."""
UNTRIED: Final = "untried"
"""Requests that ended before any attempt was made. They cost their publisher nothing."""
WAITING: Final = "waiting"
"""Requests that wait in the broker because their publisher asked for a delay."""
SCHEMA = """
CREATE TABLE share (
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    member TEXT NOT NULL,
    until_ms INTEGER NOT NULL,  -- since 1970: when it counts no more
    weight INTEGER NOT NULL,
    PRIMARY KEY (kind, tenant, member)
) STRICT, WITHOUT ROWID;
CREATE INDEX share_by_end ON share (kind, until_ms);
CREATE INDEX share_by_tenant ON share (kind, tenant, until_ms);
CREATE TABLE share_sum (
    kind TEXT NOT NULL,
    tenant TEXT,  -- NULL: of all tenants
    weight INTEGER NOT NULL,
    UNIQUE (kind, tenant)
) STRICT;
"""


class Shares:
    """Adds, counts and removes members of a kind, over one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def has(self, kind: str, tenant: str, member: str) -> bool:
        row = (kind, tenant, member)
        return self._execute("SELECT 1 FROM share WHERE (kind, tenant, member) = (?, ?, ?)", row).fetchone() is not None

    def add(self, kind: str, tenant: str, member: str, *, until_ms: int, weight: int = 1) -> None:
        """Add a member that is not there yet."""
        self._execute("INSERT INTO share VALUES (?, ?, ?, ?, ?)", (kind, tenant, member, until_ms, weight))
        self._change(kind, tenant, weight)

    def used(self, kind: str, tenant: str | None = None) -> int:
        """How much a tenant has, or all tenants together (None)."""
        found = self._execute("SELECT weight FROM share_sum WHERE kind = ? AND tenant IS ?", (kind, tenant)).fetchone()
        return 0 if found is None else int(found[0])

    def most(self, kind: str) -> tuple[str, int]:
        """The tenant that has most of a kind, and how much."""
        found = self._execute(
            "SELECT tenant, weight FROM share_sum WHERE kind = ? AND tenant IS NOT NULL ORDER BY weight DESC LIMIT 1",
            (kind,),
        ).fetchone()
        return ("", 0) if found is None else (str(found[0]), int(found[1]))

    def forget_ended(self, kind: str, today: int) -> int:
        """One bounded step: remove members whose time is over. Returns how many."""
        ended = self._execute(
            "DELETE FROM share WHERE (kind, tenant, member) IN "
            f"(SELECT kind, tenant, member FROM share WHERE kind = ? AND until_ms <= ? LIMIT {STEP_ROWS}) "
            "RETURNING tenant, weight",
            (kind, today),
        ).fetchall()
        for tenant, weight in ended:
            self._change(kind, tenant, -weight)
        return len(ended)

    def forget_oldest(self, kind: str, tenant: str) -> tuple[str, int] | None:
        """Remove the tenant's member whose time would end first. Returns it and that time."""
        found = self._execute(
            "DELETE FROM share WHERE (kind, tenant, member) IN (SELECT kind, tenant, member FROM share "
            "WHERE kind = ? AND tenant = ? ORDER BY until_ms LIMIT 1) RETURNING member, until_ms, weight",
            (kind, tenant),
        ).fetchall()
        for _, _, weight in found:
            self._change(kind, tenant, -weight)
        return (str(found[0][0]), int(found[0][1])) if found else None

    def _change(self, kind: str, tenant: str, by: int) -> None:
        for each in (tenant, None):
            changed = self._execute(
                "UPDATE share_sum SET weight = weight + ? WHERE kind = ? AND tenant IS ?", (by, kind, each)
            )
            if not changed.rowcount:
                self._execute("INSERT INTO share_sum VALUES (?, ?, ?)", (kind, each, by))
        if by < 0:
            self._execute("DELETE FROM share_sum WHERE kind = ? AND tenant = ? AND weight <= 0", (kind, tenant))


class Waiting:
    """Implements `Waits` on one SQLite connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._shares = Shares(connection)
        self._per_tenant = spec.waiting_per_tenant
        self._in_all = spec.waiting_in_all

    def reserve(self, today: int, identity: Identity, copy: Copy, *, weight: int, until_ms: int) -> Room:
        while self._shares.forget_ended(WAITING, today):
            pass
        member = f"{identity.id} {copy.mark.hex()}"
        if self._shares.has(WAITING, identity.tenant, member):
            if copy.redelivered:
                return Room.KEPT
            member += f" {copy.nonce.hex()}"
        if self._shares.used(WAITING, identity.tenant) + weight > self._per_tenant:
            return Room.TENANT_FULL
        if self._shares.used(WAITING) + weight > self._in_all:
            return Room.FULL
        if not self._shares.has(WAITING, identity.tenant, member):  # it is, if an earlier answer was lost
            self._shares.add(WAITING, identity.tenant, member, until_ms=until_ms, weight=weight)
        return Room.KEPT

    def sweep(self, today: int) -> int:
        return self._shares.forget_ended(WAITING, today)
