"""Dead letters beyond the limits are removed, the oldest first; only one process at a time does that."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers.housekeeping import (
    DeadSpec,
    LetterSize,
    _write,
    surplus,
    sweeping,
)
from consumers.state.base import StoreUnavailable
from lanekeeper.bodies import BodiesUnavailable
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench
from tests.support.virtual_time import virtually

SECOND_MS = 1000


def kept(tenant: str, count: int, *, bytes: int = 100, age_s: float = 50, first: int = 0) -> list[LetterSize]:
    """Letters of a tenant, the oldest first; their keys begin with `first`."""
    return [LetterSize(tenant, first + at, bytes, NOW_MS - round(age_s * SECOND_MS) + at) for at in range(count)]


def gone(letters: list[LetterSize], **spec: Any) -> set[int]:
    return surplus(letters, DeadSpec(**spec), now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("bound", "left"),
    [({"max_count": 20}, 20), ({"max_count": 16}, 14), ({"max_bytes": 1600}, 14), ({"max_count": 1}, 1)],
)
def test_dead_letters_beyond_the_number_or_size_go_down_to_seven_eighths_the_oldest_first(
    bound: dict[str, int], left: int
) -> None:
    assert gone(kept("", 20), **bound) == set(range(20 - left))


def test_the_event_of_a_letter_with_any_key_and_id_can_be_written() -> None:
    bench, key = Bench(), f"{'x' * 100}.{'y' * 100}.z"
    bench.lifecycle.publish_for_letter(Message(body=b"", routing_key=key, message_id="i" * 128), "removed")
    assert [len(key) for key in bench.notices.keys] == [255]


def test_a_few_large_letters_go_and_not_the_many_small_ones_of_others() -> None:
    small, large = kept("small", 100), kept("large", 10, bytes=100_000, first=500)
    assert gone([*small, *large], max_bytes=500_000) == set(range(500, 506))


def test_dead_letters_older_than_they_are_kept_are_removed_and_one_without_a_time_is_not() -> None:
    letters = [*kept("", 1, age_s=150), *kept("", 1, age_s=100, first=1), LetterSize("", 2, 1, 0)]
    assert gone(letters, keep_s=100) == {0}


def test_exported_dead_letters_and_the_name_of_their_new_file_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    for _ in range(2):
        _write(tmp_path, [Message(body=b"x", routing_key="k")] * 2, NOW_MS)
    file, *others = synced
    assert Path(file).parent == tmp_path
    assert others == [str(tmp_path), file]
    assert len(Path(file).read_text().splitlines()) == 4


class Keeping:
    """A store of results and a store of bodies, with the times at which each was used."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.expired = 0
        self.is_full = False
        self.is_held_elsewhere = False
        self.probed_s: list[float] = []
        self.swept_s: list[float] = []
        self.bodies = Bodies()
        self.leases: list[tuple[str, str, float]] = []

    async def probe(self) -> None:
        self.probed_s.append(passed_s())
        if self.trouble:
            raise StoreUnavailable(self.trouble)

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        self.leases.append((name, owner, for_s))
        if self.trouble:
            raise StoreUnavailable(self.trouble)
        return not self.is_held_elsewhere

    async def sweep(self) -> int:
        self.swept_s.append(passed_s())
        removed, self.expired = min(self.expired, 100), max(0, self.expired - 100)
        return removed


class Bodies:
    def __init__(self) -> None:
        self.swept_s: list[float] = []
        self.fails: Exception | None = None
        self.hangs = False

    async def sweep(self) -> None:
        self.swept_s.append(passed_s())
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()


def passed_s() -> float:
    return asyncio.get_running_loop().time() - 1000


def told(
    work: Callable[[Keeping], Coroutine[Any, Any, None]], keeping: Callable[[Keeping], None], *, for_s: float
) -> tuple[Keeping, list[str]]:
    """Do the work for a while. Returns the stores, and the log events."""

    async def story() -> Keeping:
        these = Keeping()
        keeping(these)
        working = asyncio.create_task(work(these))
        await asyncio.sleep(for_s)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return these

    with capture_logs() as logs:
        these = virtually(story())
    return these, [each["event"] for each in logs]


def sweeps(these: Keeping) -> Coroutine[Any, Any, None]:
    return sweeping(these, these.bodies, owner="me")  # type: ignore[arg-type]


def test_a_full_store_is_swept_at_the_next_look_and_again_only_while_that_removes_something() -> None:
    def filling(these: Keeping) -> None:
        asyncio.get_running_loop().call_later(8, setattr, these, "is_full", True)
        these.expired = 150

    these, _ = told(sweeps, filling, for_s=40)
    assert these.swept_s == pytest.approx([10, 10.05, 10.1, 15.1])
    assert these.bodies.swept_s == []


def test_while_another_process_sweeps_neither_results_nor_bodies_are_swept() -> None:
    these, _ = told(sweeps, lambda these: setattr(these, "is_held_elsewhere", True), for_s=600)
    assert (these.swept_s, these.bodies.swept_s) == ([], [])
    assert len(these.leases) > 5


@pytest.mark.parametrize("fault", ["store", "bodies", "hangs"])
def test_a_sweep_that_fails_is_logged_and_the_next_one_is_made(fault: str) -> None:
    def failing(these: Keeping) -> None:
        if fault == "store":
            these.trouble = "locked"
        elif fault == "bodies":
            these.bodies.fails = BodiesUnavailable("away")
        else:
            these.bodies.hangs = True

    _, logged = told(sweeps, failing, for_s=600)
    assert set(logged) == {signals.SWEEP_FAILED}
    assert len(logged) >= (8 if fault != "hangs" else 4)


def test_a_store_of_bodies_that_hangs_is_given_up_after_a_minute() -> None:
    these, _ = told(sweeps, lambda these: setattr(these.bodies, "hangs", True), for_s=600)
    pauses_s = [later - earlier for earlier, later in zip(these.swept_s, these.swept_s[1:], strict=False)]
    assert min(pauses_s) >= 60 + 48
    assert max(pauses_s) <= 60 + 72
