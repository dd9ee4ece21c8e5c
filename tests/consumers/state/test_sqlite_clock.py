"""Leases in a SQLite file are measured by the time since the machine was booted, because the calendar may be
changed."""

from pathlib import Path

import pytest
from typing_extensions import override

from consumers.state.base import Ended, Granted, Identity, Running
from consumers.state.sqlite.clock import Clock
from consumers.state.sqlite.store import SqliteStore
from tests.support.completions import ME, answered, fingerprint


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
        assert await store.hold("sweep", "a", for_s=60) is not None
    clock.booted, clock.uptime_ms = after, 1_000
    async with a_store(tmp_path, clock) as store:
        assert isinstance(await store.claim(ME, fingerprint(mark="other")), Granted)
        assert await store.hold("sweep", "b", for_s=60) is not None
