"""Which commits wait for the disk: all but those of claims and renewals, which have to be seen and not to last."""

import asyncio
import os
import signal
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from consumers.state.base import Granted, Held, Identity, Running, StoreUnavailable
from consumers.state.sqlite import writer
from consumers.state.sqlite.file import sync_commits
from consumers.state.sqlite.store import SqliteStore
from tests.support.completions import CANCELLED, ME, answered, fingerprint
from tests.support.waiting import until

HOUSE = Path(__file__).parents[3]
OTHER = Identity("", "other")
CLAIM = """
import asyncio, pathlib, sys
from consumers.state.sqlite.store import SqliteStore
from tests.support.completions import ME, fingerprint

async def main():
    async with SqliteStore(pathlib.Path(sys.argv[1]), namespace="lane") as store:
        await store.claim(ME, fingerprint())
        print("granted", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each change of whether commits wait for the disk. They do in a file that was just opened."""
    found: list[bool] = []

    def sync(connection: object, wanted: bool) -> None:
        found.append(wanted)
        sync_commits(connection, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "sync_commits", sync)
    return found


async def test_claims_and_renewals_alone_do_not_wait_for_the_disk(tmp_path: Path, changes: list[bool]) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        granted = await store.claim(ME, fingerprint())
        await store.claim(OTHER, fingerprint())
        assert isinstance(granted, Granted)
        await store.renew([Held(ME, granted.token)])
        assert changes == [False]
        await store.complete(ME, fingerprint(), answered(), token=granted.token)
        assert changes == [False, True], "an answer does"
        await store.claim(Identity("", "third"), fingerprint())
        await store.cancel(OTHER, CANCELLED)
        assert changes == [False, True, False, True], "a cancellation does"
        await asyncio.gather(store.claim(Identity("", "fourth"), fingerprint()), store.find(ME))
        assert changes == [False, True, False, True], "claims with something else do"


@pytest.mark.slow
async def test_while_the_store_is_in_trouble_a_claim_waits_for_the_disk(tmp_path: Path, changes: list[bool]) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        await store._writer.do(lambda tables, _: tables.connection.execute("PRAGMA max_page_count = 20").fetchall())
        with pytest.raises(StoreUnavailable):
            await store.complete(OTHER, fingerprint(), answered("x" * 200_000), token=None)

        async def claimed() -> bool:
            with suppress(StoreUnavailable):
                return isinstance(await store.claim(ME, fingerprint(nonce=b"12345678")), Granted)
            return False

        await until(claimed)
        assert changes == []
        assert store.trouble is None
        await claimed()
        assert changes == [False]


def test_the_setting_changes_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "file", isolation_level=None)) as connection:
        found = []
        for wanted in (False, True, False, True):
            sync_commits(connection, wanted)
            found += connection.execute("PRAGMA synchronous").fetchone()
    assert found == [1, 2, 1, 2]


async def test_a_claim_outlives_the_process_that_was_granted_it(tmp_path: Path) -> None:
    path = tmp_path / "lane.sqlite"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLAIM, str(path), cwd=HOUSE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"granted\n"
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()

    async with SqliteStore(path, namespace="lane") as store:
        assert isinstance(await store.claim(ME, fingerprint(mark="another")), Running)
        again = await store.claim(ME, fingerprint(redelivered=True))
    assert isinstance(again, Granted)
    assert again.deaths == 1
