"""Allowances and leases, for every engine."""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.state.base import AllowanceReservation, Period
from consumers.state.redis.store import RedisStore
from consumers.state.sqlite.store import SqliteStore
from consumers.state.store import Store
from tests.support.examples import examples
from tests.support.memory_store import MemoryStore, current
from tests.support.redis import RedisServer
from tests.support.waiting import until

DAY_S = 86_400


async def test_an_amount_above_the_allowance_takes_nothing(store: Store) -> None:
    await store.take("tokens", 0.25, limit=1, period=current(DAY_S))

    refused = await store.take("tokens", 0.8, limit=1, period=current(DAY_S))

    assert (refused.granted, refused.used) == (False, 0.25)
    assert (await store.take("tokens", 0.75, limit=1, period=current(DAY_S))).used == 1


async def test_a_taken_amount_can_be_corrected_up_and_down(store: Store) -> None:
    await store.take("tokens", 50, limit=100, period=current(DAY_S))
    await store.give_back("tokens", 20, period=current(DAY_S))
    assert (await store.take("tokens", 0, limit=100, period=current(DAY_S))).used == 30

    await store.give_back("tokens", -200, period=current(DAY_S))
    beyond = await store.take("tokens", 1, limit=100, period=current(DAY_S))
    assert (beyond.granted, beyond.used) == (False, 230)


async def test_giving_back_an_amount_of_an_earlier_period_has_no_effect(store: Store) -> None:
    await store.give_back("tokens", 500, period=current(DAY_S))

    assert (await store.take("tokens", 0, limit=100, period=current(DAY_S))).used == 0


def reservation(id: str = "a", nonce: str = "1", *, in_s: float = 60) -> AllowanceReservation:
    return AllowanceReservation(id, nonce, round(1000 * (time.time() + in_s)))


async def used(store: Store) -> float:
    return (await store.take("tokens", 0, limit=100, period=current(DAY_S))).used


async def test_what_is_reserved_counts_until_it_is_settled(store: Store) -> None:
    of = reservation()
    assert (await store.take("tokens", 70, limit=100, period=current(DAY_S), reservation=of)).used == 70
    assert not (await store.take("tokens", 40, limit=100, period=current(DAY_S), reservation=reservation("b"))).granted

    await store.settle("tokens", 20, period=current(DAY_S), reservation=of)
    assert await used(store) == 20


async def test_what_a_dead_process_reserved_is_given_back_at_its_end(store: Store) -> None:
    await store.take("tokens", 10, limit=100, period=current(DAY_S))
    over = reservation(in_s=0.2)
    assert (await store.take("tokens", 70, limit=100, period=current(DAY_S), reservation=over)).used == 80

    async def is_given_back() -> bool:
        return await used(store) == 10

    await until(is_given_back)
    await store.settle("tokens", 30, period=current(DAY_S), reservation=over)  # it lives after all
    assert await used(store) == 40


async def test_what_was_reserved_in_an_earlier_period_is_not_given_back_to_the_next(store: Store) -> None:
    today, of = current(DAY_S), reservation()
    yesterday = Period(DAY_S, today.number - 1, today.ends_ms - 1000 * DAY_S)
    await store.take("tokens", 70, limit=100, period=yesterday, reservation=of)
    await store.take("tokens", 40, limit=100, period=today)
    await store.settle("tokens", 20, period=today, reservation=of)
    assert await used(store) == 60


async def test_a_request_that_comes_again_takes_the_place_of_what_was_reserved_for_it(store: Store) -> None:
    before, after = reservation(nonce="1"), reservation(nonce="2")
    await store.take("tokens", 70, limit=100, period=current(DAY_S), reservation=before)
    assert (await store.take("tokens", 80, limit=100, period=current(DAY_S), reservation=after)).used == 80

    await store.settle("tokens", 5, period=current(DAY_S), reservation=before)  # its first process has not died
    assert await used(store) == 85
    await store.settle("tokens", 10, period=current(DAY_S), reservation=after)
    assert await used(store) == 15


async def test_a_sweep_gives_back_what_nobody_looks_at(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        await store.take("tokens", 5, limit=100, period=current(DAY_S))
        await store.take("tokens", 70, limit=100, period=current(DAY_S), reservation=reservation(in_s=-1))
        assert await store.sweep() == 1
        rows = await store.transact(
            "look", lambda tables, _: [*tables.connection.execute("SELECT used FROM allowance")]
        )
    assert rows == [(5.0,)]


counts = st.one_of(
    st.tuples(st.just("take"), st.sampled_from("ab"), st.sampled_from("12"), st.integers(0, 60), st.booleans()),
    st.tuples(st.just("plain"), st.integers(0, 60)),
    st.tuples(st.just("settle"), st.sampled_from("ab"), st.sampled_from("12"), st.integers(0, 60)),
    st.tuples(st.just("give_back"), st.integers(-30, 60)),
)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(played=st.lists(counts, max_size=25))
def test_both_engines_count_the_same(redis: RedisServer, played: list[tuple[Any, ...]]) -> None:
    period = current(10 * 365 * DAY_S)

    async def play(store: Any) -> list[float]:
        found = []
        for name, *values in played:
            match name, values:
                case "take", [id, nonce, amount, is_over]:
                    of = reservation(id, nonce, in_s=-2e9 if is_over else 2e9)
                    taken = await store.take("tokens", amount, limit=100, period=period, reservation=of)
                case "plain", [amount]:
                    taken = await store.take("tokens", amount, limit=100, period=period)
                case "settle", [id, nonce, amount]:
                    await store.settle("tokens", amount, period=period, reservation=reservation(id, nonce))
                case _, [amount]:
                    await store.give_back("tokens", amount, period=period)
            found.append((taken := await store.take("tokens", 0, limit=100, period=period)).used)
            found.append(taken.granted)
        return found

    async def both() -> tuple[list[float], list[float]]:
        async with RedisStore(redis.url, namespace=f"same-{secrets.token_hex(6)}") as shared:
            return await play(MemoryStore()), await play(shared)

    embedded, shared = asyncio.run(both())
    assert embedded == shared


@pytest.mark.slow
async def test_a_new_period_begins_with_nothing_used(store: Store) -> None:
    await store.take("calls", 1, limit=1, period=current(1))

    async def granted() -> bool:
        return (await store.take("calls", 1, limit=1, period=current(1))).granted

    await until(granted)


async def test_allowances_of_different_names_or_periods_are_separate(store: Store) -> None:
    for name, length_s in (("a", DAY_S), ("b", DAY_S), ("a", 3600)):
        assert (await store.take(name, 1, limit=1, period=current(length_s))).granted


async def test_a_lease_has_one_owner_who_may_renew_it(store: Store) -> None:
    assert await store.hold("sweep", "a", for_s=60)

    assert not await store.hold("sweep", "b", for_s=60)
    assert await store.hold("sweep", "a", for_s=60)
    assert await store.hold("other", "b", for_s=60)


async def test_a_lease_can_be_released_by_its_owner_only(store: Store) -> None:
    assert await store.hold("sweep", "a", for_s=60)
    await store.let_go("sweep", "b")
    assert not await store.hold("sweep", "b", for_s=60)
    await store.let_go("sweep", "a")

    assert await store.hold("sweep", "b", for_s=60)
    assert not await store.hold("sweep", "a", for_s=60)


async def test_a_lease_that_is_not_renewed_ends(store: Store) -> None:
    await store.hold("sweep", "a", for_s=0.1)

    assert await until(lambda: store.hold("sweep", "b", for_s=60))


@pytest.mark.parametrize("name", ["", "ä:%", "x" * 500])
async def test_any_text_can_be_a_name(store: Store, name: str) -> None:
    assert (await store.take(name, 1, limit=1, period=current(DAY_S))).granted
    assert await store.hold(name, name, for_s=1)
