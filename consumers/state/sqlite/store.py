"""The store in a SQLite file, which all processes of one machine can use together. Two threads use the file: one writes
it (`Writer`), one reads what clients poll (`Reader`).

All operations that wait for the writer at the same time share one transaction, and so at most one fsync. If it fails,
it is rolled back, and all its operations fail. The file is opened again if it was removed or replaced, and after any
error except that another process has locked it.
"""

import asyncio
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from consumers.state import base
from consumers.state.base import Identity, StoreSpec, StoreUnavailable
from consumers.state.decisions import Change, Times
from consumers.state.requests import Decide
from consumers.state.rows import DecideRows, Place, Rows
from consumers.state.shedding import Surplus, next_step
from consumers.state.sqlite.file import (
    ROOM_BYTES,
    Clock,
    connect,
    drop_log,
    explain,
    inode,
    is_locked,
    log_of,
    open_file,
    probe_disk,
    sync_commits,
)
from consumers.state.sqlite.tables import Tables
from consumers.state.store import Store
from lanekeeper.telemetry.figures import timings

P = ParamSpec("P")
T = TypeVar("T")
WAITING_AT_MOST = 10_000
GROUP_AT_MOST = 500
REOPEN_S = 0.5
CLOSE_S = 10.0
"""How long `close` waits for the last operations: longer than one wait for a lock (`BUSY_S`) and one fsync."""
_INVALID_VALUES = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ValueError,
    OverflowError,
)
"""The errors that come from the values of one operation (too large, or invalid Unicode). Only that operation fails."""


Operation = Callable[[Tables, Times], T]
_Done = tuple["asyncio.Future[Any]", Any, Exception | None]


class _WaitingOperation(NamedTuple):
    operation: Operation[Any]
    done: "asyncio.Future[Any]"
    durable: bool


@dataclass(eq=False)
class Writer:
    """Runs all operations on the file in one thread, from `start` to `close`, for one event loop."""

    path: Path
    _: KW_ONLY
    namespace: str
    spec: StoreSpec
    clock: Clock

    def __post_init__(self) -> None:
        self._waiting = 0
        self._is_closed = False
        self._gathered: list[_WaitingOperation] = []
        self._is_busy = False
        self._groups: queue.SimpleQueue[list[_WaitingOperation] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._tables: Tables | None = None
        self._file = self._log = inode(self.path)
        self._syncs: bool | None = None
        self._reopen_at_s = time.monotonic()
        self.trouble: str | None = None
        self.times = timings()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Carry out the operations that still wait, then end the thread."""
        self._is_closed = True
        while self._gathered:
            self._hand_over()
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def do(self, name: str, operation: Operation[T], *, durable: bool) -> T:
        """Run an operation in the thread. Returns its result as soon as what it wrote would survive a power cut.
        `durable`: False if it need not survive one; its result is then returned as soon as other processes can see what
        it has written."""
        if self._is_closed:
            raise StoreUnavailable(f"{self.path} is not used any more: this store was closed")
        if self._waiting >= WAITING_AT_MOST:
            raise StoreUnavailable(f"{self.path} is too slow: {self._waiting} operations wait for it")
        done: asyncio.Future[T] = self._loop.create_future()
        self._waiting += 1
        self._gathered.append(_WaitingOperation(operation, done, durable))
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._hand_over)
        began_s = time.monotonic()
        try:
            return await done
        finally:
            self.times[name].add(time.monotonic() - began_s)

    def _hand_over(self) -> None:
        group, self._gathered = self._gathered[:GROUP_AT_MOST], self._gathered[GROUP_AT_MOST:]
        self._is_busy = bool(group)
        if group:
            self._groups.put(group)

    def _hand_back(self, done: list[_Done]) -> None:
        self._waiting -= len(done)
        self._hand_over()  # first, so that the thread need not wait
        for future, value, error in done:
            if future.done():  # the caller has gone
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    # ---- in the thread ----

    def _run(self) -> None:
        while (group := self._groups.get()) is not None:
            done = self._do_all(group)
            with suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._hand_back, done)
        self._shut()

    def _do_all(self, group: list[_WaitingOperation]) -> list[_Done]:
        try:
            done = self._transact(group)
        except (sqlite3.Error, OSError, StoreUnavailable) as error:
            self.trouble = text = explain(error, self.path)
            if not is_locked(error):
                self._shut()
            return [(future, None, StoreUnavailable(text)) for _, future, *_ in group]
        except Exception as error:  # a bug: the callers get the error, and the thread goes on
            self._shut()
            return [(future, None, error) for _, future, *_ in group]
        self.trouble = None
        return done

    def _transact(self, group: list[_WaitingOperation]) -> list[_Done]:
        tables = self._usable()
        if (must_sync := self._must_sync(group)) != self._syncs:
            sync_commits(tables.connection, must_sync)
            self._syncs = must_sync
        tables.connection.execute("BEGIN IMMEDIATE")
        try:
            tables.trust()
            at = self.clock.times()
            done = [_done(tables, at, waiting) for waiting in group]
            tables.connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                tables.connection.execute("ROLLBACK")
            tables.distrust()
            raise
        return done

    def _must_sync(self, group: Sequence[_WaitingOperation]) -> bool:
        """True if the commit of these operations must wait for the disk: not if all are claims and renewals.

        A committed claim is visible to all processes, even after this process was killed. Only a power cut can lose it.
        But a power cut also ends every process that holds or asks for a claim, because all of them run on this machine,
        and leases of an earlier boot are void anyway. So the only loss is that the worker that held the claim is not
        counted in `Granted.deaths`. After an error (`trouble`) the commit always waits, so that no claim is granted
        while answers cannot be stored.
        """
        return self.trouble is not None or any(waiting.durable for waiting in group)

    def _usable(self) -> Tables:
        tables = self._tables
        if tables is not None and self._file != inode(self.path):
            self._shut()
            drop_log(self.path, self._log)
        if self._tables is None:
            if time.monotonic() < self._reopen_at_s and self.trouble is not None:
                raise StoreUnavailable(self.trouble)
            self._reopen_at_s = time.monotonic() + REOPEN_S
            connection = open_file(self.path, namespace=self.namespace, clock=self.clock)
            self._syncs = None
            self._file, self._log = inode(self.path), inode(log_of(self.path))
            self._tables = Tables(connection, self.spec)
        return self._tables

    def _shut(self) -> None:
        if self._tables is not None:
            with suppress(sqlite3.Error):
                self._tables.connection.close()
            self._tables = None


def _done(tables: Tables, at: Times, waiting: _WaitingOperation) -> _Done:
    if waiting.done.cancelled():
        return waiting.done, None, None
    try:
        return waiting.done, waiting.operation(tables, at), None
    except _INVALID_VALUES as error:
        return waiting.done, None, error


class StoreReader:
    """Reads what clients and workers poll, over its own connection and in its own thread. So readers
    do not delay claims, and commits that wait for the disk do not delay readers."""

    def __init__(self, path: Path, spec: StoreSpec) -> None:
        self._path = path
        self._spec = spec
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store reader")
        self._is_closed = False
        self._tables: Tables | None = None
        self._file: tuple[int, int] | None = None

    async def do(self, read: Callable[[Tables], T]) -> T:
        if self._is_closed:
            raise StoreUnavailable(f"{self._path} is not used any more: this store was closed")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read, read)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._executor.submit(self._shut)
            self._executor.shutdown(wait=False)

    # ---- in the thread ----

    def _read(self, read: Callable[[Tables], T]) -> T:
        try:
            tables = self._usable()
            tables.connection.execute("BEGIN")
            found = read(tables)
            tables.connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self._shut()
            raise StoreUnavailable(explain(error, self._path)) from error
        except BaseException:
            self._shut()
            raise
        return found

    def _usable(self) -> Tables:
        file = inode(self._path)
        if file != self._file:
            self._shut()
        if self._tables is None:
            self._tables, self._file = Tables(connect(self._path), self._spec), file
            self._tables.connection.execute("PRAGMA query_only=1")
        return self._tables

    def _shut(self) -> None:
        if self._tables is not None:
            with suppress(sqlite3.Error):
                self._tables.connection.close()
            self._tables = None


def _in_writer(
    operation: Callable[Concatenate[Tables, Times, P], T], *, durable: bool = True
) -> Callable[Concatenate["SqliteStore", P], Coroutine[Any, Any, T]]:
    """A method of the store that runs this operation in the thread that writes the file."""

    async def run(store: "SqliteStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store.transact(
            operation.__name__, lambda tables, at: operation(tables, at, *args, **kwargs), durable=durable
        )

    return run


def _in_reader(
    operation: Callable[Concatenate[Tables, Times, P], T],
) -> Callable[Concatenate["SqliteStore", P], Coroutine[Any, Any, T]]:
    """The same in the thread that reads it."""

    async def run(store: "SqliteStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store.read(lambda tables, at: operation(tables, at, *args, **kwargs))

    return run


class SqliteStore(Store):
    """The store in a file. It must not be on a network file system, because SQLite's locks and shared
    memory do not work there."""

    is_full = False

    def __init__(
        self,
        path: Path,
        *,
        namespace: str,
        spec: StoreSpec = base.DEFAULT,
        clock: Clock | None = None,
    ) -> None:
        self._path = path
        self._no_room: str | None = None
        self._clock = clock or Clock()
        self.spec = spec
        self._surplus: deque[Surplus] = deque()
        self._looking: set[sqlite3.Connection] = set()
        self._writer = Writer(path, namespace=namespace, spec=spec, clock=self._clock)
        self.times = self._writer.times
        self._reader = StoreReader(path, spec)

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
        for connection in list(self._looking):
            with suppress(sqlite3.Error):  # it is closed already
                connection.interrupt()  # its thread would delay the end of the process
        await self._writer.close()

    async def probe(self) -> None:
        left, used = await self.transact(
            "probe", lambda tables, at: (probe_disk(tables.connection, self._path, at.today), tables.used_bytes())
        )
        self._no_room, self.is_full = None, used > self.spec.max_bytes
        if left < ROOM_BYTES:
            self._no_room = f"{self._path} has no room left, its disk is full ({left} bytes): free some space"
            raise StoreUnavailable(self._no_room)

    async def change_all(
        self, name: str, wanted: Sequence[tuple[Identity, Decide[T]]], *, durable: bool = True, bodies: bool = True
    ) -> Sequence[Change[T]]:
        return await self.transact(
            name, lambda tables, at: [tables.change(at, *each) for each in wanted], durable=durable
        )

    async def change_rows(self, name: str, wanted: Sequence[tuple[Place, DecideRows[T]]]) -> Sequence[T]:
        return await self.transact(name, lambda tables, at: tables.change_rows(at, wanted))

    async def count_unseen(self, identity: Identity, keep_ms: int) -> Sequence[str]:
        return await self.transact("cancel", lambda tables, at: tables.oldest_unseen(at, identity.tenant))

    async def transact(self, name: str, operation: Operation[T], *, durable: bool = True) -> T:
        return await self._writer.do(name, operation, durable=durable)

    submission = _in_writer(Tables.submission, durable=False)
    note_webhook = _in_writer(Tables.note_webhook, durable=False)
    take = _in_writer(Tables.take)
    settle = _in_writer(Tables.settle)
    give_back = _in_writer(Tables.give_back)
    keep_file = _in_writer(Tables.keep_file)
    forget_file = _in_writer(Tables.forget_file)

    change_group = _in_writer(Tables.change_group)
    remove_members = _in_writer(Tables.remove_members)
    end_was_told = _in_writer(Tables.end_was_told)

    groups_of = _in_reader(Tables.groups_of)
    newest_groups = _in_reader(Tables.newest_groups)
    ended_groups = _in_reader(Tables.ended_groups)
    count_groups = _in_reader(Tables.count_groups)
    members = _in_reader(Tables.members)
    look = _in_reader(Tables.look)
    endings = _in_reader(Tables.endings)
    tenants_of = _in_reader(Tables.tenants_of)
    webhook = _in_reader(Tables.webhook)
    webhooks = _in_reader(Tables.webhooks)
    find_files = _in_reader(Tables.find_files)
    files = _in_reader(Tables.files)

    async def read_rows(self, name: str, place: Place) -> tuple[Rows, Times]:
        return await self.read(lambda tables, at: (tables.rows(at, place), at))

    async def read(self, operation: Operation[T]) -> T:
        if self._writer.trouble is not None:
            raise StoreUnavailable(self._writer.trouble)
        at = self._clock.times()
        return await self._reader.do(lambda tables: operation(tables, at))

    async def listed(self, wanted: base.RequestFilter, *, most: int, after: str | None = None) -> base.RequestPage:
        return await self._read_apart(lambda tables, at: tables.listed(at, wanted, most=most, after=after))

    async def sweep(self) -> int:
        removed = await self.transact("sweep", Tables.remove_expired)
        if not (removed or self._surplus):
            self._surplus.extend(await self._read_apart(Tables.surplus))
        while not removed and (step := next_step(self._surplus)):
            removed = await self.transact("sweep", partial(Tables.remove, rows=step))
        return removed

    async def _read_apart(self, operation: Operation[T]) -> T:
        """For what reads much of the file: it has a thread and a connection of its own, and delays no other call."""
        return await asyncio.to_thread(self._read_much, operation)

    def _read_much(self, operation: Operation[T]) -> T:
        try:
            with closing(connect(self._path)) as connection:
                self._looking.add(connection)
                connection.execute("BEGIN")
                try:
                    return operation(Tables(connection, self.spec), self._clock.times())
                finally:
                    self._looking.discard(connection)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(explain(error, self._path)) from error
