"""The regular work on the stores: when they are checked and swept, by whom, and what is logged. In virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers.state.base import StoreUnavailable
from consumers.storekeeping import probing, sweep_once, sweeping
from lanekeeper.bodies import BodiesUnavailable
from lanekeeper.telemetry import signals
from tests.support.virtual_time import virtually


class Keeping:
    """A store of results and a store of bodies, with the times at which each was used."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.expired = 0
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


def probes(these: Keeping) -> Coroutine[Any, Any, None]:
    return probing(these)  # type: ignore[arg-type]


def test_a_store_is_checked_every_five_seconds() -> None:
    these, logged = told(probes, lambda _: None, for_s=11)
    assert (these.probed_s, logged) == ([0, 5, 10], [])


def test_a_store_that_is_away_is_checked_twice_a_second_and_each_change_is_logged_once() -> None:
    def away_for_two_seconds(these: Keeping) -> None:
        these.trouble = "locked"
        asyncio.get_running_loop().call_later(1.9, setattr, these, "trouble", None)

    these, logged = told(probes, away_for_two_seconds, for_s=8)
    assert these.probed_s == [0, 0.5, 1, 1.5, 2, 7]
    assert logged == [signals.STORE_AWAY, signals.STORE_WELL]


def test_results_and_bodies_are_swept_once_a_minute_with_a_fifth_more_or_less() -> None:
    these, logged = told(sweeps, lambda _: None, for_s=36_000)
    pauses_s = [later - earlier for earlier, later in zip([0.0, *these.swept_s], these.swept_s, strict=False)]
    assert 48 <= min(pauses_s) < 52
    assert 68 < max(pauses_s) <= 72
    assert these.bodies.swept_s == these.swept_s
    assert set(these.leases) == {("sweep", "me", 120)}
    assert logged == []


def test_while_another_process_sweeps_neither_results_nor_bodies_are_swept() -> None:
    these, _ = told(sweeps, lambda these: setattr(these, "is_held_elsewhere", True), for_s=600)
    assert (these.swept_s, these.bodies.swept_s) == ([], [])
    assert len(these.leases) > 5


def test_without_a_store_of_bodies_results_are_swept() -> None:
    these, logged = told(lambda these: sweeping(these, None, owner="me"), lambda _: None, for_s=600)  # type: ignore[arg-type]
    assert len(these.swept_s) > 5
    assert logged == []


def test_many_expired_results_are_removed_in_steps_with_pauses() -> None:
    async def story() -> tuple[int | None, list[float]]:
        these = Keeping()
        these.expired = 250
        return await sweep_once(these, owner="me", for_s=1), these.swept_s  # type: ignore[arg-type]

    removed, swept_s = virtually(story())
    assert removed == 250
    assert swept_s == pytest.approx([0, 0.05, 0.1, 0.15])


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
