"""Counts, in a SQLite file, how many rows of certain kinds each tenant has, and all tenants together, so that limits
can be applied. A tenant can create these rows without paying for a call, so without limits they could displace the
results of other tenants.

The table `share` has a row for each counted item; `share_sum` has the sums, so that no rows need be counted.
"""

import sqlite3
from typing import Final

from consumers.state.base import Fingerprint, Identity, WaitingLimit
from consumers.state.spec import StoreSpec

STEP_ROWS = 100
"""The maximum number of rows of the table `share` that one step of sweeping (the removal of expired rows) removes."""
UNSEEN: Final = "unseen"
"""The name under which the store counts cancellations of requests that no worker has seen. If a tenant has more such
cancellations than its limit, its oldest one is removed."""
UNTRIED: Final = "untried"
"""The name under which the store counts results of requests that ended before any attempt was made. These results are
kept like others until the SQLite file is too large; then those above a tenant's limit are removed first."""
WAITING: Final = "waiting"
"""The name under which the store counts the messages that wait in the broker because their publishers asked for a
delay."""
SCHEMA = """
CREATE TABLE share (
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    member TEXT NOT NULL,
    until_ms INTEGER NOT NULL,  -- since 1970: until when it counts
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
    """Counts how many items of one kind each tenant has in the store, so that a limit can be applied. `member`: the
    name of a counted item, for example the id of a request; `weight`: the number of items as which it counts."""

    def __init__(self, connection: sqlite3.Connection, kind: str) -> None:
        self._execute = connection.execute
        self._kind = kind

    def has(self, tenant: str, member: str) -> bool:
        row = (self._kind, tenant, member)
        return self._execute("SELECT 1 FROM share WHERE (kind, tenant, member) = (?, ?, ?)", row).fetchone() is not None

    def add(self, tenant: str, member: str, *, until_ms: int, weight: int = 1) -> None:
        """Count an item of a tenant. Does nothing if it is counted already."""
        row = (self._kind, tenant, member, until_ms, weight)
        if self._execute("INSERT INTO share VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount:
            self._change(tenant, weight)

    def used(self, tenant: str | None = None) -> int:
        """The sum of the weights of the tenant's items, or of all tenants' items if `tenant` is None."""
        row = (self._kind, tenant)
        found = self._execute("SELECT weight FROM share_sum WHERE kind = ? AND tenant IS ?", row).fetchone()
        return 0 if found is None else int(found[0])

    def most(self) -> tuple[str, int]:
        """The tenant whose items have the largest sum of weights, and that sum."""
        found = self._execute(
            "SELECT tenant, weight FROM share_sum WHERE kind = ? AND tenant IS NOT NULL ORDER BY weight DESC LIMIT 1",
            (self._kind,),
        ).fetchone()
        return ("", 0) if found is None else (str(found[0]), int(found[1]))

    def forget_ended(self, today: int) -> int:
        """Stop counting items whose time (`until_ms`) is over, at most `STEP_ROWS` of them. Returns their number."""
        return len(self._forget(f"until_ms <= ? LIMIT {STEP_ROWS}", today))

    def forget_oldest(self, tenant: str) -> tuple[str, int] | None:
        """Stop counting the tenant's item whose time (`until_ms`) ends first. Returns the item's name and that time, or
        None if the tenant has no items."""
        for _, member, until_ms, _ in self._forget("tenant = ? ORDER BY until_ms LIMIT 1", tenant):
            return member, until_ms
        return None

    def _forget(self, which: str, value: str | int) -> list[tuple[str, str, int, int]]:
        """Stop counting the items that the SQL condition `which` selects. Returns for each item its tenant, name,
        `until_ms` and weight."""
        found = self._execute(
            "DELETE FROM share WHERE (kind, tenant, member) IN "
            f"(SELECT kind, tenant, member FROM share WHERE kind = ? AND {which}) "
            "RETURNING tenant, member, until_ms, weight",
            (self._kind, value),
        ).fetchall()
        for tenant, _, _, weight in found:
            self._change(tenant, -weight)
        return found

    def _change(self, tenant: str, by: int) -> None:
        for whose in (tenant, None):  # None: the sum of all tenants
            changed = self._execute(
                "UPDATE share_sum SET weight = weight + ? WHERE kind = ? AND tenant IS ?", (by, self._kind, whose)
            )
            if not changed.rowcount:
                self._execute("INSERT INTO share_sum VALUES (?, ?, ?)", (self._kind, whose, by))
        if by < 0:
            self._execute("DELETE FROM share_sum WHERE kind = ? AND tenant = ? AND weight <= 0", (self._kind, tenant))


class Waiting:
    """Limits how many messages of a tenant, and of all tenants, wait in the broker for a delay. Implements
    `Store.reserve` on one SQLite connection."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._shares = Shares(connection, WAITING)
        self._per_tenant = spec.waiting_per_tenant
        self._in_all = spec.waiting_in_all

    def reserve(
        self, today: int, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        while self._shares.forget_ended(today):
            pass
        member = f"{identity.id} {fingerprint.mark.hex()}"
        if self._shares.has(identity.tenant, member):
            if fingerprint.redelivered:
                return WaitingLimit.WITHIN
            member += f" {fingerprint.nonce.hex()}"
        if self._shares.used(identity.tenant) + weight > self._per_tenant:
            return WaitingLimit.TENANT
        if self._shares.used() + weight > self._in_all:
            return WaitingLimit.TOTAL
        self._shares.add(identity.tenant, member, until_ms=until_ms, weight=weight)
        return WaitingLimit.WITHIN

    def sweep(self, today: int) -> int:
        return self._shares.forget_ended(today)
