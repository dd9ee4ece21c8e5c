"""Results: what is known of a request, for how long, and how much is kept."""

import asyncio
from pathlib import Path

import pytest

from consumers.state.base import Found, Granted, Identity, Running, Store
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.store import SqliteStore
from tests.consumers.state.conftest import Opened
from tests.support.completions import ME, answered, fingerprint
from tests.support.waiting import until

KB = 1024


async def end(store: Store, identity: Identity, text: str = "answer") -> None:
    found = await store.claim(identity, fingerprint())
    assert isinstance(found, Granted), found
    assert await store.complete(identity, fingerprint(), answered(text), token=found.token) is not None


async def test_a_request_is_unknown_then_running_then_ended(store: Store) -> None:
    assert await store.find(ME) is None
    await store.claim(ME, fingerprint())
    assert await store.find(ME) == Found(completion=None, running=True, attempts=0)
    await store.complete(ME, fingerprint(redelivered=True), answered(), token=None)
    assert await store.find(ME) == Found(completion=answered(), running=False, attempts=0)


@pytest.mark.slow
async def test_after_its_keeping_time_a_result_is_forgotten_and_its_id_can_be_used_again(opened: Opened) -> None:
    store = await opened(keep_s=2)
    await end(store, ME)
    assert await store.find(ME) is not None

    async def is_forgotten() -> bool:
        return await store.find(ME) is None

    await until(is_forgotten)
    assert isinstance(await store.claim(ME, fingerprint("other body")), Granted)


async def test_a_claim_is_kept_while_it_is_held(opened: Opened) -> None:
    store = await opened(keep_s=0.05)
    await store.claim(ME, fingerprint())
    await end(store, other := Identity("", "other"))

    async def is_forgotten() -> bool:
        await store.sweep()
        return await store.find(other) is None

    await until(is_forgotten)
    assert isinstance(await store.claim(ME, fingerprint()), Running)


async def test_a_sweep_removes_expired_results_in_steps(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=StoreSpec(keep_s=0)) as store:
        await asyncio.gather(*(store.note(Identity("", str(each)), answered()) for each in range(450)))

        assert [await store.sweep() for _ in range(4)] == [200, 200, 50, 0]


async def test_beyond_the_size_limit_the_results_that_ended_first_are_removed(tmp_path: Path) -> None:
    spec = StoreSpec(max_bytes=1024 * KB)
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=spec) as store:
        await store.claim(Identity("", "running"), fingerprint())
        every = [Identity("", str(each)) for each in range(300)]
        for few in range(0, 300, 50):
            await asyncio.gather(*(end(store, each, "x" * 10 * KB) for each in every[few : few + 50]))
        removed = 0
        while step := await store.sweep():
            removed += step
        found = await asyncio.gather(*(store.find(each) for each in every))
        kept = [each for each in range(300) if found[each] is not None]

        assert len(kept) == 300 - removed
        assert kept[-50:] == list(range(250, 300))
        assert 20 < len(kept) < 105
        assert isinstance(await store.claim(Identity("", "running"), fingerprint()), Running)


async def test_a_sweep_of_an_empty_store_removes_nothing(store: Store) -> None:
    assert await store.sweep() == 0
