"""Several processes share caps through one store, for every engine."""

import asyncio
import random
from typing import Any

import pytest

from consumers.failures import TransientError
from consumers.job import Route
from consumers.providers.breakers import DOUBTED_FROM, FAILURES, Breakers, Permit
from consumers.spending import Bound, CapsSpec, Hold, Over, Spending, Spent
from tests.consumers.state.conftest import Opened
from tests.support.memory_store import daily
from tests.support.waiting import until

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


HERE = Route(provider="anthropic", model="m", name="m", account="anthropic/m")
DOWN = TransientError("500", status=500)
OPEN_S, OPEN_MOST_S = 60.0, 300.0


@pytest.fixture(autouse=True)
def _whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease lasts as long as the breaker is open, in the store's own time; seconds can pass on a busy machine."""
    monkeypatch.setattr("consumers.providers.breakers.OPEN_S", OPEN_S)
    monkeypatch.setattr("consumers.providers.breakers.OPEN_MOST_S", OPEN_MOST_S)
    monkeypatch.setattr("consumers.providers.breakers.STORE_WITHIN_S", 60)


async def enter(these: Breakers, at_s: float, *, request: str = "r") -> Permit | None:
    return await these.enter(HERE, at_s, request=request)


async def fail(these: Breakers, at_s: float, *, times: int) -> None:
    for each in range(times):
        permit = await enter(these, at_s, request=str(each))
        assert permit is not None
        await these.failed(permit, DOWN, at_s, timeout_s=60)


async def two(opened: Opened) -> tuple[Breakers, Breakers]:
    return Breakers(await opened(), rng=random.Random(1)), Breakers(await opened(), rng=random.Random(2))


async def test_a_breaker_opened_by_one_process_opens_in_another_after_a_few_failures(opened: Opened) -> None:
    one, other = await two(opened)
    await fail(one, 0, times=FAILURES)
    assert one.wait_s(HERE, 0) > 0

    await fail(other, 0, times=DOUBTED_FROM)

    assert other.wait_s(HERE, 0) > 0


async def test_a_few_failures_without_another_process_open_nothing(opened: Opened) -> None:
    one, other = await two(opened)

    await fail(one, 0, times=DOUBTED_FROM + 1)
    await fail(other, 0, times=DOUBTED_FROM + 1)

    assert (one.wait_s(HERE, 0), other.wait_s(HERE, 0)) == (0, 0)


async def test_one_process_probes_and_the_others_learn_the_result(opened: Opened) -> None:
    one, other = await two(opened)
    await fail(one, 0, times=FAILURES)
    await fail(other, 0, times=DOUBTED_FROM)

    probe = await enter(one, OPEN_S)
    assert probe is not None
    assert await enter(other, OPEN_S) is None
    assert 0 < other.wait_s(HERE, OPEN_S) <= OPEN_MOST_S

    await one.answered(probe, OPEN_S)
    assert one.wait_s(HERE, OPEN_S) == 0
    last = await enter(other, OPEN_S + OPEN_MOST_S)
    assert last is not None
    assert last.is_probe


@pytest.mark.slow
async def test_if_a_probing_process_dies_another_probes(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.providers.breakers.PROBE_WITHIN_S", 0.2)
    one, other = await two(opened)
    await fail(one, 0, times=FAILURES)
    await fail(other, 0, times=DOUBTED_FROM)
    assert await enter(one, OPEN_S)
    now_s = OPEN_S

    async def probed() -> bool:
        nonlocal now_s
        now_s += OPEN_MOST_S
        return await enter(other, now_s) is not None

    await until(probed)
