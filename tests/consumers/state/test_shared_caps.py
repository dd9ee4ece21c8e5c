"""Caps of several processes over one store, by every engine."""

import asyncio
from typing import Any

import pytest

from consumers.spending import Bound, Cap, CapsSpec, Hold, Over, Spending, Spent
from tests.consumers.state.conftest import Opened

SPEC = CapsSpec(lanes={"batch": Cap(requests=10)}, tenants={"*": Cap(tokens=1000, usd=1.0)})


class Process:
    """One of them, with what it told."""

    def __init__(self, spending: Spending) -> None:
        self.spending = spending
        self.told: list[tuple[str, int]] = []

    @property
    def bounds(self) -> tuple[Bound, ...]:
        return self.spending.bounds("batch", "shop")

    async def take(self, spent: Spent) -> Hold | Over:
        def tell(_: str, /, *, cap: str, percent: int, **__: Any) -> None:
            self.told.append((cap, percent))

        return await self.spending.take(self.bounds, spent, tell=tell)


async def started(opened: Opened, *, spec: CapsSpec = SPEC) -> Process:
    return Process(Spending(await opened(), spec))


async def test_together_they_keep_to_a_cap_however_many_ask_at_once(opened: Opened) -> None:
    processes = [await started(opened) for _ in range(3)]

    taken = await asyncio.gather(*(processes[n % 3].take(Spent(1, 10, 0.01)) for n in range(60)))

    assert sum(isinstance(each, Hold) for each in taken) == 10
    assert {each.used for each in taken if isinstance(each, Over)} == {10}


async def test_what_is_refused_by_one_cap_is_taken_of_none(opened: Opened) -> None:
    process = await started(opened)
    assert isinstance(await process.take(Spent(1, 900, 0.1)), Hold)

    over = await process.take(Spent(1, 200, 0.1))

    assert isinstance(over, Over)
    assert over.bound.what == "tokens"
    assert 0 < over.resets_in_s <= 86_400
    for _ in range(9):  # none of the requests was counted for it
        assert isinstance(await process.take(Spent(1, 1, 0.01)), Hold)
    assert isinstance(await process.take(Spent(1, 1, 0.01)), Over)


async def test_an_answer_that_used_less_makes_room_and_one_that_used_more_takes_it(opened: Opened) -> None:
    process = await started(opened)
    hold = await process.take(Spent(1, 900, 0.9))
    assert isinstance(hold, Hold)
    process.spending.correct(hold, Spent(1, 100, 0.2))
    await process.spending.finish(within_s=30)

    hold = await process.take(Spent(1, 100, 0.7))
    assert isinstance(hold, Hold)
    process.spending.correct(hold, Spent(1, 100, 0.85))
    await process.spending.finish(within_s=30)

    assert isinstance(await process.take(Spent(1, 1, 0.01)), Over)


async def test_each_level_is_told_once_by_all_of_them_and_by_one_that_begins_anew(opened: Opened) -> None:
    one, other = await started(opened), await started(opened)

    for _ in range(5):
        await one.take(Spent(1))
    for _ in range(3):
        await other.take(Spent(1))
    again = await started(opened)
    for _ in range(4):
        await again.take(Spent(1))

    told = [[percent for cap, percent in each.told if cap == "cap lane batch requests"] for each in (one, other, again)]
    assert told == [[50], [80], [100]]


async def test_at_once_each_level_is_told_once_too(opened: Opened) -> None:
    processes = [await started(opened) for _ in range(3)]

    await asyncio.gather(*(processes[n % 3].take(Spent(1)) for n in range(30)))

    told = sorted(percent for each in processes for _, percent in each.told)
    assert told == [50, 80, 100]


@pytest.mark.slow
async def test_a_new_day_begins_with_nothing_used_and_is_told_anew(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.spending.DAY_S", 1)
    process = await started(opened, spec=CapsSpec(lanes={"batch": Cap(requests=2)}))

    async with asyncio.timeout(20):
        while [percent for _, percent in process.told].count(100) < 2:
            over = await process.take(Spent(1))
            if isinstance(over, Over):
                await asyncio.sleep(over.resets_in_s)

    assert [percent for _, percent in process.told][-3:] == [50, 80, 100]
