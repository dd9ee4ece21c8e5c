"""A lane's figures: counts, and a limited number of the latest waits and run times."""

import asyncio

import pytest

from consumers.background import background_task
from consumers.slots.activity import LaneActivity, ended_per_s, note_ends
from consumers.state.base import AllowanceReservation, AllowanceTaken, Period, StoreUnavailable
from tests.support.virtual_time import virtually


class Counted:
    """Counts without periods; `seen_s`: how old the period is."""

    def __init__(self) -> None:
        self.used = 0.0
        self.seen_s = 20.0
        self.is_away = False
        self.asked = 0
        self.periods_s: set[int] = set()

    def now_ms(self) -> int:
        return round(1000 * self.seen_s)

    async def take(
        self, name: str, amount: float, *, limit: float, period: Period, reservation: AllowanceReservation | None = None
    ) -> AllowanceTaken:
        self.asked += 1
        self.periods_s.add(period.length_s)
        if self.is_away:
            raise StoreUnavailable("away")
        self.used += amount
        return AllowanceTaken(granted=True, used=self.used)

    async def settle(self, name: str, used: float, *, period: Period, reservation: AllowanceReservation) -> None:
        raise NotImplementedError

    async def give_back(self, name: str, amount: float, *, period: Period) -> None:
        raise NotImplementedError


def activity() -> LaneActivity:
    return LaneActivity("batch", slots=1, due_slots=1)


def test_what_ends_in_all_workers_is_noted_every_five_seconds_and_is_the_pace() -> None:
    async def story() -> tuple[list[float], float | None]:
        store, workers, used = Counted(), [activity(), activity()], []
        workers[0].ended = 1000  # before it notes anything
        async with (
            background_task(note_ends(store, workers[:1], now_ms=store.now_ms), name="1"),
            background_task(note_ends(store, workers[1:], now_ms=store.now_ms), name="2"),
        ):
            await asyncio.sleep(0.1)
            workers[0].ended, workers[1].ended = 1030, 10
            for seconds in (4.8, 0.2):
                await asyncio.sleep(seconds)
                used.append(store.used)
            workers[0].ended = 1050
            await asyncio.sleep(15)
        assert (store.asked, store.periods_s) == (3, {60})
        return [*used, store.used], await ended_per_s(store, "batch", now_ms=store.now_ms)

    assert virtually(story()) == ([0, 40, 60], 3)


def test_what_a_store_that_was_away_did_not_take_is_counted_later() -> None:
    async def story() -> float:
        store, worker = Counted(), activity()
        store.is_away = True
        async with background_task(note_ends(store, [worker], now_ms=store.now_ms), name="pace"):
            await asyncio.sleep(0)
            worker.ended = 7
            await asyncio.sleep(12)
            assert (store.asked, store.used) == (2, 0)
            store.is_away = False
            await asyncio.sleep(12)
        return store.used

    assert virtually(story()) == 7


@pytest.mark.parametrize(("used", "seen_s"), [(0, 50), (5, 19.9)])
async def test_it_is_unknown_where_nothing_ends_or_too_little_was_seen(used: int, seen_s: float) -> None:
    store = Counted()
    store.used, store.seen_s = used, seen_s

    assert await ended_per_s(store, "batch", now_ms=store.now_ms) is None
