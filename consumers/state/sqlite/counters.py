"""Allowances and leases as rows of a SQLite file. Each method works within a transaction that its caller opened."""

import sqlite3

from consumers.state.base import Taken
from consumers.state.sqlite.rows import Times
from consumers.state.sqlite.sweeping import STEP_ROWS

KEPT_AFTER_MS = 86_400_000
"""When a period of an allowance has ended, the amount that was used in the period is kept for this many ms more, in
case the calendar time is set back into the period."""


class Counters:
    """Implements `Allowances` (how much was used in a period) and `Leases` (which process does a job) on one SQLite
    connection. The methods' argument `at` is the time of the transaction."""

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
        """Remove the used amounts of periods that ended more than `KEPT_AFTER_MS` ago, at most `STEP_ROWS` of them.
        Returns how many were removed."""
        return self._execute(
            "DELETE FROM allowance WHERE (name, period_s, period) IN "
            f"(SELECT name, period_s, period FROM allowance WHERE ends_ms < ? LIMIT {STEP_ROWS})",
            (at.today - KEPT_AFTER_MS,),
        ).rowcount

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
