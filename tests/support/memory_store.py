"""A store in memory that behaves like the SQLite store, without delay, for tests of the code above it.

If `failing` is set, every call raises it, like a store that is unavailable. `log` lists what was written, in order.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache

from typing_extensions import override

from consumers.state.base import (
    Cancelling,
    ClaimAnswer,
    Completion,
    Fingerprint,
    Found,
    Held,
    Identity,
    Stop,
    StoreSpec,
    StoreUnavailable,
    WaitingLimit,
)
from consumers.state.sqlite.counters import Waiting, debounce
from consumers.state.sqlite.file import SCHEMA
from consumers.state.sqlite.requests import Requests, Times
from consumers.state.sqlite.store import SqliteStore


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
        self._connection = connection
        self._requests = Requests(connection, spec or StoreSpec())
        self._waiting = Waiting(connection, spec or StoreSpec())
        self.log = [] if log is None else log
        self.now_ms = 1_000_000
        self.failing: StoreUnavailable | None = None

    @override
    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        return self._requests.claim(self._at("claim"), identity, fingerprint)

    @override
    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        return self._requests.renew(self._at(), held)

    @override
    async def shelter(self, held: Held) -> None:
        self._requests.shelter(self._at("shelter"), held)

    @override
    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True
    ) -> None:
        self._requests.release(self._at("release"), held, attempts, due_ms, is_survived=is_survived)

    @override
    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        return self._requests.defer(self._at("defer"), identity, due_ms, keep_until_ms)

    @override
    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        today = self._at("reserve").today
        return self._waiting.reserve(today, identity, fingerprint, weight=weight, until_ms=until_ms)

    @override
    async def debounce(self, identity: Identity, key: str, *, published_ms: int, until_ms: int) -> bool:
        return debounce(self._connection, self._at("debounce"), identity, key, published_ms, until_ms)

    @override
    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        return self._requests.complete(self._at("stored"), identity, fingerprint, completion, token)

    @override
    async def note(self, identity: Identity, completion: Completion) -> None:
        self._requests.note(self._at("noted"), identity, completion)

    @override
    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        return self._requests.cancel(self._at("cancel"), identity, completion)

    @override
    async def probe(self) -> None:
        self._at()

    @override
    async def find(self, identity: Identity) -> Found | None:
        return self._requests.find(self._at(), identity)

    def _at(self, step: str | None = None) -> Times:
        if self.failing is not None:
            raise self.failing
        if step is not None:
            self.log.append(step)
        return Times(now=self.now_ms, today=1_790_000_000_000 + self.now_ms)
