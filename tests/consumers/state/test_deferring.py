"""A note that a request waits: it can be queried, prevents nothing, and is forgotten soon after the due time."""

import time

from consumers.state.base import Cancelling, Ended, Found, Granted, Held, Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, failed, fingerprint
from tests.support.waiting import until

DUE_MS = 1_790_000_060_000


def in_ms(left_ms: int) -> int:
    return time.time_ns() // 1_000_000 + left_ms


async def deferred(store: Store) -> None:
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(60_000))


async def test_a_deferred_request_waits_until_its_due_time(store: Store) -> None:
    await deferred(store)

    assert await store.find(ME) == Found(completion=None, running=False, due_ms=DUE_MS)


async def test_a_deferred_request_is_claimed_like_any_other(store: Store) -> None:
    await deferred(store)

    found = await store.claim(ME, fingerprint())
    assert isinstance(found, Granted)
    assert found.deaths == 0
    assert await store.find(ME) == Found(completion=None, running=True)


async def test_a_request_between_two_attempts_waits_until_the_next(store: Store) -> None:
    found = await store.claim(ME, fingerprint())
    assert isinstance(found, Granted)
    await store.release(Held(ME, found.token), attempts=2, due_ms=DUE_MS)

    assert await store.find(ME) == Found(completion=None, running=False, attempts=2, due_ms=DUE_MS)


async def test_deferring_does_not_change_a_claimed_request(store: Store) -> None:
    found = await store.claim(ME, fingerprint())
    assert isinstance(found, Granted)
    await deferred(store)

    assert await store.find(ME) == Found(completion=None, running=True)
    assert await store.complete(ME, fingerprint(), answered(), token=found.token) == answered()


async def test_deferring_does_not_change_a_request_that_has_ended(store: Store) -> None:
    await store.complete(ME, fingerprint(), answered(), token=None)
    await deferred(store)

    assert await store.find(ME) == Found(completion=answered(), running=False)


async def test_a_deferred_request_can_be_cancelled(store: Store) -> None:
    await deferred(store)

    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    await deferred(store)
    assert await store.claim(ME, fingerprint()) == Ended(completion=CANCELLED, is_same_message=True)


async def test_an_invalid_request_with_the_same_id_does_not_hide_a_deferred_one(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))
    await deferred(store)
    await store.note(ME, failed("invalid_request"))

    assert await store.find(ME) == Found(completion=None, running=False, due_ms=DUE_MS)


async def test_a_deferred_request_whose_deadline_passes_before_a_claim_ends(store: Store) -> None:
    await deferred(store)
    late = failed("deadline_exceeded")

    assert await store.complete(ME, fingerprint(), late, token=None) == late


async def test_a_deferred_request_is_forgotten_after_its_keeping_time(opened: Opened) -> None:
    store = await opened()
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(200))
    assert await store.find(ME) is not None

    async def is_forgotten() -> bool:
        return await store.find(ME) is None

    await until(is_forgotten)
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(-1))
    assert await store.find(ME) is None
