"""Several processes share caps through one store, for every engine."""

import asyncio
from typing import Any

import pytest

from consumers.spending import Bound, Cap, CapsSpec, Hold, Over, Spending, Spent
from tests.consumers.state.conftest import Opened

SPEC = CapsSpec(lanes={"batch": Cap(requests=10)}, tenants={"*": Cap(tokens=1000, usd=1.0)})


class Process:
    """One of the processes, with the levels that it reported."""

    def __init__(self, spending: Spending) -> None:
        self.spending = spending
        self.told: list[tuple[str, int]] = []

    @property
    def bounds(self) -> tuple[Bound, ...]:
        return self.spending.bounds("batch", "shop")

    async def take(self, spent: Spent) -> Hold | Over:
        def tell(_: str, /, *, cap: str, percent: int, **__: Any) -> None:
            self.told.append((cap, percent))

        return await self.spending.take(self.bounds, spent, publish=tell)


async def started(opened: Opened, *, spec: CapsSpec = SPEC) -> Process:
    return Process(Spending(await opened(), spec))


async def test_several_processes_together_do_not_exceed_a_cap(opened: Opened) -> None:
    processes = [await started(opened) for _ in range(3)]

    taken = await asyncio.gather(*(processes[n % 3].take(Spent(1, 10, 0.01)) for n in range(60)))

    assert sum(isinstance(each, Hold) for each in taken) == 10
    assert {each.used for each in taken if isinstance(each, Over)} == {10}


async def test_a_request_refused_by_one_cap_is_counted_in_none(opened: Opened) -> None:
    process = await started(opened)
    assert isinstance(await process.take(Spent(1, 900, 0.1)), Hold)

    over = await process.take(Spent(1, 200, 0.1))

    assert isinstance(over, Over)
    assert over.bound.what == "tokens"
    assert 0 < over.resets_in_s <= 86_400
    for _ in range(9):  # the refused request is not counted there
        assert isinstance(await process.take(Spent(1, 1, 0.01)), Hold)
    assert isinstance(await process.take(Spent(1, 1, 0.01)), Over)


async def test_an_answers_actual_usage_corrects_the_shared_count_up_and_down(opened: Opened) -> None:
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


async def test_each_level_is_reported_once_by_all_processes_including_new_ones(opened: Opened) -> None:
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


async def test_each_level_is_reported_once_with_concurrent_requests(opened: Opened) -> None:
    processes = [await started(opened) for _ in range(3)]

    await asyncio.gather(*(processes[n % 3].take(Spent(1)) for n in range(30)))

    told = sorted(percent for each in processes for _, percent in each.told)
    assert told == [50, 80, 100]


@pytest.mark.slow
async def test_on_a_new_day_counts_and_reports_start_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.spending.DAY_S", 1)
    process = await started(opened, spec=CapsSpec(lanes={"batch": Cap(requests=2)}))

    async with asyncio.timeout(20):
        while [percent for _, percent in process.told].count(100) < 2:
            over = await process.take(Spent(1))
            if isinstance(over, Over):
                await asyncio.sleep(over.resets_in_s)

    assert [percent for _, percent in process.told][-3:] == [50, 80, 100]
