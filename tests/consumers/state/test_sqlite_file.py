"""A SQLite file that is locked, read-only, full, corrupt, newer or gone: the error says so, and the store recovers by
itself."""

import asyncio
import json
import os
import shutil
import sqlite3
import stat
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from consumers.state.base import Ended, Firing, Found, Granted, Identity, Pause, Running, StoreUnavailable
from consumers.state.sqlite import file as sqlite_file
from consumers.state.sqlite.store import SqliteStore
from tests.consumers.state.conftest import is_well_again, trouble_with
from tests.support.completions import ME, answered, fingerprint

PAUSE = Pause(kind="lane", name="batch", since_ms=1_790_000_000_000, until_ms=None, who="ann", why="too dear")
A = Identity("", "a")
LATE_MS = 4_000_000_000_000
"""Later than any clock."""
HOUSE = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "lane.sqlite"


@pytest.fixture
def busy_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_S", 0.2)


def a_store(path: Path) -> SqliteStore:
    return SqliteStore(path, namespace="lane")


async def test_a_file_that_is_locked_for_writing_is_followed_all_the_same(path: Path) -> None:
    async with a_store(path) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            (found,) = await store.look([(ME, 0)])
    assert found is not None
    assert not found.is_known


async def test_who_follows_sees_the_new_file_after_the_old_one_was_removed(path: Path) -> None:
    async with a_store(path) as store:
        await store.claim(ME, fingerprint())
        assert await store.look([(ME, 0)]) == [None]
        path.unlink()
        await store.claim(Identity("", "another"), fingerprint())
        (found,) = await store.look([(ME, 0)])
    assert found is not None
    assert not found.is_known


async def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state" / "lane.sqlite"
    umask = os.umask(0)
    try:
        async with a_store(path) as store:
            await store.claim(ME, fingerprint())
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    finally:
        os.umask(umask)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert modes == {"lane.sqlite": 0o600, "lane.sqlite-wal": 0o600, "lane.sqlite-shm": 0o600}


async def test_committed_writes_survive_a_power_cut(path: Path) -> None:
    async with a_store(path) as store:
        found = await store.transact(
            "look",
            lambda tables, _: [
                tables.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
            ],
        )

    assert found == ["wal", 2]


async def test_a_file_locked_by_another_process_raises_store_unavailable(path: Path, busy_for_less: None) -> None:
    async with a_store(path) as store:
        await store.claim(ME, fingerprint())
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            told = await trouble_with(store)
            assert "is locked by another process for more than 3 s: " in told
            assert "fuser" in told
        assert isinstance(await is_well_again(store), Granted)


@pytest.mark.slow
async def test_a_full_disk_raises_store_unavailable(path: Path) -> None:
    async with a_store(path) as store:
        await store.transact(
            "limit", lambda tables, _: tables.connection.execute("PRAGMA max_page_count = 20").fetchall()
        )
        with pytest.raises(StoreUnavailable, match=r"no room left.*free some space"):
            await store.complete(ME, fingerprint(), answered("x" * 200_000), token=None)
        assert isinstance(await is_well_again(store), Granted), "nothing of it was kept"


async def test_with_less_than_a_mib_of_disk_space_no_new_request_is_claimed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_store(path) as store:
        monkeypatch.setattr("consumers.state.sqlite.store.probe_disk", lambda *_: 1_048_575)
        with pytest.raises(StoreUnavailable, match="no room left"):
            await store.probe()
        await store.complete(ME, fingerprint(), answered(), token=None)
        assert "no room left" in (store.trouble or ""), "what is small enough is stored, and does not hide it"

        monkeypatch.setattr("consumers.state.sqlite.store.probe_disk", lambda *_: 1_048_576)
        await store.probe()
        assert store.trouble is None


async def test_a_probe_finds_a_file_that_cannot_be_written(path: Path) -> None:
    async with a_store(path) as store:
        await store.transact("limit", lambda tables, _: tables.connection.execute("PRAGMA query_only=1").fetchall())
        with pytest.raises(StoreUnavailable, match="is read-only: let this user write it"):
            await store.probe()


async def test_a_folder_that_cannot_be_made_raises_store_unavailable(path: Path) -> None:
    path.parent.write_text("a file")
    async with a_store(path) as store:
        assert "cannot be opened (File exists): let this user write it and its folder" in await trouble_with(store)


@pytest.mark.parametrize(
    ("code", "times", "told"),
    [
        (sqlite3.SQLITE_BUSY, 3, None),
        (sqlite3.SQLITE_BUSY_RECOVERY, 3, None),
        (sqlite3.SQLITE_BUSY, 10**9, "is locked by another process"),
        (sqlite3.SQLITE_IOERR, 1, "see whether its disk is full or broken"),
    ],
)
async def test_if_another_process_opens_the_same_new_file_it_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, busy_for_less: None, code: int, times: int, told: str | None
) -> None:
    class Busy(sqlite3.Connection):
        left = times

        @override
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "PRAGMA journal_mode=WAL" and self.left:
                self.left -= 1
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = code
                raise error
            return super().execute(sql, *values)

    monkeypatch.setattr(sqlite_file, "connect", lambda path: sqlite3.connect(path, isolation_level=None, factory=Busy))
    async with a_store(path) as store:
        assert (store.trouble is None) if told is None else told in (store.trouble or "")


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"garbage" * 1000, b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_a_corrupt_file_raises_store_unavailable(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    async with a_store(path) as store:
        told = await trouble_with(store)
        assert "is corrupt: stop every worker on it, move it away" in told
        assert path.read_bytes() == content
        path.rename(path.with_suffix(".away"))
        assert isinstance(await is_well_again(store), Granted)


SCHEMA_8 = f"""
DROP TABLE hold; DROP TABLE file; DROP TABLE request_group; DROP INDEX request_by_group; DROP TABLE kept;
ALTER TABLE request DROP COLUMN group_id;
{"".join(f"ALTER TABLE request DROP COLUMN {name};" for name in ("seen_ms", "lane", "app", "model", "cause"))}
CREATE TABLE lease (name TEXT PRIMARY KEY, owner TEXT, token INTEGER, lease_ms INTEGER);
CREATE TABLE share (kind TEXT); CREATE TABLE share_sum (kind TEXT);
CREATE TABLE pause (id TEXT PRIMARY KEY, until_ms INTEGER, body TEXT NOT NULL);
CREATE TABLE kept (kind TEXT, tenant TEXT, key TEXT, at_ms INTEGER, id TEXT, until_ms INTEGER, body BLOB);
CREATE INDEX kept_by_end ON kept (until_ms);
CREATE TABLE batched (tenant TEXT, id TEXT, ticket TEXT, submitted INTEGER, until_ms INTEGER);
CREATE TABLE enqueued (ticket TEXT, account TEXT, requests INTEGER, tokens INTEGER, until_ms INTEGER);
INSERT INTO pause VALUES ('{PAUSE.id}', NULL, '{json.dumps(PAUSE.as_json())}');
INSERT INTO kept VALUES ('debounce', '', 'key', 7, 'b', {LATE_MS}, NULL);
INSERT INTO kept VALUES ('schedule', '', 'nightly', 5, 'schedule-x', {LATE_MS}, NULL);
INSERT INTO kept VALUES ('webhook', '', 'a', 0, 'a', {LATE_MS}, x'7b7d');
INSERT INTO batched VALUES ('', 'a', 'ticket', 1, {LATE_MS});
INSERT INTO enqueued VALUES ('ticket', 'account', 1, 1, {LATE_MS});
PRAGMA user_version = 8
"""


async def test_a_file_of_the_version_before_is_upgraded(path: Path) -> None:
    async with a_store(path) as store:
        await store.complete(ME, fingerprint(), answered(), token=None)
    with closing(sqlite3.connect(path)) as other:
        other.executescript(SCHEMA_8)
    async with a_store(path) as store:
        assert await store.find(ME) == Found(completion=answered(), running=False)
        assert await store.hold("sweep", "a", for_s=1)
        assert await store.pauses() == [PAUSE]
        assert await store.firings() == {"nightly": Firing(5, "schedule-x")}
        assert await store.webhooks(most=2) == [(A, b"{}")]
        assert not await store.debounce(A, "key", published_ms=6, until_ms=LATE_MS)
        assert await store.gather("another", [A], until_ms=LATE_MS) == set()
        room = {"requests": 1, "tokens": 1, "most_requests": 1, "until_ms": LATE_MS}
        assert not await store.enqueue("another", "account", most_tokens=None, **room)


async def test_a_file_of_a_version_before_that_is_refused(path: Path) -> None:
    async with a_store(path):
        pass
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 7")
    async with a_store(path) as store:
        assert "let 0.4.0 open it once" in await trouble_with(store)


@pytest.mark.parametrize("is_ours", [True, False])
def test_of_a_replaced_file_its_own_log_is_dropped_and_no_other(tmp_path: Path, is_ours: bool) -> None:
    path, log, shared = (tmp_path / f"lane.sqlite{end}" for end in ("", "-wal", "-shm"))
    log.write_bytes(b"log")
    shared.write_bytes(b"shared")
    opened = len(os.listdir("/proc/self/fd"))
    sqlite_file.drop_log(path, sqlite_file.inode(log) if is_ours else (0, 0))
    assert [log.exists(), shared.exists()] == [not is_ours] * 2
    sqlite_file.drop_log(path, None)
    assert [log.exists(), shared.exists()] == [not is_ours] * 2
    assert len(os.listdir("/proc/self/fd")) == opened


async def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    async with a_store(path):
        pass
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    async with a_store(path) as store:
        told = await trouble_with(store)
    assert "newer version of Lanekeeper (schema 99" in told
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    async with a_store(path) as store:
        assert "is a database of something else" in await trouble_with(store)
    assert path.read_bytes() == before


async def test_a_file_of_another_namespace_is_refused(path: Path) -> None:
    async with a_store(path):
        pass
    async with SqliteStore(path, namespace="staging") as store:
        assert "belongs to the namespace lane, this is staging" in await trouble_with(store)


async def test_a_file_that_is_removed_while_open_is_noticed(path: Path) -> None:
    async with a_store(path) as store:
        await store.claim(ME, fingerprint())
        path.unlink()

        assert isinstance(await is_well_again(store), Granted)
    async with a_store(path) as again:
        assert isinstance(await again.claim(ME, fingerprint()), Running)


async def test_a_file_that_is_replaced_by_a_backup_while_open_is_noticed(path: Path) -> None:
    async with a_store(path) as store:
        await store.complete(ME, fingerprint(), answered(), token=None)
    backup = path.with_suffix(".backup")
    shutil.copy(path, backup)
    async with a_store(path) as store:
        await asyncio.gather(*(store.note(Identity("", str(each)), answered("x" * 1000)) for each in range(300)))
        backup.replace(path)

        assert isinstance(await is_well_again(store), Ended)
        assert await store.find(Identity("", "5")) is None
    with closing(sqlite3.connect(path)) as looked:
        assert looked.execute("PRAGMA integrity_check").fetchone() == ("ok",)


MANY = """
import asyncio, sys
from pathlib import Path
from consumers.state.base import Granted, Identity
from consumers.state.sqlite.store import SqliteStore
from tests.support.completions import fingerprint as of

async def main():
    async with SqliteStore(Path(sys.argv[1]), namespace="lane") as store:
        assert store.trouble is None, store.trouble
        sys.stdin.readline()
        found = await asyncio.gather(*(store.claim(Identity("", str(n)), of(mark=sys.argv[2])) for n in range(200)))
        print(sum(isinstance(each, Granted) for each in found))

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_that_start_at_the_same_time_share_a_new_file(path: Path) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", MANY, path, name, stdin=-1, stdout=-1, stderr=-1, cwd=HOUSE
        )
        for name in ("a", "b", "c")
    ]
    ended = await asyncio.gather(*(each.communicate(b"go\n") for each in processes))

    assert sum(int(out) for out, _ in ended) == 200, [err.decode() for _, err in ended]
