"""The SQLite file: opens, creates or migrates it, and explains its errors.

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
from consumers.state.decisions import Times

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
VERSION = 9
APPLICATION = 0x4C616E65
BUSY_S = 3.0
"""How long an operation waits for a transaction of another process."""
LEASE_AT_MOST_MS = 3_600_000
"""If the system provides no boot id, a lease that ends later than this is from before the last start of the machine."""
ROOM_BYTES = 1024 * 1024
"""If fewer bytes than this are free on the disk, the store counts as full, although `probe` can still write its small
value: answers need more, and they are paid for when they are stored."""
WAL_BYTES = 64 * 1024 * 1024

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
    group_id TEXT,                -- NULL: it belongs to no group
    seen_ms INTEGER NOT NULL DEFAULT 0,  -- since 1970: when the store heard of it first; 0: it is in no list
    lane TEXT NOT NULL DEFAULT '',
    app TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    cause TEXT NOT NULL DEFAULT '',
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
CREATE TABLE store (
    only INTEGER PRIMARY KEY CHECK (only = 1), namespace TEXT NOT NULL, boot TEXT NOT NULL, probed_ms INTEGER
) STRICT;
"""
_UNSEEN = """
CREATE INDEX unseen ON request (tenant, keep_ms)
    WHERE body_hash IS NULL AND noted = 0 AND due_ms IS NULL AND code = 'cancelled';
"""
_FOLLOWED = """
CREATE TABLE followed (
    key INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body_hash BLOB NOT NULL,
    lane TEXT NOT NULL,
    streams INTEGER NOT NULL, -- not used
    submitted_ms INTEGER NOT NULL,
    due_ms INTEGER,
    deadline_ms INTEGER NOT NULL,
    last INTEGER NOT NULL,   -- number of the last entry
    events INTEGER NOT NULL, -- number of events since the last restart
    bytes INTEGER NOT NULL,  -- their size
    UNIQUE (tenant, id)
) STRICT;
CREATE TABLE entry (
    followed INTEGER NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (followed, number)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER followed_removed AFTER DELETE ON followed BEGIN DELETE FROM entry WHERE followed = old.key; END;
CREATE TRIGGER request_removed AFTER DELETE ON request
    BEGIN DELETE FROM followed WHERE tenant = old.tenant AND id = old.id; END;
"""
_KEPT = """
CREATE TABLE kept (
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    until_ms INTEGER NOT NULL,  -- since 1970: when it may be removed
    body BLOB,
    PRIMARY KEY (kind, tenant, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX kept_by_end ON kept (until_ms);
"""
_HOLDS = """
CREATE TABLE hold (
    name TEXT NOT NULL,
    period_s INTEGER NOT NULL,
    period INTEGER NOT NULL,    -- of the allowance, where its amount is counted as used
    id TEXT NOT NULL,
    nonce TEXT NOT NULL,
    amount REAL NOT NULL,
    until_ms INTEGER NOT NULL,  -- since 1970
    PRIMARY KEY (name, period_s, period, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX hold_by_end ON hold (until_ms);
"""
_FILES = """
CREATE TABLE file (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    provider TEXT NOT NULL,
    created_ms INTEGER NOT NULL,  -- since 1970
    size INTEGER NOT NULL,
    until_ms INTEGER              -- since 1970; NULL: it is kept until it is deleted
) STRICT, WITHOUT ROWID;
CREATE INDEX file_by_tenant ON file (tenant, created_ms);
CREATE INDEX file_by_end ON file (until_ms) WHERE until_ms IS NOT NULL;
"""
_GROUPS = """
CREATE TABLE request_group (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    head TEXT NOT NULL,         -- JSON
    processing INTEGER NOT NULL DEFAULT 0,  -- how many requests it has of each kind
    succeeded INTEGER NOT NULL DEFAULT 0,
    errored INTEGER NOT NULL DEFAULT 0,
    canceled INTEGER NOT NULL DEFAULT 0,
    expired INTEGER NOT NULL DEFAULT 0,
    ended_ms INTEGER NOT NULL DEFAULT 0,    -- since 1970: when the last of those that have ended did so
    size INTEGER NOT NULL DEFAULT 0,        -- the most requests that one of them says it has
    key TEXT NOT NULL DEFAULT '',           -- the routing key of the first request that was seen
    webhook TEXT NOT NULL DEFAULT '',
    saved_usd REAL NOT NULL DEFAULT 0,
    told INTEGER NOT NULL DEFAULT 0,        -- 1: its end was published
    until_ms INTEGER NOT NULL,  -- since 1970
    created_ms INTEGER GENERATED ALWAYS AS (json_extract(head, '$.created_ms')) VIRTUAL,
    PRIMARY KEY (tenant, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX group_by_creation ON request_group (created_ms, tenant, id);
CREATE INDEX group_by_end ON request_group (until_ms);
CREATE INDEX group_by_told ON request_group (tenant) WHERE told = 0 AND processing = 0;
CREATE INDEX request_by_group ON request (tenant, group_id) WHERE group_id IS NOT NULL;
"""
SCHEMA = _REQUESTS + _UNSEEN + _FOLLOWED + _KEPT + _HOLDS + _FILES + _GROUPS
FROM_VERSION_8 = (
    f"""
ALTER TABLE request ADD COLUMN group_id TEXT;
ALTER TABLE request ADD COLUMN seen_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE request ADD COLUMN lane TEXT NOT NULL DEFAULT '';
ALTER TABLE request ADD COLUMN app TEXT NOT NULL DEFAULT '';
ALTER TABLE request ADD COLUMN model TEXT NOT NULL DEFAULT '';
ALTER TABLE request ADD COLUMN cause TEXT NOT NULL DEFAULT '';
ALTER TABLE kept RENAME TO former;
DROP INDEX kept_by_end;
{_KEPT}INSERT INTO kept SELECT kind, tenant, key, until_ms, body FROM former WHERE kind = 'webhook';
INSERT INTO kept SELECT 'debounce', tenant, key, until_ms, CAST(at_ms || ' ' || id AS BLOB) FROM former
    WHERE kind = 'debounce';
INSERT INTO kept SELECT 'schedules', '', key, until_ms, CAST(at_ms || ' ' || id AS BLOB) FROM former
    WHERE kind = 'schedule';
INSERT INTO kept SELECT 'pauses', '', id, {2**53}, CAST(coalesce(until_ms, 0) || ' ' || body AS BLOB) FROM pause;
INSERT INTO kept SELECT 'batched', tenant, id, until_ms, CAST(submitted || ticket AS BLOB) FROM batched;
INSERT INTO kept SELECT 'enqueued:' || account, '', ticket, until_ms,
    CAST(requests || ' ' || tokens || ' ' || until_ms AS BLOB) FROM enqueued;
DROP TABLE former;
DROP TABLE pause;
DROP TABLE batched;
DROP TABLE enqueued;
DROP TABLE lease;
DROP TABLE share;
DROP TABLE share_sum;
"""
    + _HOLDS
    + _FILES
    + _GROUPS
)
"""The schema of 0.4.0."""


class Clock:
    """Two clocks that all processes of this machine read: the time since boot, which never jumps, for leases; and the
    calendar time, for retention."""

    def since_boot_ms(self) -> int:
        clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; it goes on while the machine sleeps
        return (time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)) // 1_000_000

    def since_1970_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def times(self) -> Times:
        return Times(now=self.since_boot_ms(), today=self.since_1970_ms())

    def boot(self) -> str:
        """The id of the boot that `since_boot_ms` counts from; empty if the system does not provide it."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""


def open_file(path: Path, *, namespace: str, clock: Clock) -> sqlite3.Connection:
    """Open the file; create or migrate it if needed. Leases from before the last start of the machine end."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # an existing file is not opened: closing it would drop this process's locks on it
        # created here, because SQLite would make it readable by everyone
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = connect(path)
    try:
        _check(connection, path)
        _write_ahead(connection)
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
    """Open a connection to a file that exists."""
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None, cached_statements=128
    )


def _check(connection: sqlite3.Connection, path: Path) -> int:
    version = _pragma(connection, "user_version")
    if version > VERSION:
        raise StoreUnavailable(
            f"{path} was made by a newer version of Lanekeeper (schema {version}, this one knows {VERSION}): "
            "run that version, or set LANEKEEPER_STORE_URL to another file"
        )
    if 0 < version < 8:
        raise StoreUnavailable(
            f"{path} was made by a version of Lanekeeper before 0.4.0 (schema {version}): let 0.4.0 open it once, or "
            "set LANEKEEPER_STORE_URL to another file"
        )
    if (
        _pragma(connection, "application_id") != APPLICATION
        and connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    ):
        raise StoreUnavailable(f"{path} is a database of something else: set LANEKEEPER_STORE_URL to another file")
    return version


def _write_ahead(connection: sqlite3.Connection) -> None:
    # Tried again, because if two processes start at once, one gets "database is locked" in spite of the timeout.
    end_s = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() > end_s:
                raise
            time.sleep(0.02)  # nothing signals that the other process has finished


def sync_commits(connection: sqlite3.Connection, sync: bool) -> None:
    """Set whether the next commits wait for the disk."""
    # not `execute`, which prepares the same statement only once: the pragma takes effect when it is prepared
    connection.executescript(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")


def _bring_up_to_date(connection: sqlite3.Connection, path: Path, *, namespace: str) -> None:
    found = _check(connection, path)  # again: another process may have migrated it meanwhile
    if found == 0:
        _run(connection, SCHEMA)
        connection.execute("INSERT INTO store VALUES (1, ?, '', NULL)", (namespace,))
        connection.execute(f"PRAGMA application_id={APPLICATION}")
    elif found != VERSION:
        _run(connection, FROM_VERSION_8)
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
    connection.execute(
        "DELETE FROM kept WHERE kind GLOB 'lease:*' AND key = 'lease' AND CAST(CAST(body AS TEXT) AS INTEGER) > ?",
        (above,),
    )
    connection.execute("UPDATE store SET boot = ?", (boot,))


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in script.split(";\n"):
        if statement.strip():  # `executescript` would commit the transaction first
            connection.execute(statement)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def inode(path: Path) -> tuple[int, int] | None:
    """The device and inode number of a file; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def log_of(path: Path) -> Path:
    """The path of a file's write-ahead log."""
    return path.with_name(path.name + "-wal")


def drop_log(path: Path, log: tuple[int, int] | None) -> None:
    """Remove the log of a file that was removed or replaced while it was open; SQLite would apply it to the new file.

    `log`: the inode of the old file's log. One with another inode belongs to the new file, because another process has
    already removed the old log.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if inode(log_of(path)) == log:
                log_of(path).unlink()
                path.with_name(path.name + "-shm").unlink()
        finally:
            os.close(folder)


def probe_disk(connection: sqlite3.Connection, path: Path, today: int) -> int:
    """Write a value into the file, to see whether it can be written. Returns the free bytes on its disk."""
    connection.execute("UPDATE store SET probed_ms = ?", (today,))
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def is_locked(error: Exception) -> bool:
    """Whether the error says that another connection has locked the file."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: Exception) -> int | None:
    # an extended code is the code and, above it, another byte
    return error.sqlite_errorcode % 256 if hasattr(error, "sqlite_errorcode") else None


def explain(error: Exception, path: Path) -> str:
    """What is wrong with the file, and what to do about it, as the text of a `StoreUnavailable`."""
    if isinstance(error, StoreUnavailable):
        return str(error)
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return f"{path} cannot be opened ({why}): let this user write it and its folder, or set LANEKEEPER_STORE_URL"
    problem = _PROBLEMS.get(_code(error), "cannot be used")
    return f"{path} {problem} ({getattr(error, 'sqlite_errorname', type(error).__name__)}: {error})"


_LOCKED = f"is locked by another process for more than {BUSY_S:g} s: end what holds it (`fuser` names it)"
_CORRUPT = (
    "is corrupt: stop every worker on it, move it away together with its -wal and -shm, and start again; "
    "what it remembered is lost, requests are not"
)
_PROBLEMS: dict[int | None, str] = {
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
