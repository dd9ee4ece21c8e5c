"""How much the store keeps for one tenant before a worker has seen it: cancellations of unseen ids, waiting
requests."""

import time
from pathlib import Path

import pytest

from consumers.state.base import Cancelling, Completion, Ended, Granted, Identity, Store, WaitingLimit
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.store import SqliteStore
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, failed, fingerprint, untried
from tests.support.waiting import until

OTHER = "other tenant"


def in_ms(left_ms: int) -> int:
    return time.time_ns() // 1_000_000 + left_ms


async def cancelled(store: Store, *ids: str, tenant: str = ME.tenant) -> list[Cancelling]:
    return [await store.cancel(Identity(tenant, id), CANCELLED) for id in ids]


async def is_cancelled(store: Store, id: str, tenant: str = ME.tenant) -> bool:
    found = await store.claim(Identity(tenant, id), fingerprint())
    return isinstance(found, Ended) and found.completion == CANCELLED


async def test_beyond_the_limit_a_tenants_oldest_unseen_cancellation_is_forgotten_and_no_other_tenants(
    opened: Opened,
) -> None:
    store = await opened(unseen_per_tenant=2)
    assert await cancelled(store, "theirs", tenant=OTHER) == [Cancelling.UNSEEN]
    assert await cancelled(store, "a", "b") == [Cancelling.UNSEEN] * 2
    assert await cancelled(store, "c", "c") == [Cancelling.DISPLACED, Cancelling.ENDED]

    assert isinstance(await store.claim(Identity(ME.tenant, "a"), fingerprint()), Granted)
    assert [await is_cancelled(store, id) for id in "bc"] == [True, True]
    assert await is_cancelled(store, "theirs", OTHER)


async def test_cancellations_of_seen_requests_do_not_count_as_unseen(opened: Opened) -> None:
    store = await opened(unseen_per_tenant=1)
    await store.defer(ME, due_ms=in_ms(60_000), keep_until_ms=in_ms(120_000))
    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    await cancelled(store, "a", "b")

    assert await is_cancelled(store, ME.id)


@pytest.mark.slow
async def test_an_unseen_cancellation_is_kept_no_longer_than_its_request_can_wait(opened: Opened) -> None:
    store = await opened(cancelled_s=2, keep_s=60)
    await cancelled(store, "a")
    assert await store.find(Identity(ME.tenant, "a")) is not None

    async def is_forgotten() -> bool:
        return await store.find(Identity(ME.tenant, "a")) is None

    await until(is_forgotten)
    while await store.sweep():
        pass
    assert await cancelled(store, "a") == [Cancelling.UNSEEN]


async def test_the_cancellation_of_a_delayed_request_is_kept_until_after_its_due_time(opened: Opened) -> None:
    store = await opened(cancelled_s=0.05, keep_s=0.05)
    await store.defer(ME, due_ms=in_ms(60_000), keep_until_ms=in_ms(60_000))
    await store.cancel(ME, CANCELLED)
    await store.note(later := Identity("tenant", "later"), answered())

    async def is_forgotten() -> bool:
        return await store.find(later) is None

    await until(is_forgotten)
    while await store.sweep():
        pass
    assert await is_cancelled(store, ME.id)


async def test_a_request_cancelled_before_it_came_is_not_deferred(store: Store) -> None:
    await cancelled(store, ME.id)

    assert not await store.defer(ME, due_ms=in_ms(60_000), keep_until_ms=in_ms(120_000))
    assert await store.defer(Identity("", "another"), due_ms=in_ms(60_000), keep_until_ms=in_ms(120_000))


@pytest.mark.slow
async def test_unseen_cancellations_evict_no_result(tmp_path: Path) -> None:
    spec = StoreSpec(max_bytes=200_000, unseen_per_tenant=1000)
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=spec) as store:
        for n in range(10):
            await store.complete(Identity("bank", str(n)), fingerprint(), answered("x" * 10_000), token=None)
        await cancelled(store, *(str(n) for n in range(1500)))
        while await store.sweep():
            pass
        assert [n for n in range(10) if await store.find(Identity("bank", str(n))) is None] == []
        assert not await is_cancelled(store, "0")
        assert await is_cancelled(store, "1499")


async def kept(store: Store, tenant: str, *ids: str) -> list[str]:
    return [id for id in ids if await store.find(Identity(tenant, id)) is not None]


async def ended(store: Store, tenant: str, *ids: str, ending: Completion) -> None:
    for id in ids:
        await store.complete(Identity(tenant, id), fingerprint(), ending, token=None)


async def swept(store: Store) -> None:
    while await store.sweep():
        pass


def numbered(count: int) -> list[str]:
    return [str(n) for n in range(count)]


@pytest.mark.slow
async def test_in_a_full_store_a_floods_endings_without_an_attempt_are_removed_first(tmp_path: Path) -> None:
    spec = StoreSpec(max_bytes=300_000, untried_per_tenant=50)
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=spec) as store:
        await ended(store, "bank", *numbered(10), ending=answered("x" * 10_000))
        await ended(store, "shop", "late", ending=untried())
        await ended(store, "flood", *numbered(1500), ending=untried())
        await swept(store)

        assert await kept(store, "bank", *numbered(10)) == numbered(10)
        assert await kept(store, "shop", "late") == ["late"]
        left = await kept(store, "flood", *numbered(1500))
        assert len(left) >= 50
        assert left == numbered(1500)[-len(left) :], "its own oldest went first"


async def test_while_there_is_room_an_ending_without_an_attempt_is_kept_like_others(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=StoreSpec(untried_per_tenant=2)) as store:
        await ended(store, "flood", *numbered(10), ending=untried())
        await swept(store)
        assert await kept(store, "flood", *numbered(10)) == numbered(10)


@pytest.mark.slow
async def test_endings_after_an_attempt_and_rerun_requests_are_not_removed_as_surplus(tmp_path: Path) -> None:
    spec = StoreSpec(max_bytes=100_000, untried_per_tenant=1)
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=spec) as store:
        await ended(store, ME.tenant, "answered", ending=answered())
        await ended(store, ME.tenant, "failed", ending=failed())
        granted = await store.claim(Identity(ME.tenant, "claimed"), fingerprint())
        assert isinstance(granted, Granted)
        await store.complete(
            Identity(ME.tenant, "claimed"), fingerprint(), untried("cap_exceeded"), token=granted.token
        )
        await ended(store, ME.tenant, "again", ending=untried())
        again = await store.claim(Identity(ME.tenant, "again"), fingerprint(dead_at_ms=1_000))
        assert isinstance(again, Granted)
        await ended(store, ME.tenant, *numbered(500), ending=untried())
        await swept(store)

        assert await kept(store, ME.tenant, "answered", "failed", "claimed", "again") == ["answered", "failed", "again"]


async def reserved(
    store: Store, tenant: str, mark: str, *, weight: int = 1, left_ms: int = 60_000, redelivered: bool = False
) -> WaitingLimit:
    message = fingerprint(mark=mark, nonce=mark.encode()[-8:], redelivered=redelivered)
    return await store.reserve(Identity(tenant, "id"), message, weight=weight, until_ms=in_ms(left_ms))


async def test_waiting_requests_are_limited_for_one_tenant_and_in_total(opened: Opened) -> None:
    store = await opened(waiting_per_tenant=3, waiting_in_all=4)
    assert [await reserved(store, "a", mark) for mark in "xyz"] == [WaitingLimit.WITHIN] * 3
    assert await reserved(store, "a", "more") == WaitingLimit.TENANT
    assert await reserved(store, "b", "large", weight=2) == WaitingLimit.TOTAL
    assert [await reserved(store, "b", mark) for mark in "xy"] == [WaitingLimit.WITHIN, WaitingLimit.TOTAL]


async def test_a_large_waiting_request_counts_as_several(opened: Opened) -> None:
    store = await opened(waiting_per_tenant=10)
    assert await reserved(store, "a", "x", weight=8) == WaitingLimit.WITHIN
    assert await reserved(store, "a", "y", weight=3) == WaitingLimit.TENANT
    assert await reserved(store, "a", "z", weight=2) == WaitingLimit.WITHIN


async def test_a_redelivered_waiting_request_is_counted_once_and_each_copy_separately(opened: Opened) -> None:
    store = await opened(waiting_per_tenant=2)
    assert await reserved(store, "a", "x") == WaitingLimit.WITHIN
    assert [await reserved(store, "a", "x", redelivered=True) for _ in range(3)] == [WaitingLimit.WITHIN] * 3
    assert [await reserved(store, "a", "x"), await reserved(store, "a", "y")] == [
        WaitingLimit.WITHIN,
        WaitingLimit.TENANT,
    ]


@pytest.mark.slow
async def test_a_waiting_request_no_longer_counts_after_its_due_time(opened: Opened) -> None:
    store = await opened(waiting_per_tenant=1, waiting_in_all=1)
    assert await reserved(store, "a", "x", left_ms=200) == WaitingLimit.WITHIN

    async def has_room() -> bool:
        return await reserved(store, "b", "y") == WaitingLimit.WITHIN

    await until(has_room)
    assert await reserved(store, "a", "x") == WaitingLimit.TOTAL


async def test_the_first_waiting_request_of_a_tenant_may_use_its_whole_limit(opened: Opened) -> None:
    store = await opened(waiting_per_tenant=10, waiting_in_all=10)
    assert await reserved(store, "a", "x", weight=10) == WaitingLimit.WITHIN
    assert await reserved(store, "b", "y", weight=1) == WaitingLimit.TOTAL
