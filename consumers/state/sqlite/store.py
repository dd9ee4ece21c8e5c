"""The store in a SQLite file, which all processes of one machine can use together."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from consumers.state.base import (
    Cancelling,
    ClaimAnswer,
    Completion,
    Fingerprint,
    Found,
    Held,
    Identity,
    Stop,
    StoreUnavailable,
    Taken,
    WaitingLimit,
)
from consumers.state.following import Look, NewEntry, Part, Refused, Submission, Submitted
from consumers.state.spec import DEFAULT, StoreSpec
from consumers.state.sqlite.clock import Clock
from consumers.state.sqlite.file import ROOM_BYTES, probe
from consumers.state.sqlite.reader import Reader
from consumers.state.sqlite.together import Claim, Complete
from consumers.state.sqlite.writer import Writer


class SqliteStore:
    """Implements `FollowedStore`. The file must not be on a network file system, because SQLite's locks and shared
    memory do not work there."""

    def __init__(self, path: Path, *, namespace: str, spec: StoreSpec = DEFAULT, clock: Clock | None = None) -> None:
        self._path = path
        self._no_room: str | None = None
        self._writer = Writer(path, namespace=namespace, spec=spec, clock=clock or Clock())
        self._reader = Reader(path)

    @property
    def trouble(self) -> str | None:
        return self._writer.trouble or self._no_room

    async def __aenter__(self) -> Self:
        self._writer.start()
        with suppress(StoreUnavailable):
            await self.probe()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.close()
        await self._writer.close()

    async def probe(self) -> None:
        left = await self._writer.do(lambda tables, at: probe(tables.connection, self._path, at.today))
        self._no_room = None
        if left < ROOM_BYTES:
            self._no_room = f"{self._path} has no room left, its disk is full ({left} bytes): free some space"
            raise StoreUnavailable(self._no_room)

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        return await self._writer.do(
            lambda tables, at: tables.requests.claim(at, identity, fingerprint),
            batchable=Claim(identity, fingerprint),
            durable=False,
        )

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        return await self._writer.do(
            lambda tables, at: {} if tables.together.renew(at, held) else tables.requests.renew(at, held), durable=False
        )

    async def release(self, held: Held, *, attempts: int = 0, due_ms: int | None = None) -> None:
        await self._writer.do(lambda tables, at: tables.requests.release(at, held, attempts, due_ms))

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        return await self._writer.do(lambda tables, at: tables.requests.defer(at, identity, due_ms, keep_until_ms))

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        batchable = None  # a completion without a claim, or before any attempt, needs further steps
        if token is not None and not completion.is_untried:
            batchable = Complete(identity, fingerprint, completion, token)
        return await self._writer.do(
            lambda tables, at: tables.requests.complete(at, identity, fingerprint, completion, token),
            batchable=batchable,
        )

    async def note(self, identity: Identity, completion: Completion) -> None:
        await self._writer.do(lambda tables, at: tables.requests.note(at, identity, completion))

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        return await self._writer.do(lambda tables, at: tables.requests.cancel(at, identity, completion))

    async def find(self, identity: Identity) -> Found | None:
        return await self._writer.do(lambda tables, at: tables.requests.find(at, identity))

    async def sweep(self) -> int:
        return await self._writer.do(
            lambda tables, at: tables.sweeping.sweep(at) + tables.counters.sweep(at) + tables.waiting.sweep(at.today)
        )

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        return await self._writer.do(
            lambda tables, at: tables.waiting.reserve(at.today, identity, fingerprint, weight=weight, until_ms=until_ms)
        )

    async def follow(
        self, identity: Identity, submission: Submission, *, first_entry: NewEntry, keep_until_ms: int
    ) -> Submitted:
        return await self._writer.do(
            lambda tables, at: tables.followed.follow(
                at, identity, submission, first_entry=first_entry, keep_until_ms=keep_until_ms
            )
        )

    async def unfollow(self, identity: Identity) -> None:
        await self._writer.do(lambda tables, at: tables.followed.unfollow(at, identity))

    async def submission(self, identity: Identity) -> Submission | None:
        return await self._writer.do(lambda tables, _: tables.followed.submission(identity), durable=False)

    async def append(self, parts: Sequence[Part]) -> Sequence[Refused | None]:
        return await self._writer.do(lambda tables, _: tables.followed.append(parts), durable=False)

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        if self._writer.trouble is not None:
            raise StoreUnavailable(self._writer.trouble)
        return await self._reader.look(wanted)

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        return await self._writer.do(
            lambda tables, at: tables.counters.take(at, name, amount, limit=limit, period_s=period_s)
        )

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        await self._writer.do(lambda tables, at: tables.counters.correct(at, name, amount, period_s=period_s))

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        return await self._writer.do(lambda tables, at: tables.counters.hold(at, name, owner, for_s=for_s))

    async def let_go(self, name: str, owner: str) -> None:
        await self._writer.do(lambda tables, _: tables.counters.let_go(name, owner))
