"""The store in a SQLite file, which all processes of one machine can use together."""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final, Self

from consumers.state import base
from consumers.state.base import Completion, Fingerprint, Held, Identity, StoreSpec, StoreUnavailable
from consumers.state.shedding import LOW_WATER, STEP_ROWS, SURPLUS_ROWS, Kind, Share, Surplus, cuts, next_step
from consumers.state.sqlite import counters
from consumers.state.sqlite.file import ROOM_BYTES, Clock, connect, explain, probe
from consumers.state.sqlite.following import Reader
from consumers.state.sqlite.requests import Claim, Complete, Times
from consumers.state.sqlite.writer import Tables, Writer
from lanekeeper.contract.names import ATTEMPT


class SqliteStore:
    """Implements `FollowedStore`. The file must not be on a network file system, because SQLite's locks and shared
    memory do not work there."""

    is_full = False

    def __init__(
        self,
        path: Path,
        *,
        namespace: str,
        spec: StoreSpec = base.DEFAULT,
        clock: Clock | None = None,
        former: Path | None = None,
    ) -> None:
        self._path = path
        self._no_room: str | None = None
        self._clock = clock or Clock()
        self._max_bytes = spec.max_bytes
        self._surplus: deque[Surplus] = deque()
        self._looking: sqlite3.Connection | None = None
        self._writer = Writer(path, namespace=namespace, spec=spec, clock=self._clock, former=former)
        self.times = self._writer.times
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
        if self._looking is not None:
            with suppress(sqlite3.Error):  # it is closed already
                self._looking.interrupt()  # its thread would delay the end of the process
        await self._writer.close()

    async def probe(self) -> None:
        left, used = await self._writer.do(
            lambda tables, at: (probe(tables.connection, self._path, at.today), used_bytes(tables.connection))
        )
        self._no_room, self.is_full = None, used > self._max_bytes
        if left < ROOM_BYTES:
            self._no_room = f"{self._path} has no room left, its disk is full ({left} bytes): free some space"
            raise StoreUnavailable(self._no_room)

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> base.ClaimAnswer:
        return await self._writer.do(
            lambda tables, at: tables.requests.claim(at, identity, fingerprint),
            batchable=Claim(identity, fingerprint),
            durable=False,
        )

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, base.Stop]:
        return await self._writer.do(lambda tables, at: tables.requests.renew(at, held), durable=False)

    async def shelter(self, held: Held) -> None:
        await self._writer.do(lambda tables, at: tables.requests.shelter(at, held), durable=False)

    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True
    ) -> None:
        await self._writer.do(
            lambda tables, at: tables.requests.release(at, held, attempts, due_ms, is_survived=is_survived)
        )

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        return await self._writer.do(lambda tables, at: tables.requests.defer(at, identity, due_ms, keep_until_ms))

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        return await self._writer.do(
            lambda tables, at: tables.requests.complete(at, identity, fingerprint, completion, token),
            batchable=None if token is None else Complete(identity, fingerprint, completion, token),
        )

    async def note(self, identity: Identity, completion: Completion) -> None:
        await self._writer.do(lambda tables, at: tables.requests.note(at, identity, completion))

    async def cancel(self, identity: Identity, completion: Completion) -> base.Cancelling:
        return await self._writer.do(lambda tables, at: tables.requests.cancel(at, identity, completion))

    async def find(self, identity: Identity) -> base.Found | None:
        return await self._writer.do(lambda tables, at: tables.requests.find(at, identity))

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> base.WaitingLimit:
        return await self._writer.do(
            lambda tables, at: tables.waiting.reserve(at.today, identity, fingerprint, weight=weight, until_ms=until_ms)
        )

    async def follow(
        self, identity: Identity, submission: base.Submission, *, first_entry: base.NewEntry, keep_until_ms: int
    ) -> base.Submitted:
        return await self._writer.do(
            lambda tables, at: tables.followed.follow(
                at, identity, submission, first_entry=first_entry, keep_until_ms=keep_until_ms
            )
        )

    async def unfollow(self, identity: Identity) -> None:
        await self._writer.do(lambda tables, at: tables.followed.unfollow(at, identity))

    async def submission(self, identity: Identity) -> base.Submission | None:
        return await self._writer.do(lambda tables, _: tables.followed.submission(identity), durable=False)

    async def append(self, parts: Sequence[base.Part]) -> Sequence[base.Refused | None]:
        return await self._writer.do(lambda tables, _: [tables.followed.append(part) for part in parts], durable=False)

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[base.Look | None]:
        if self._writer.trouble is not None:
            raise StoreUnavailable(self._writer.trouble)
        return await self._reader.look(wanted)

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> base.Taken:
        return await self._writer.do(
            lambda tables, at: tables.counters.take(at, name, amount, limit=limit, period_s=period_s)
        )

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        await self._writer.do(lambda tables, at: tables.counters.correct(at, name, amount, period_s=period_s))

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        return await self._writer.do(lambda tables, at: tables.counters.hold(at, name, owner, for_s=for_s))

    async def let_go(self, name: str, owner: str) -> None:
        await self._writer.do(lambda tables, _: tables.counters.let_go(name, owner))

    async def pauses(self) -> Sequence[base.Pause]:
        if self._writer.trouble is not None:
            raise StoreUnavailable(self._writer.trouble)
        return await self._reader.pauses(self._clock.since_1970_ms())

    async def pause(self, pause: base.Pause) -> bool:
        return await self._writer.do(lambda tables, at: counters.pause(tables.connection, at, pause))

    async def resume(self, id: str) -> base.Pause | None:
        return await self._writer.do(lambda tables, at: counters.resume(tables.connection, at, id))

    async def debounce(self, identity: Identity, key: str, *, published_ms: int, until_ms: int) -> bool:
        return await self._writer.do(
            lambda tables, at: counters.debounce(tables.connection, at, identity, key, published_ms, until_ms)
        )

    async def sweep(self) -> int:
        removed = await self._writer.do(_remove_expired)
        if not (removed or self._surplus):
            self._surplus.extend(await asyncio.to_thread(self._found_surplus))
        while not removed and (step := next_step(self._surplus)):
            removed = await self._writer.do(partial(_remove, step))
        return removed

    def _found_surplus(self) -> list[Surplus]:
        # This reads the whole file, so it has a thread and a connection of its own, and does not delay writes.
        try:
            with closing(connect(self._path)) as connection:
                self._looking = connection
                connection.execute("BEGIN")
                return surplus(connection, self._clock.since_boot_ms(), max_bytes=self._max_bytes)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(explain(error, self._path)) from error


# ---- what is removed -------------------------------------------------------------------------------------------------

# Sizes that are assumed, in bytes: of a request's row with its entries in indexes, but without headers and body; of the
# submission of a followed request; of an entry of its progress, without its content; of a row of the table `share`.
ROW_BYTES: Final = 400
FOLLOWED_BYTES: Final = 300
ENTRY_BYTES: Final = 30
COUNTED_BYTES: Final = 400
_SIZE: Final = (
    f"{ROW_BYTES} + coalesce(length(headers), 0) + coalesce(length(body), 0)"
    f" + coalesce((SELECT {FOLLOWED_BYTES} + bytes + {ENTRY_BYTES} * last FROM followed f"
    " WHERE f.tenant = request.tenant AND f.id = request.id), 0)"
)
_KIND: Final = (
    f"CASE WHEN lease_ms > ? THEN '{Kind.KEPT}' WHEN status IS NULL OR cancelling THEN '{Kind.LIVE}'"
    f" WHEN body_hash IS NULL AND NOT noted THEN '{Kind.CANCELLED}'"
    f" WHEN status = 'error' AND (noted OR instr(headers, '\"{ATTEMPT}\": 0')) THEN '{Kind.FREE}'"
    f" ELSE '{Kind.PAID}' END"
)
_USED: Final = (
    f"SELECT tenant, {_KIND} AS kind, sum({_SIZE}) FROM request NOT INDEXED GROUP BY tenant, kind UNION ALL"
    f" SELECT tenant, '{Kind.KEPT}', count(*) * {COUNTED_BYTES} FROM share GROUP BY tenant UNION ALL"
    f" SELECT tenant, '{Kind.KEPT}', sum({COUNTED_BYTES} + coalesce(length(body), 0)) FROM kept GROUP BY tenant"
)
_EXPIRED: Final = (
    f"SELECT tenant, id, {_SIZE}, keep_ms FROM request WHERE keep_ms <= ? AND lease_ms <= ?"
    f" ORDER BY keep_ms LIMIT {STEP_ROWS}"
)
_OLDEST: Final = f"SELECT id, {_SIZE}, keep_ms FROM request WHERE tenant = ? AND {_KIND} = ? ORDER BY keep_ms LIMIT ?"
_REMOVE: Final = "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms = ? AND lease_ms <= ?"


def used_bytes(connection: sqlite3.Connection) -> int:
    """The size of the file without free pages."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return int(pages - free) * int(page_bytes)


def used_by_share(connection: sqlite3.Connection, now: int) -> dict[Share, int]:
    """The size, in bytes, of each tenant's rows of each kind."""
    found: dict[Share, int] = {}
    for tenant, kind, size in connection.execute(_USED, (now,)):
        share = (tenant, Kind(kind))
        found[share] = found.get(share, 0) + size
    return found


def surplus(connection: sqlite3.Connection, now: int, *, max_bytes: int) -> list[Surplus]:
    """Returns rows to remove, the oldest of each share first, if the file is above `max_bytes`."""
    if (in_file := used_bytes(connection)) <= max_bytes:
        return []
    used = used_by_share(connection, now)
    at_most = sum(used.values()) * LOW_WATER * max_bytes / in_file
    found: list[Surplus] = []
    for (tenant, kind), cut in sorted(cuts(used, at_most).items(), key=lambda each: -each[1]):
        for id, size, keep_ms in connection.execute(_OLDEST, (tenant, now, kind, SURPLUS_ROWS - len(found))):
            if cut <= 0:
                break
            found.append(Surplus(tenant, id, size, keep_ms))
            cut -= size
    return found


def _remove_expired(tables: Tables, at: Times) -> int:
    found = tables.connection.execute(_EXPIRED, (at.today, at.now)).fetchall()
    requests = _remove(next_step(deque(map(Surplus._make, found))), tables, at)
    kept = counters.sweep_kept(tables.connection, at)
    return requests + tables.counters.sweep(at) + tables.waiting.sweep(at.today) + kept


def _remove(rows: Sequence[Surplus], tables: Tables, at: Times) -> int:
    """Remove those of these rows that have not changed."""
    execute = tables.connection.execute
    return sum(execute(_REMOVE, (row.tenant, row.id, row.state, at.now)).rowcount for row in rows)
