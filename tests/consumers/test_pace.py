"""The pace of a lane, which all its workers count together in the store."""

import asyncio

import pytest

from consumers.capacity import pace
from consumers.capacity.activity import LaneActivity
from consumers.state.base import StoreUnavailable, Taken
from service.side_tasks import beside
from tests.support.waiting import until


class Counted:
    """Counts without periods; `seen_s`: how old the period is."""

    def __init__(self) -> None:
        self.used = 0.0
        self.seen_s = pace.SEEN_AT_LEAST_S
        self.is_away = False
        self.asked = 0

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        self.asked += 1
        if self.is_away:
            raise StoreUnavailable("away")
        self.used += amount
        return Taken(granted=True, used=self.used, resets_in_s=period_s - self.seen_s)

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        raise NotImplementedError


def activity() -> LaneActivity:
    return LaneActivity("batch", slots=1, due_slots=1)


async def test_what_ends_in_all_workers_is_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "NOTE_EVERY_S", 0.01)
    store, workers = Counted(), [activity(), activity()]
    async with beside(pace.noting(store, workers[:1]), name="1"), beside(pace.noting(store, workers[1:]), name="2"):
        await asyncio.sleep(0)
        workers[0].ended, workers[1].ended = 30, 10
        await until(lambda: store.used == 40)

    assert await pace.per_s(store, "batch") == 40 / pace.SEEN_AT_LEAST_S


async def test_what_a_store_that_was_away_did_not_take_is_counted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "NOTE_EVERY_S", 0.01)
    store, worker = Counted(), activity()
    store.is_away = True
    async with beside(pace.noting(store, [worker]), name="pace"):
        await asyncio.sleep(0)
        worker.ended = 7
        await until(lambda: store.asked > 2)
        store.is_away = False
        await until(lambda: store.used == 7)


@pytest.mark.parametrize(("used", "seen_s"), [(0, 50), (5, pace.SEEN_AT_LEAST_S - 1)])
async def test_it_is_unknown_where_nothing_ends_or_too_little_was_seen(used: int, seen_s: float) -> None:
    store = Counted()
    store.used, store.seen_s = used, seen_s

    assert await pace.per_s(store, "batch") is None
