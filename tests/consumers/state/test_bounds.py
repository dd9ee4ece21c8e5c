"""How much the store keeps for one tenant, and what it removes when it is full."""

import asyncio
import secrets

import pytest

from consumers.state.base import Cancelling, Completion, Ended, Granted, Held, Identity, Running, WaitingLimit
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened, in_ms
from tests.support.completions import CANCELLED, ME, answered, fingerprint
from tests.support.waiting import until

OTHER = "other tenant"


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


async def kept(store: Store, tenant: str, *ids: str) -> list[str]:
    """Those of these ids that the store knows."""
    left: list[str] = []
    for begin in range(0, len(ids), TOGETHER):
        some = ids[begin : begin + TOGETHER]
        found = await asyncio.gather(*(store.find(Identity(tenant, id)) for id in some))
        left += [id for id, each in zip(some, found, strict=True) if each is not None]
    return left


async def ended(store: Store, tenant: str, *ids: str, ending: Completion) -> None:
    for id in ids:
        await store.complete(Identity(tenant, id), fingerprint(), ending, token=None)


async def swept(store: Store) -> None:
    while await store.sweep():
        pass


def numbered(count: int) -> list[str]:
    return [str(n) for n in range(count)]


async def released(store: Store, id: str) -> None:
    claim = await store.claim(identity := Identity("flood", id), fingerprint())
    assert isinstance(claim, Granted)
    await store.release(Held(identity, claim.token), attempts=1, due_ms=in_ms(1000))


FULL_BYTES = 300_000
COUNT = 1900
"""So many released requests are by more rows above `FULL_BYTES` than one step removes."""
TOGETHER = 100


async def test_what_worked_on_and_counted_is_stays_in_a_full_store(opened: Opened) -> None:
    store = await opened(max_bytes=FULL_BYTES, waiting_per_tenant=1)
    assert isinstance(await store.claim(ME, fingerprint()), Granted)
    assert await reserved(store, "flood", "x") == WaitingLimit.WITHIN
    await ended(store, ME.tenant, *numbered(60), ending=answered("x" * 8_000))
    await swept(store)

    assert isinstance(await store.claim(ME, fingerprint()), Running)
    assert await reserved(store, "flood", "y") == WaitingLimit.TENANT


@pytest.mark.slow
async def test_a_row_that_has_changed_since_it_was_chosen_is_not_removed(opened: Opened) -> None:
    store = await opened(max_bytes=FULL_BYTES, lease_s=600)
    for begin in range(0, COUNT, TOGETHER):
        await asyncio.gather(*(released(store, str(n)) for n in range(begin, begin + TOGETHER)))
    assert await store.sweep() > 0  # the others wait for the next steps
    left = await kept(store, "flood", *numbered(COUNT))
    for begin in range(0, len(left), TOGETHER):
        some = left[begin : begin + TOGETHER]
        await asyncio.gather(*(store.claim(Identity("flood", id), fingerprint()) for id in some))
    await swept(store)

    assert await kept(store, "flood", *left) == left


@pytest.mark.slow
async def test_a_cancelled_wait_is_kept_no_longer_than_its_message_or_a_result(opened: Opened) -> None:
    store = await opened(keep_s=1)
    await store.defer(ME, due_ms=in_ms(500), keep_until_ms=in_ms(1000))
    await store.cancel(ME, CANCELLED)

    async def is_forgotten() -> bool:
        return await store.find(ME) is None

    await until(is_forgotten)


async def reserved(
    store: Store, tenant: str, mark: str, *, weight: int = 1, left_ms: int = 60_000, redelivered: bool = False
) -> WaitingLimit:
    message = fingerprint(mark=mark, nonce=secrets.token_bytes(8), redelivered=redelivered)
    return await store.reserve(Identity(tenant, "id"), message, weight=weight, until_ms=in_ms(left_ms))


async def test_waiting_requests_are_limited_for_one_tenant_and_in_total(opened: Opened) -> None:
    store = await opened(waiting_per_tenant=3, waiting_in_all=4)
    assert [await reserved(store, "a", mark) for mark in "xyz"] == [WaitingLimit.WITHIN] * 3
    assert await reserved(store, "a", "more") == WaitingLimit.TENANT
    assert await reserved(store, "b", "large", weight=2) == WaitingLimit.TOTAL
    assert [await reserved(store, "b", mark) for mark in "xy"] == [WaitingLimit.WITHIN, WaitingLimit.TOTAL]


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
