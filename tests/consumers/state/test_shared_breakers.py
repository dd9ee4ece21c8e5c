"""Several processes share breakers through one store, for every engine: each learns from the others' failures."""

import random

import pytest

from consumers.chain import Route
from consumers.failures import TransientError
from consumers.providers.breaker import DOUBTED_FROM, FAILURES
from consumers.providers.breakers import Breakers, Permit
from tests.consumers.state.conftest import Opened
from tests.support.waiting import until

HERE = Route(provider="anthropic", model="m", name="m", account="anthropic/m")
DOWN = TransientError("500", status=500)
OPEN_S, OPEN_MOST_S = 60.0, 300.0


@pytest.fixture(autouse=True)
def _whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease lasts as long as the breaker is open, in the store's own time; seconds can pass on a busy machine."""
    monkeypatch.setattr("consumers.providers.breaker.OPEN_S", OPEN_S)
    monkeypatch.setattr("consumers.providers.breaker.OPEN_MOST_S", OPEN_MOST_S)
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
    monkeypatch.setattr("consumers.providers.breaker.PROBE_WITHIN_S", 0.2)
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
