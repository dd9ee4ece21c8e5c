"""What the store keeps beside requests, as rows of a SQLite file: allowances, leases, messages that wait in the broker
because their publishers asked for a delay, and pauses. Each method works within a transaction that its caller opened;
its argument `at` is the time of the transaction."""

import json
import sqlite3
from typing import Final

from consumers.state.base import PAUSES_AT_MOST, Fingerprint, Identity, Pause, StoreSpec, Taken, WaitingLimit, pauses_in
from consumers.state.shedding import STEP_ROWS
from consumers.state.sqlite.requests import Times

KEPT_AFTER_MS = 86_400_000
"""How long what was used in a period is kept after its end, in case the calendar time is set back into it."""
_EXPIRED_ALLOWANCES: Final = (
    "DELETE FROM allowance WHERE (name, period_s, period) IN "
    f"(SELECT name, period_s, period FROM allowance WHERE ends_ms < ? LIMIT {STEP_ROWS})"
)
_EXPIRED_KEPT: Final = (
    "DELETE FROM kept WHERE (kind, tenant, key) IN "
    f"(SELECT kind, tenant, key FROM kept WHERE until_ms <= ? LIMIT {STEP_ROWS})"
)
_IS_WAITING: Final = "SELECT 1 FROM share WHERE (kind, tenant, member) = ('waiting', ?, ?)"
_COUNT_WAITING: Final = "SELECT weight FROM share_sum WHERE kind = 'waiting' AND tenant IS ?"
_ADD_WAITING: Final = "INSERT INTO share VALUES ('waiting', ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_EXPIRED_WAITING: Final = (
    "DELETE FROM share WHERE (kind, tenant, member) IN "
    f"(SELECT kind, tenant, member FROM share WHERE kind = 'waiting' AND until_ms <= ? LIMIT {STEP_ROWS}) "
    "RETURNING tenant, weight"
)
_CHANGE_SUM: Final = "UPDATE share_sum SET weight = weight + ? WHERE kind = 'waiting' AND tenant IS ?"
_ADD_SUM: Final = "INSERT INTO share_sum VALUES ('waiting', ?, ?)"
_DROP_SUM: Final = "DELETE FROM share_sum WHERE kind = 'waiting' AND tenant = ? AND weight <= 0"


class Counters:
    """Implements `Allowances` and `Leases` on one SQLite connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def take(self, at: Times, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        period, used = self._current(at, name, period_s)
        granted = used + amount <= limit
        if granted:
            used += amount
            self._set(name, period, used, period_s)
        return Taken(granted=granted, used=used, resets_in_s=((period + 1) * period_s * 1000 - at.today) / 1000)

    def correct(self, at: Times, name: str, amount: float, *, period_s: int) -> None:
        period, used = self._current(at, name, period_s)
        # Not below 0: the amount may have been taken in the period before.
        self._set(name, period, max(0.0, used - amount), period_s)

    def hold(self, at: Times, name: str, owner: str, *, for_s: float) -> bool:
        held = self._execute(
            "INSERT INTO lease VALUES (?, ?, 0, ?) ON CONFLICT (name) DO UPDATE "
            "SET owner = excluded.owner, lease_ms = excluded.lease_ms "
            "WHERE lease.owner = excluded.owner OR lease.lease_ms <= ?",
            (name, owner, at.now + round(for_s * 1000), at.now),
        )
        return held.rowcount == 1

    def let_go(self, name: str, owner: str) -> None:
        self._execute("UPDATE lease SET lease_ms = 0 WHERE name = ? AND owner = ?", (name, owner))

    def sweep(self, at: Times) -> int:
        return self._execute(_EXPIRED_ALLOWANCES, (at.today - KEPT_AFTER_MS,)).rowcount

    def _current(self, at: Times, name: str, period_s: int) -> tuple[int, float]:
        """The number of the allowance's current period (such as today), and the amount used in it."""
        period = at.today // (period_s * 1000)
        found = self._execute(
            "SELECT used FROM allowance WHERE name = ? AND period_s = ? AND period = ?", (name, period_s, period)
        ).fetchone()
        return period, 0.0 if found is None else float(found[0])

    def _set(self, name: str, period: int, used: float, period_s: int) -> None:
        self._execute(
            "INSERT INTO allowance VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (name, period_s, period) DO UPDATE SET used = excluded.used",
            (name, period_s, period, (period + 1) * period_s * 1000, used),
        )


class Waiting:
    """Implements `Store.reserve` on one SQLite connection. The table `share` has a row for each counted message;
    `share_sum` has the sums, so that no rows need be counted."""

    def __init__(self, connection: sqlite3.Connection, spec: StoreSpec) -> None:
        self._execute = connection.execute
        self._per_tenant = spec.waiting_per_tenant
        self._in_all = spec.waiting_in_all

    def reserve(
        self, today: int, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        while self.sweep(today):
            pass
        tenant, member = identity.tenant, f"{identity.id} {fingerprint.mark.hex()}"
        if is_repeated := self._execute(_IS_WAITING, (tenant, member)).fetchone() is not None:
            if fingerprint.redelivered:
                return WaitingLimit.WITHIN
            member += f" {fingerprint.nonce.hex()}"
        if self._sum(tenant) + weight > self._per_tenant:
            return WaitingLimit.REPEATED if is_repeated else WaitingLimit.TENANT
        if self._sum(None) + weight > self._in_all:
            return WaitingLimit.REPEATED if is_repeated else WaitingLimit.TOTAL
        if self._execute(_ADD_WAITING, (tenant, member, until_ms, weight)).rowcount:
            self._change(tenant, weight)
        return WaitingLimit.WITHIN

    def sweep(self, today: int) -> int:
        ended = self._execute(_EXPIRED_WAITING, (today,)).fetchall()
        for tenant, weight in ended:
            self._change(tenant, -weight)
        return len(ended)

    def _sum(self, tenant: str | None) -> int:
        found = self._execute(_COUNT_WAITING, (tenant,)).fetchone()
        return 0 if found is None else int(found[0])

    def _change(self, tenant: str, by: int) -> None:
        for whose in (tenant, None):  # None: the sum of all tenants
            if not self._execute(_CHANGE_SUM, (by, whose)).rowcount:
                self._execute(_ADD_SUM, (whose, by))
        if by < 0:
            self._execute(_DROP_SUM, (tenant,))


def pause(connection: sqlite3.Connection, at: Times, wanted: Pause) -> bool:
    """`StoredPauses.pause`"""
    connection.execute("DELETE FROM pause WHERE until_ms <= ?", (at.today,))
    (others,) = connection.execute("SELECT count(*) FROM pause WHERE id <> ?", (wanted.id,)).fetchone()
    if others >= PAUSES_AT_MOST:
        return False
    row = (wanted.id, wanted.until_ms, json.dumps(wanted.as_json()))
    connection.execute("INSERT OR REPLACE INTO pause VALUES (?, ?, ?)", row)
    return True


def debounce(
    connection: sqlite3.Connection, at: Times, identity: Identity, key: str, published_ms: int, until_ms: int
) -> bool:
    """`Store.debounce`"""
    connection.execute(
        "INSERT INTO kept VALUES ('debounce', ?, ?, ?, ?, ?, NULL) ON CONFLICT DO UPDATE "
        "SET at_ms = excluded.at_ms, id = excluded.id, until_ms = max(until_ms, excluded.until_ms) "
        "WHERE (excluded.at_ms, excluded.id) > (at_ms, id) OR until_ms <= ?",
        (identity.tenant, key, published_ms, identity.id, until_ms, at.today),
    )
    last = "SELECT id FROM kept WHERE (kind, tenant, key) = ('debounce', ?, ?)"
    return bool(connection.execute(last, (identity.tenant, key)).fetchone() == (identity.id,))


def sweep_kept(connection: sqlite3.Connection, at: Times) -> int:
    """Remove what need no longer be kept."""
    return connection.execute(_EXPIRED_KEPT, (at.today,)).rowcount


def resume(connection: sqlite3.Connection, at: Times, id: str) -> Pause | None:
    """`StoredPauses.resume`"""
    removed = connection.execute(
        "DELETE FROM pause WHERE id = ? AND (until_ms IS NULL OR until_ms > ?) RETURNING body", (id, at.today)
    )
    return next(iter(pauses_in(body for (body,) in removed)), None)
