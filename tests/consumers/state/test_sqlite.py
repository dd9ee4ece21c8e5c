"""Operations that one transaction shares, processes that are killed, clocks that jump, and a machine that restarts."""

import asyncio
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from typing_extensions import override

from consumers.state.base import (
    Cancelling,
    Completion,
    Ended,
    Found,
    Granted,
    Held,
    Identity,
    NewEntry,
    Running,
    StoreSpec,
    StoreUnavailable,
    Submission,
    WaitingLimit,
    period_of,
)
from consumers.state.decisions import Times
from consumers.state.sqlite.file import Clock
from consumers.state.sqlite.store import SqliteStore, Writer
from consumers.state.sqlite.tables import Tables
from tests.support.completions import CANCELLED, ME, answered, fingerprint
from tests.support.waiting import until


class StandingClock(Clock):
    """Stands still between two groups."""

    ms = 1_000_000

    @override
    def since_boot_ms(self) -> int:
        return self.ms

    @override
    def since_1970_ms(self) -> int:
        return self.ms


async def test_one_that_cannot_be_kept_fails_alone(tmp_path: Path) -> None:
    ids = [Identity("", str(each)) for each in range(40)]
    ids[7] = Identity("", "\ud800")
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        claims = await asyncio.gather(*(store.claim(each, fingerprint()) for each in ids), return_exceptions=True)
        ends = [answered("x") if each != 9 else answered("x", ended_ms=2**70) for each in range(40)]
        asked = [
            store.complete(me, fingerprint(), end, token=claim.token)
            for me, claim, end in zip(ids, claims, ends, strict=True)
            if isinstance(claim, Granted)
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        kept = [await store.find(each) for each in ids if each is not ids[7]]

    assert [each for each in range(40) if not isinstance(claims[each], Granted)] == [7]
    assert isinstance(claims[7], UnicodeEncodeError)
    assert [each for each in range(39) if not isinstance(found[each], Completion)] == [8]
    assert isinstance(found[8], OverflowError)
    assert [each for each in range(39) if (one := kept[each]) is None or one.completion is None] == [8]


async def test_more_waiting_writes_than_allowed_are_refused_until_some_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.state.sqlite.store.WAITING_AT_MOST", 3)
    writer = Writer(tmp_path / "lane.sqlite", namespace="lane", spec=StoreSpec(), clock=Clock())
    writer.start()
    for _ in range(2):
        asked = [writer.do("now", lambda _, at: at, durable=True) for _ in range(4)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(each, StoreUnavailable) for each in found] == [False, False, False, True]
        assert "is too slow: 3 operations wait for it" in str(found[3])
    await writer.close()


HOUSE = Path(__file__).parents[3]
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


@pytest.mark.slow
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


class Calendar(Clock):
    """A clock that can be set, on a machine that can be rebooted."""

    def __init__(self) -> None:
        self.ahead_ms = 0
        self.booted = "1"
        self.uptime_ms = 5_000

    @override
    def since_1970_ms(self) -> int:
        return 1_790_000_000_000 + self.ahead_ms

    @override
    def since_boot_ms(self) -> int:
        return self.uptime_ms

    @override
    def boot(self) -> str:
        return self.booted


def a_store(folder: Path, clock: Clock) -> SqliteStore:
    return SqliteStore(folder / "lane.sqlite", namespace="lane", clock=clock)


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_change_of_the_calendar_does_not_affect_running_claims(tmp_path: Path, hours: int) -> None:
    clock = Calendar()
    async with a_store(tmp_path, clock) as store:
        found = await store.claim(ME, fingerprint())
        assert isinstance(found, Granted)
        await store.complete(Identity("", "ended"), fingerprint(), answered(), token=None)
        clock.ahead_ms = hours * 3_600_000
        clock.uptime_ms += 5

        assert await store.claim(ME, fingerprint(mark="other")) == Running(for_ms=5)
        again = await store.claim(ME, fingerprint(redelivered=True))
        assert isinstance(again, Granted)
        assert again.token > found.token
        assert isinstance(await store.claim(Identity("", "ended"), fingerprint()), Ended)
        clock.uptime_ms += 10_001
        assert isinstance(await store.claim(ME, fingerprint(mark="other")), Granted), "nor is a lease stuck"


@pytest.mark.parametrize(("before", "after"), [("1", "2"), ("", "")])
async def test_a_reboot_ends_all_leases(tmp_path: Path, before: str, after: str) -> None:
    clock = Calendar()
    clock.booted, clock.uptime_ms = before, 100 * 86_400_000
    async with a_store(tmp_path, clock) as store:
        assert isinstance(await store.claim(ME, fingerprint()), Granted)
        assert await store.hold("sweep", "a", for_s=60)
    clock.booted, clock.uptime_ms = after, 1_000
    async with a_store(tmp_path, clock) as store:
        assert isinstance(await store.claim(ME, fingerprint(mark="other")), Granted)
        assert await store.hold("sweep", "b", for_s=60)


def waits_for_the_disk(tables: Tables, _: Times) -> bool:
    return bool(tables.connection.execute("PRAGMA synchronous").fetchone()[0] == 2)


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda store: store.claim(ME, fingerprint()), False),
        (lambda store: store.renew([]), False),
        (lambda store: store.shelter(Held(ME, 1)), False),
        (lambda store: store.note_waiting(Held(ME, 1), is_waiting=True), False),
        (lambda store: store.append([]), False),
        (lambda store: store.submission(ME), False),
        (lambda store: store.firings(), False),
        (lambda store: store.note_webhook(ME, b"", until_ms=1), False),
        (lambda store: store.release(Held(ME, 1)), True),
        (lambda store: store.complete(ME, fingerprint(), answered(), token=None), True),
        (lambda store: store.take("tokens", 1, limit=1, period=period_of(1, 0)), True),
    ],
)
async def test_an_operation_waits_for_the_disk_only_if_a_power_cut_may_not_lose_it(
    tmp_path: Path, operation: Callable[[SqliteStore], Awaitable[object]], waits: bool
) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        _, found = await asyncio.gather(operation(store), store.transact("look", waits_for_the_disk, durable=False))
    assert found is waits


async def test_what_is_written_when_the_store_is_closed_is_in_the_file_alone(tmp_path: Path) -> None:
    async with a_store(tmp_path, Calendar()) as store:
        assert await asyncio.gather(*(store.look([(ME, 0)]) for _ in range(9)))
        assert [each.daemon for each in threading.enumerate() if each.name == "store"] == [True], "it ends with us"
        claims = [asyncio.ensure_future(store.claim(Identity("", str(each)), fingerprint())) for each in range(1100)]
        await asyncio.sleep(0)  # they have asked
    assert all(isinstance(each, Granted) for each in await asyncio.gather(*claims))
    assert sum(store.times["claim"].counts) == 1100
    assert store.times["claim"].sum < 1100 * 60
    await until(lambda: [each.name for each in tmp_path.iterdir()] == ["lane.sqlite"])


async def test_at_the_moment_a_lease_ends_its_request_is_free(tmp_path: Path) -> None:
    clock = StandingClock()
    cancelled = Identity("", "cancelled")
    async with a_store(tmp_path, clock) as store:
        for each in (ME, cancelled):
            assert isinstance(await store.claim(each, fingerprint()), Granted)
        clock.ms += 9_999
        assert isinstance(await store.claim(ME, fingerprint(mark="other")), Running)
        clock.ms += 1
        assert await store.find(ME) == Found(completion=None, running=False)
        assert await store.cancel(cancelled, CANCELLED) is Cancelling.RECORDED
        again = await store.claim(ME, fingerprint(mark="other"))
        assert isinstance(again, Granted)
        assert again.deaths == 1
        clock.ms += 10_000
        assert Granted(token=again.token + 1, deaths=2) == await store.claim(ME, fingerprint())


async def test_what_waited_in_the_broker_leaves_nothing_behind(tmp_path: Path) -> None:
    clock = StandingClock()
    spec = StoreSpec(waiting_per_tenant=300, waiting_in_all=300)
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane", clock=clock, spec=spec) as store:

        async def counted(tenant: str, number: int) -> WaitingLimit:
            of = Identity(tenant, str(number))
            return await store.reserve(of, fingerprint(mark=str(number)), weight=1, until_ms=clock.ms + 1)

        found = await asyncio.gather(*(counted("a", number) for number in range(301)))
        assert found == [WaitingLimit.WITHIN] * 300 + [WaitingLimit.TENANT]
        clock.ms += 1
        assert await asyncio.gather(*(counted("b", number) for number in range(300))) == [WaitingLimit.WITHIN] * 300
        clock.ms += 1
        await store.note(ME, answered())
        while await store.sweep():
            pass
        left = await store.transact("look", lambda tables, _: list(tables.connection.execute("SELECT * FROM hold")))
    assert left == []


async def test_the_cancellation_of_what_was_only_submitted_counts_as_unseen(tmp_path: Path) -> None:
    submission = Submission(body_hash=b"h", lane="batch", submitted_ms=1, due_ms=None, deadline_ms=2)
    spec = StoreSpec(unseen_per_tenant=2)
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane", spec=spec) as store:
        for each in map(partial(Identity, "t"), "abc"):
            await store.follow(each, submission, first_entry=NewEntry("queued", b""), keep_until_ms=2**45)
            assert await store.cancel(each, CANCELLED) is Cancelling.RECORDED
        assert [await store.find(Identity("t", each)) is not None for each in "abc"].count(True) == 2


def an_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "is_opened_again"),
    [
        (an_error(sqlite3.SQLITE_BUSY), False),
        (an_error(sqlite3.SQLITE_BUSY_RECOVERY), False),
        (an_error(sqlite3.SQLITE_LOCKED), False),
        (an_error(sqlite3.SQLITE_IOERR_FSYNC), True),
        (sqlite3.OperationalError("without a code"), True),
        (OSError("a disk"), True),
        (RuntimeError("a bug"), True),
    ],
    ids=str,
)
async def test_after_an_error_nothing_of_its_group_is_kept_and_the_file_is_opened_again_unless_it_was_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_opened_again: bool
) -> None:
    monkeypatch.setattr("consumers.state.sqlite.store.REOPEN_S", 0)

    def fails(*_: object) -> None:
        raise error

    async with a_store(tmp_path, Calendar()) as store:
        pragma = "PRAGMA max_page_count"
        await store.transact("limit", lambda tables, _: tables.connection.execute(f"{pragma} = 9999").fetchone())
        told = await asyncio.gather(store.note(ME, answered()), store.transact("fail", fails), return_exceptions=True)
        assert [type(each) for each in told] == [type(error) if "bug" in str(error) else StoreUnavailable] * 2
        if "bug" not in str(error):
            assert await store.transact("look", waits_for_the_disk, durable=False), (
                "no claim before a disk has answered"
            )
        assert not await store.transact("look", waits_for_the_disk, durable=False)
        assert await store.find(ME) is None
        kept = await store.transact("look", lambda tables, _: tables.connection.execute(pragma).fetchone())
    assert (kept != (9999,)) is is_opened_again


async def test_after_an_error_a_file_is_not_opened_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.state.sqlite.store.REOPEN_S", 3600)

    def fails(*_: object) -> None:
        raise an_error(sqlite3.SQLITE_IOERR)

    async with a_store(tmp_path, Calendar()) as store:
        (tmp_path / "lane.sqlite").unlink()
        assert await store.find(ME) is None, "after no error it is"
        for operation in (fails, waits_for_the_disk):
            with pytest.raises(StoreUnavailable, match="see whether its disk is full or broken"):
                await store.transact("fail", operation)


async def test_who_follows_is_served_again_after_an_error(tmp_path: Path) -> None:
    async with a_store(tmp_path, Calendar()) as store:
        with pytest.raises(UnicodeEncodeError):
            await store.look([(Identity("", "\ud800"), 0)])
        with closing(sqlite3.connect(tmp_path / "lane.sqlite")) as other:
            other.execute("ALTER TABLE followed RENAME TO away")
            with pytest.raises(StoreUnavailable, match="no such table"):
                await store.look([(ME, 0)])
            other.execute("ALTER TABLE away RENAME TO followed")
        await store.look([(ME, 0)])
