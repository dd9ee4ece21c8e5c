"""Operations that one transaction shares, processes that are killed, clocks that jump, and a machine that restarts."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from typing_extensions import override

from consumers.state.base import Completion, Ended, Granted, Held, Identity, Running, StoreSpec, StoreUnavailable
from consumers.state.sqlite.file import WAL_BYTES, Clock
from consumers.state.sqlite.store import SqliteStore, Writer
from consumers.state.sqlite.tables import Tables, Times
from tests.support.completions import CANCELLED, ME, answered, fingerprint

WAITED = Identity("", "waited")


class Standing(Clock):
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
        found = await asyncio.gather(*(writer.do("now", lambda _, at: at) for _ in range(4)), return_exceptions=True)
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


@pytest.mark.parametrize("boot", ["1", ""])
async def test_a_file_that_is_opened_again_keeps_its_leases(tmp_path: Path, boot: str) -> None:
    clock = Calendar()
    clock.booted = boot
    async with a_store(tmp_path, clock) as store:
        assert isinstance(await store.claim(ME, fingerprint()), Granted)
        assert await store.hold("sweep", "a", for_s=60)
    async with a_store(tmp_path, clock) as store:
        assert isinstance(await store.claim(ME, fingerprint(mark="other")), Running)
        assert not await store.hold("sweep", "b", for_s=60)


async def test_leases_that_have_ended_take_no_room(tmp_path: Path) -> None:
    clock = Calendar()
    async with a_store(tmp_path, clock) as store:
        for number in range(20):
            assert await store.hold(f"create {number}", "a", for_s=1)
        assert await store.hold("sweep", "a", for_s=60)
        clock.uptime_ms += 2_000
        assert await store.sweep() == 20
        assert await store.sweep() == 0
        assert not await store.hold("sweep", "b", for_s=60), "it has not ended"


@pytest.mark.parametrize(("keep_s", "lease_s"), [(10, 20), (20, 10)])
async def test_a_row_is_gone_the_moment_it_is_neither_kept_nor_leased(
    tmp_path: Path, keep_s: float, lease_s: float
) -> None:
    clock = Standing()
    spec = StoreSpec(keep_s=keep_s, lease_s=lease_s)
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane", clock=clock, spec=spec) as store:
        assert isinstance(await store.claim(ME, fingerprint()), Granted)
        assert await store.hold("sweep", "a", for_s=20)
        await store.defer(WAITED, due_ms=clock.ms, keep_until_ms=clock.ms + round(lease_s * 1000))
        await store.cancel(WAITED, CANCELLED)
        clock.ms += 19_999
        assert await store.find(ME) is not None
        assert await store.find(WAITED) is not None
        assert not await store.hold("sweep", "b", for_s=1)
        clock.ms += 1
        assert await store.find(ME) is None
        assert await store.find(WAITED) is None
        assert await store.hold("sweep", "b", for_s=1)


def waits_for_the_disk(tables: Tables, _: Times) -> bool:
    return bool(tables.connection.execute("PRAGMA synchronous").fetchone()[0] == 2)


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda store: store.claim(ME, fingerprint()), False),
        (lambda store: store.renew([]), False),
        (lambda store: store.shelter(Held(ME, 1)), False),
        (lambda store: store.append([]), False),
        (lambda store: store.submission(ME), False),
        (lambda store: store.firings(), False),
        (lambda store: store.note_webhook(ME, b"", until_ms=1), False),
        (lambda store: store.release(Held(ME, 1)), True),
        (lambda store: store.complete(ME, fingerprint(), answered(), token=None), True),
        (lambda store: store.take("tokens", 1, limit=1, period_s=1), True),
    ],
)
async def test_an_operation_waits_for_the_disk_only_if_a_power_cut_may_not_lose_it(
    tmp_path: Path, operation: Callable[[SqliteStore], Awaitable[object]], waits: bool
) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        _, found = await asyncio.gather(operation(store), store.transact("look", waits_for_the_disk, durable=False))
    assert found is waits


@pytest.mark.parametrize(("spare", "is_full"), [(0, False), (-1, True)])
async def test_a_file_is_full_above_its_limit(tmp_path: Path, spare: int, is_full: bool) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        used = await store.transact("look", lambda tables, _: tables.used_bytes())
    spec = StoreSpec(max_bytes=used + spare)
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane", spec=spec) as store:
        assert store.is_full is is_full


async def test_the_log_shrinks_to_its_limit(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        limit = await store.transact(
            "look", lambda tables, _: tables.connection.execute("PRAGMA journal_size_limit").fetchone()
        )
    assert limit == (WAL_BYTES,)
