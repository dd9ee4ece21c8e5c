"""The SQLite store in memory, without its thread and delay, and its allowances alone, for tests of the code above them.

If `failing` is set, every call raises it, like a store that is unavailable. `log` lists what was written, in order."""

import asyncio
import sqlite3
from functools import cache
from typing import TypeVar

from typing_extensions import override

from consumers.clock import now_ms
from consumers.spending import DAY, Cap
from consumers.state import decisions
from consumers.state.base import DAY_S as DAY_S
from consumers.state.base import (
    AllowanceReservation,
    AllowanceTaken,
    Period,
    StoreSpec,
    StoreUnavailable,
    period_of,
)
from consumers.state.decisions import Times
from consumers.state.sqlite.file import SCHEMA
from consumers.state.sqlite.store import Operation, SqliteStore
from consumers.state.sqlite.tables import Tables

T = TypeVar("T")
LOGGED = {name: name for name in ("claim", "shelter", "release", "defer", "reserve", "debounce", "cancel")} | {
    "complete": "stored",
    "note": "noted",
}


@cache
def _empty() -> bytes:
    """A database with the tables. Making them takes a millisecond, and hundreds of tests need them."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(SCHEMA)
    return connection.serialize()


class MemoryStore(SqliteStore):
    """Claims and results. Its clock `now_ms` changes only when a test sets it."""

    trouble: str | None = None

    def __init__(self, log: list[str] | None = None, *, spec: StoreSpec | None = None) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.deserialize(_empty())
        self.spec = spec or StoreSpec()
        self._tables = Tables(connection, self.spec)
        self.log = [] if log is None else log
        self.now_ms = 1_000_000
        self.failing: StoreUnavailable | None = None

    @override
    async def transact(self, name: str, operation: Operation[T], *, durable: bool = True) -> T:
        return operation(self._tables, self._at(LOGGED.get(name)))

    @override
    async def read(self, operation: Operation[T]) -> T:
        return operation(self._tables, self._at())

    @override
    async def probe(self) -> None:
        self._at()

    def _at(self, step: str | None = None) -> Times:
        if self.failing is not None:
            raise self.failing
        if step is not None:
            self.log.append(step)
        return Times(now=self.now_ms, today=1_790_000_000_000 + self.now_ms)


def current(length_s: int) -> Period:
    """The period of this length in which we are."""
    return period_of(length_s, now_ms())


def daily(**cap: float) -> dict[str, Cap]:
    """The caps of a lane or tenant that has one for the day alone."""
    return {DAY: Cap(**cap)}


class MemoryAllowances:
    def __init__(self) -> None:
        self.used: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._reserved: dict[tuple[str, str], tuple[str, float]] = {}
        self.is_away = False
        self.fails_at = 0
        """The number of the only call that raises StoreUnavailable; 0: none."""
        self.hangs = False
        self._calls = 0

    async def take(
        self, name: str, amount: float, *, limit: float, period: Period, reservation: AllowanceReservation | None = None
    ) -> AllowanceTaken:
        self._look()
        if self.hangs:
            await asyncio.Event().wait()
        id = "" if reservation is None else reservation.id
        freed = [self._reserved.pop((name, id), ("", 0.0))[1]]
        taken = decisions.take(self._used_in(name, period), freed, amount, limit)
        if taken.granted or freed[0]:
            self.used[name] = taken.used
        if taken.granted and reservation is not None:
            self._reserved[name, id] = reservation.nonce, amount
        return taken

    async def settle(self, name: str, used: float, *, period: Period, reservation: AllowanceReservation) -> None:
        self._look()
        nonce, amount = self._reserved.get((name, reservation.id), ("", 0.0))
        if nonce == reservation.nonce:
            self._reserved.pop((name, reservation.id), None)
            self.used[name] = max(0.0, self._used_in(name, period) - amount)
        self.used[name] = self._used_in(name, period) + used

    async def give_back(self, name: str, amount: float, *, period: Period) -> None:
        self._look()
        self.used[name] = max(0.0, self._used_in(name, period) - amount)

    def _used_in(self, name: str, period: Period) -> float:
        if self._numbers.setdefault(name, period.number) != period.number:
            self.used.pop(name, None)
        self._numbers[name] = period.number
        return self.used.get(name, 0.0)

    def _look(self) -> None:
        self._calls += 1
        if self.is_away or self._calls == self.fails_at:
            raise StoreUnavailable("away")
