"""The SQLite file: opens, creates or migrates it, and explains its errors.

    open_file(path, namespace=…, clock=…) -> sqlite3.Connection     raises sqlite3.Error, OSError, StoreUnavailable
    explain(error, path) -> str                                     what is wrong, and what to do

The file has a write-ahead log, so that processes can read while another one writes, and `synchronous=FULL`, so that a
commit survives a power cut. After `sync_commits(connection, False)` a commit does not wait for the disk: it survives
the end of the process, but a power cut may lose it until a later commit has waited.
"""

import fcntl
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from consumers.state.base import StoreUnavailable
from consumers.state.sqlite import following as sqlite_following
from consumers.state.sqlite import shares as sqlite_shares
from consumers.state.sqlite.clock import Clock

VERSION = 4
"""The version of the SQLite schema, which is stored in the file as `user_version`."""
APPLICATION = 0x4C616E65
"""The file's `application_id`, which marks it as a file of Lanekeeper: the letters "Lane" in ASCII."""
BUSY_S = 3.0
"""The longest time, in seconds, that an operation waits for a transaction of another process. Transactions take
milliseconds, so if one takes longer than this, its process hangs."""
LEASE_AT_MOST_MS = 3_600_000
"""If the system provides no boot id, a lease that ends after more than this many ms must have been granted before the
machine was last started, because no lease is so long."""
ROOM_BYTES = 1024 * 1024
"""If fewer bytes than this are free on the disk, the store counts as full, although `probe` can still write its small
value: answers need more space than that value, and the call to the provider is already paid for when its answer is
stored."""
WAL_BYTES = 64 * 1024 * 1024
"""The size, in bytes, to which the write-ahead log is cut after a checkpoint."""

_REQUESTS = """
CREATE TABLE request (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body_hash BLOB,               -- NULL: no message of the request has arrived yet
    mark BLOB,                    -- of the message that claimed or ended it last
    token INTEGER NOT NULL,       -- of its last claim
    lease_ms INTEGER NOT NULL,    -- since boot: until when the claim is valid; 0: it is not claimed
    claimed_ms INTEGER NOT NULL,  -- since boot
    attempts INTEGER NOT NULL,
    keep_ms INTEGER NOT NULL,     -- since 1970: when the row may be removed
    noted INTEGER NOT NULL,       -- 1: it ended or was deferred without a claim; any message may still claim it
    cancelling INTEGER NOT NULL,  -- 1: cancelled while claimed; `status` and so on apply unless its holder completes it
    nonce BLOB,                   -- of the delivery that claimed it last
    deaths INTEGER NOT NULL,      -- claims that were not released
    due_ms INTEGER,               -- since 1970: when its next attempt may begin; NULL: not known, or it does not wait
    status TEXT,                  -- NULL: it has not ended, and was not cancelled
    code TEXT,
    headers TEXT,
    ended_ms INTEGER,
    body BLOB,                    -- last, because a row is read from its beginning
    UNIQUE (tenant, id)
) STRICT;
CREATE INDEX request_by_keep ON request (keep_ms);
CREATE TABLE allowance (
    name TEXT NOT NULL,
    period_s INTEGER NOT NULL,
    period INTEGER NOT NULL,  -- the number of the period, from 0 in 1970
    ends_ms INTEGER NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (name, period_s, period)
) STRICT, WITHOUT ROWID;
CREATE TABLE lease (
    name TEXT PRIMARY KEY, owner TEXT NOT NULL, token INTEGER NOT NULL,  -- not used
    lease_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE store (
    only INTEGER PRIMARY KEY CHECK (only = 1), namespace TEXT NOT NULL, boot TEXT NOT NULL, probed_ms INTEGER
) STRICT;
"""
SCHEMA = _REQUESTS + sqlite_shares.SCHEMA + sqlite_following.SCHEMA
MIGRATIONS: dict[int, str] = {
    1: "ALTER TABLE request ADD COLUMN due_ms INTEGER",
    2: sqlite_shares.SCHEMA,
    3: sqlite_following.SCHEMA,
}
"""For each version of the schema: the statements that change it into the next version."""


def open_file(path: Path, *, namespace: str, clock: Clock) -> sqlite3.Connection:
    """Open the SQLite file of the store; create it if it is missing. When this returns, the file has the schema of this
    version, and all leases in it that are known to be from before the last start of the machine have ended."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # an existing file is not opened: closing it would drop this process's locks on it
        # created here, because SQLite would make it readable by everyone
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = connect(path)
    try:
        _check(connection, path)
        _write_ahead(connection)
        sync_commits(connection, True)
        connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        _bring_up_to_date(connection, path, namespace=namespace)
        _end_leases_of_earlier_boots(connection, clock)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection to an SQLite file that exists. Raises sqlite3.Error."""
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None, cached_statements=64
    )


def _check(connection: sqlite3.Connection, path: Path) -> int:
    """Returns the version of the schema that the SQLite file has. Raises StoreUnavailable if it is newer than this
    program's, or if the file is not Lanekeeper's. Writes nothing."""
    version = _pragma(connection, "user_version")
    if version > VERSION:
        raise StoreUnavailable(
            f"{path} was made by a newer version of Lanekeeper (schema {version}, this one knows {VERSION}): "
            "run that version, or set LANEKEEPER_STORE_URL to another file"
        )
    if (
        _pragma(connection, "application_id") != APPLICATION
        and connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    ):
        raise StoreUnavailable(f"{path} is a database of something else: set LANEKEEPER_STORE_URL to another file")
    return version


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch the write-ahead log on. This is tried again for up to `BUSY_S`, because if two processes start at once,
    one of them gets "database is locked" in spite of the connection's timeout."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.02)  # nothing signals that the other process has finished


def sync_commits(connection: sqlite3.Connection, sync: bool) -> None:
    """Set whether the next commits wait for the disk. `execute` cannot be used, because the pragma takes effect when it
    is prepared, and `execute` prepares the same statement only once."""
    connection.executescript(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")


def _bring_up_to_date(connection: sqlite3.Connection, path: Path, *, namespace: str) -> None:
    found = _check(connection, path)  # again: another process may have migrated it meanwhile
    if found == 0:
        _run(connection, SCHEMA)
        connection.execute("INSERT INTO store VALUES (1, ?, '', NULL)", (namespace,))
        connection.execute(f"PRAGMA application_id={APPLICATION}")
    else:
        for version in range(found, VERSION):
            _run(connection, MIGRATIONS[version])
    if found != VERSION:
        connection.execute(f"PRAGMA user_version={VERSION}")
    (owner,) = connection.execute("SELECT namespace FROM store").fetchone()
    if owner != namespace:
        raise StoreUnavailable(
            f"{path} belongs to the namespace {owner}, this is {namespace}: set LANEKEEPER_STORE_URL to another file"
        )


def _end_leases_of_earlier_boots(connection: sqlite3.Connection, clock: Clock) -> None:
    boot = clock.boot()
    (before,) = connection.execute("SELECT boot FROM store").fetchone()
    if before == boot != "":
        return
    # If the boot id is unknown, end only leases that end later than any new lease could.
    above = 0 if boot else clock.since_boot_ms() + LEASE_AT_MOST_MS
    connection.execute("UPDATE request SET lease_ms = 0 WHERE lease_ms > ?", (above,))
    connection.execute("UPDATE lease SET lease_ms = 0 WHERE lease_ms > ?", (above,))
    connection.execute("UPDATE store SET boot = ?", (boot,))


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Run several statements in the open transaction. (`executescript` would commit the transaction first.)"""
    for statement in script.split(";\n"):
        if statement.strip():
            connection.execute(statement)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def inode(path: Path) -> tuple[int, int] | None:
    """The device and inode number of the file at `path`; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def log_of(path: Path) -> Path:
    """The path at which SQLite keeps the write-ahead log of a file."""
    return path.with_name(path.name + "-wal")


def drop_log(path: Path, log: tuple[int, int] | None) -> None:
    """Remove the write-ahead log of a file that was removed or replaced while it was open. Otherwise SQLite would apply
    the log to the new file.

    `log`: the inode of the old file's log. A log with another inode is not removed: it belongs to the new file, because
    another process has already removed the old log.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if log is not None and inode(log_of(path)) == log:
                log_of(path).unlink()
                path.with_name(path.name + "-shm").unlink(missing_ok=True)
        finally:
            os.close(folder)


def probe(connection: sqlite3.Connection, path: Path, today: int) -> int:
    """Write a value into the SQLite file, to see whether it can be written. Returns the number of free bytes on its
    disk."""
    connection.execute("UPDATE store SET probed_ms = ?", (today,))
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def explain(error: Exception, path: Path) -> str:
    """Returns what is wrong with the SQLite file, and what to do about it, as the text of a `StoreUnavailable`."""
    if isinstance(error, StoreUnavailable):
        return str(error)
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return f"{path} cannot be opened ({why}): let this user write it and its folder, or set LANEKEEPER_STORE_URL"
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    problem = _PROBLEMS.get(code, "cannot be used")
    return f"{path} {problem} ({getattr(error, 'sqlite_errorname', type(error).__name__)}: {error})"


_LOCKED = f"is locked by another process for more than {BUSY_S:g} s: end what holds it (`fuser` names it)"
_CORRUPT = (
    "is corrupt: stop every worker on it, move it away together with its -wal and -shm, and start again; "
    "what it remembered is lost, requests are not"
)
_PROBLEMS = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_READONLY: "is read-only: let this user write it and its folder",
    sqlite3.SQLITE_PERM: "may not be written by this user: change its owner or mode",
    sqlite3.SQLITE_FULL: "has no room left, its disk is full: free some space",
    sqlite3.SQLITE_IOERR: "cannot be read or written: see whether its disk is full or broken",
    sqlite3.SQLITE_CORRUPT: _CORRUPT,
    sqlite3.SQLITE_NOTADB: _CORRUPT,
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: see that its folder is there and this user may write to it",
}
