"""The store in a SQLite file, which all processes of one machine can use together."""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from consumers.state import base
from consumers.state.base import Identity, StoreSpec, StoreUnavailable
from consumers.state.shedding import Surplus, next_step
from consumers.state.sqlite.file import ROOM_BYTES, Clock, connect, explain, probe
from consumers.state.sqlite.tables import Tables, Times
from consumers.state.sqlite.writer import Operation, Reader, Writer

P = ParamSpec("P")
T = TypeVar("T")


def _in_writer(
    operation: Callable[Concatenate[Tables, Times, P], T], *, durable: bool = True
) -> Callable[Concatenate["SqliteStore", P], Coroutine[Any, Any, T]]:
    """A method of the store that runs this operation in the thread that writes the file."""

    async def run(store: "SqliteStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store.transact(
            operation.__name__, lambda tables, at: operation(tables, at, *args, **kwargs), durable=durable
        )

    return run


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
        self._spec = spec
        self._surplus: deque[Surplus] = deque()
        self._looking: sqlite3.Connection | None = None
        self._writer = Writer(path, namespace=namespace, spec=spec, clock=self._clock, former=former)
        self.times = self._writer.times
        self._reader = Reader(path, spec)

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
        left, used = await self.transact(
            "probe", lambda tables, at: (probe(tables.connection, self._path, at.today), tables.used_bytes())
        )
        self._no_room, self.is_full = None, used > self._spec.max_bytes
        if left < ROOM_BYTES:
            self._no_room = f"{self._path} has no room left, its disk is full ({left} bytes): free some space"
            raise StoreUnavailable(self._no_room)

    async def transact(self, name: str, operation: Operation[T], *, durable: bool = True) -> T:
        return await self._writer.do(name, operation, durable=durable)

    claim = _in_writer(Tables.claim, durable=False)
    renew = _in_writer(Tables.renew, durable=False)
    shelter = _in_writer(Tables.shelter, durable=False)
    release = _in_writer(Tables.release)
    defer = _in_writer(Tables.defer)
    complete = _in_writer(Tables.complete)
    note = _in_writer(Tables.note)
    cancel = _in_writer(Tables.cancel)
    find = _in_writer(Tables.find)
    reserve = _in_writer(Tables.reserve)
    follow = _in_writer(Tables.follow)
    unfollow = _in_writer(Tables.unfollow)
    submission = _in_writer(Tables.submission, durable=False)
    append = _in_writer(Tables.append, durable=False)
    debounce = _in_writer(Tables.debounce)
    note_webhook = _in_writer(Tables.note_webhook, durable=False)
    gather = _in_writer(Tables.gather)
    submit = _in_writer(Tables.submit)
    clear = _in_writer(Tables.clear)
    enqueue = _in_writer(Tables.enqueue)
    dequeue = _in_writer(Tables.dequeue)
    take = _in_writer(Tables.take)
    give_back = _in_writer(Tables.give_back)
    hold = _in_writer(Tables.hold)
    let_go = _in_writer(Tables.let_go)
    pause = _in_writer(Tables.pause)
    fired = _in_writer(Tables.fired)
    firings = _in_writer(Tables.firings, durable=False)
    resume = _in_writer(Tables.resume)

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[base.Look | None]:
        return await self._read(lambda tables: tables.look(wanted))

    async def webhook(self, identity: Identity) -> bytes | None:
        found = await self._read(lambda tables: tables.webhooks(self._clock.since_1970_ms(), identity=identity, most=1))
        return found[0][1] if found else None

    async def webhooks(self, *, most: int) -> Sequence[tuple[Identity, bytes]]:
        return await self._read(lambda tables: tables.webhooks(self._clock.since_1970_ms(), most=most))

    async def pauses(self) -> Sequence[base.Pause]:
        return await self._read(lambda tables: tables.pauses(self._clock.since_1970_ms()))

    async def _read(self, read: Callable[[Tables], T]) -> T:
        if self._writer.trouble is not None:
            raise StoreUnavailable(self._writer.trouble)
        return await self._reader.do(read)

    async def sweep(self) -> int:
        removed = await self.transact("sweep", Tables.remove_expired)
        if not (removed or self._surplus):
            self._surplus.extend(await asyncio.to_thread(self._found_surplus))
        while not removed and (step := next_step(self._surplus)):
            removed = await self.transact("sweep", partial(Tables.remove, rows=step))
        return removed

    def _found_surplus(self) -> list[Surplus]:
        # This reads the whole file, so it has a thread and a connection of its own, and does not delay writes.
        try:
            with closing(connect(self._path)) as connection:
                self._looking = connection
                connection.execute("BEGIN")
                return Tables(connection, self._spec).surplus(self._clock.since_boot_ms())
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(explain(error, self._path)) from error
