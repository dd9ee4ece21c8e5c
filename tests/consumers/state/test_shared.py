"""Several processes share caps through one store, for every engine."""

import asyncio
from typing import Any

import pytest

from consumers.spending import Bound, CapsSpec, Hold, Over, Spending, Spent
from tests.consumers.state.conftest import Opened
from tests.support.memory_store import daily

SPEC = CapsSpec(lanes={"batch": daily(requests=10)}, tenants={"*": daily(tokens=1000, usd=1.0)})


class Process:
    """One of the processes, with the levels that it reported."""

    def __init__(self, spending: Spending) -> None:
        self.spending = spending
        self.told: list[tuple[str, int]] = []

    @property
    def bounds(self) -> tuple[Bound, ...]:
        return self.spending.bounds("batch", "shop")

    async def take(self, spent: Spent, *, is_used: bool = False) -> Hold | Over:
        def tell(_: str, /, *, cap: str, percent: int, **__: Any) -> None:
            self.told.append((cap, percent))

        found = await self.spending.take(self.bounds, spent, publish=tell)
        if isinstance(found, Hold) and is_used:
            self.spending.correct(found, spent, publish=tell)
            await self.spending.finish(within_s=30)
        return found


async def started(opened: Opened, *, spec: CapsSpec = SPEC) -> Process:
    return Process(Spending(await opened(), spec))


@pytest.mark.slow
async def test_a_hard_cap_holds_under_64_concurrent_callers_that_use_all_they_may(opened: Opened) -> None:
    processes = [await started(opened, spec=CapsSpec(tenants={"*": daily(usd=1.0)})) for _ in range(4)]

    await asyncio.gather(*(processes[n % 4].take(Spent(usd=0.03), is_used=True) for n in range(64)))

    over = await processes[0].take(Spent(usd=0.03))
    assert isinstance(over, Over)
    assert over.used == pytest.approx(0.99)
    assert not over.ends_soon


@pytest.mark.slow
async def test_several_processes_together_do_not_exceed_a_cap(opened: Opened) -> None:
    processes = [await started(opened) for _ in range(3)]

    taken = await asyncio.gather(*(processes[n % 3].take(Spent(1, 10, 0.01)) for n in range(60)))

    assert sum(isinstance(each, Hold) for each in taken) == 10
    assert {each.used for each in taken if isinstance(each, Over)} == {0}, "nothing is used yet"
    assert all(each.ends_soon for each in taken if isinstance(each, Over))


async def test_each_level_is_reported_once_with_concurrent_requests(opened: Opened) -> None:
    processes = [await started(opened) for _ in range(3)]

    await asyncio.gather(*(processes[n % 3].take(Spent(1), is_used=True) for n in range(30)))
    assert isinstance(await processes[0].take(Spent(1)), Over)

    told = sorted(percent for each in processes for _, percent in each.told)
    assert told == [50, 80, 100]
