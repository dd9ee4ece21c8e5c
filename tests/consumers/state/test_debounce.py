"""Which request is the last update of a debounce key, for every engine."""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from consumers.state.base import Identity
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened, in_ms

Update = tuple[int, str]


async def told(
    store: Store, update: Update, *, key: str = "doc 'ü' 1", tenant: str = "crm:1", until_ms: int = 0
) -> bool:
    published_ms, id = update
    identity = Identity(tenant, id)
    return await store.debounce(identity, key, published_ms=published_ms, until_ms=until_ms or in_ms(60_000))


UPDATES: Sequence[Update] = [(1_790_000_000_000, "a"), (1_790_000_000_000, "b"), (1_790_000_000_001, "a.1")]


async def test_the_last_published_is_the_last_whatever_order_they_come_in(opened: Opened) -> None:
    here, there = await opened(), await opened()
    for earlier, later in pairwise(UPDATES):
        assert await told(here, earlier, key=f"{later} comes later")
        assert await told(there, later, key=f"{later} comes later")
        assert not await told(here, earlier, key=f"{later} comes later")
        assert await told(here, later, key=f"{later} comes first")
        assert not await told(there, earlier, key=f"{later} comes first")
        assert await told(there, later, key=f"{later} comes first")


async def test_a_request_never_supersedes_itself(store: Store) -> None:
    assert await told(store, (5, "same"))
    assert await told(store, (9, "same"))
    assert await told(store, (5, "same"))
    assert not await told(store, (8, "other"))


async def test_keys_and_tenants_are_apart(store: Store) -> None:
    assert await told(store, (9, "later"))
    assert await told(store, (5, "earlier"), key="another")
    assert await told(store, (5, "earlier"), tenant="")


async def test_an_update_is_known_until_the_latest_time_of_its_key(opened: Opened) -> None:
    here, there = await opened(), await opened()
    assert await told(here, (5, "kept for long"), until_ms=in_ms(60_000))
    assert await told(here, (6, "kept for a moment"), until_ms=in_ms(-1))
    assert not await told(there, (5, "kept for long"))

    assert await told(here, (9, "forgotten"), key="forgotten", until_ms=in_ms(1))
    await asyncio.sleep(0.05)  # until then it is known
    await here.sweep()
    assert await told(there, (5, "older"), key="forgotten")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_of_many_concurrent_updates_exactly_the_last_is_told_that_it_is(opened: Opened, seed: int) -> None:
    stores = [await opened() for _ in range(3)]
    updates = [(1_790_000_000_000 + at // 4, f"r-{at}") for at in range(100)]
    random.Random(seed).shuffle(updates)

    async def all_told() -> list[bool]:
        return await asyncio.gather(
            *(told(stores[at % 3], update, key=f"seed {seed}") for at, update in enumerate(updates))
        )

    await all_told()  # as they arrive
    assert [update for update, is_last in zip(updates, await all_told(), strict=True) if is_last] == [max(updates)]
