"""Allowances and leases, for every engine."""

import pytest

from consumers.state.base import Store
from tests.support.memory_store import current
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
