"""That a request waits can be asked for, decides nothing, and is forgotten soon after."""

import time

from consumers.state.base import Cancelling, Ended, Found, Granted, Held, Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, copy, failed
from tests.support.waiting import until

DUE_MS = 1_790_000_060_000


def in_ms(left_ms: int) -> int:
    return time.time_ns() // 1_000_000 + left_ms


async def deferred(store: Store) -> None:
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(60_000))


async def test_it_waits_until_its_due_time(store: Store) -> None:
    await deferred(store)

    assert await store.find(ME) == Found(completion=None, running=False, due_ms=DUE_MS)


async def test_it_is_claimed_as_if_nothing_had_been_kept(store: Store) -> None:
    await deferred(store)

    found = await store.claim(ME, copy())
    assert isinstance(found, Granted)
    assert found.deaths == 0
    assert await store.find(ME) == Found(completion=None, running=True)


async def test_between_two_attempts_it_waits_until_the_next(store: Store) -> None:
    found = await store.claim(ME, copy())
    assert isinstance(found, Granted)
    await store.release(Held(ME, found.token), attempts=2, due_ms=DUE_MS)

    assert await store.find(ME) == Found(completion=None, running=False, attempts=2, due_ms=DUE_MS)


async def test_what_is_claimed_stays_claimed(store: Store) -> None:
    found = await store.claim(ME, copy())
    assert isinstance(found, Granted)
    await deferred(store)

    assert await store.find(ME) == Found(completion=None, running=True)
    assert await store.complete(ME, copy(), answered(), token=found.token) == answered()


async def test_what_has_ended_stays_as_it_ended(store: Store) -> None:
    await store.complete(ME, copy(), answered(), token=None)
    await deferred(store)

    assert await store.find(ME) == Found(completion=answered(), running=False)


async def test_it_can_be_cancelled_and_stays_so(store: Store) -> None:
    await deferred(store)

    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    await deferred(store)
    assert await store.claim(ME, copy()) == Ended(completion=CANCELLED, same_copy=True)


async def test_a_bad_request_with_its_id_does_not_hide_it(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))
    await deferred(store)
    await store.note(ME, failed("invalid_request"))

    assert await store.find(ME) == Found(completion=None, running=False, due_ms=DUE_MS)


async def test_it_ends_where_its_time_is_over_before_anybody_claims_it(store: Store) -> None:
    await deferred(store)
    late = failed("deadline_exceeded")

    assert await store.complete(ME, copy(), late, token=None) == late


async def test_it_is_forgotten_when_it_has_been_kept_long_enough(opened: Opened) -> None:
    store = await opened()
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(200))
    assert await store.find(ME) is not None

    async def is_forgotten() -> bool:
        return await store.find(ME) is None

    await until(is_forgotten)
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(-1))
    assert await store.find(ME) is None
