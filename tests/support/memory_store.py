"""A store in memory that behaves like the SQLite store, without delay, for tests of the code above it.

If `failing` is set, every call raises it, like a store that is unavailable. `log` lists what was written, in order.
"""

import sqlite3
from functools import cache
from typing import TypeVar

from typing_extensions import override

from consumers.state.base import StoreSpec, StoreUnavailable
from consumers.state.sqlite.file import SCHEMA
from consumers.state.sqlite.store import SqliteStore
from consumers.state.sqlite.tables import Tables, Times
from consumers.state.sqlite.writer import Operation

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
        self._tables = Tables(connection, spec or StoreSpec())
        self.log = [] if log is None else log
        self.now_ms = 1_000_000
        self.failing: StoreUnavailable | None = None

    @override
    async def transact(self, name: str, operation: Operation[T], *, durable: bool = True) -> T:
        return operation(self._tables, self._at(LOGGED.get(name)))

    @override
    async def probe(self) -> None:
        self._at()

    def _at(self, step: str | None = None) -> Times:
        if self.failing is not None:
            raise self.failing
        if step is not None:
            self.log.append(step)
        return Times(now=self.now_ms, today=1_790_000_000_000 + self.now_ms)
