"""Cancelling a request before it arrives, while it waits, while it runs and after its end. Its ending is never
forgotten."""

from consumers.state.base import Cancelling, Conflict, Ended, Granted, Held, Stop, Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, copy, failed
from tests.support.waiting import until

CANCELLED_FIRST = Ended(completion=CANCELLED, same_copy=True)


async def claimed(store: Store) -> Held:
    found = await store.claim(ME, copy())
    assert isinstance(found, Granted), found
    return Held(ME, found.token)


async def test_a_request_cancelled_before_it_arrives_ends_as_cancelled(store: Store) -> None:
    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN

    assert await store.claim(ME, copy()) == CANCELLED_FIRST
    assert await store.complete(ME, copy(), failed("deadline_exceeded"), token=None) == CANCELLED


async def test_a_request_that_waits_for_its_next_attempt_ends_as_cancelled(store: Store) -> None:
    await store.release(await claimed(store), attempts=1)

    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    assert await store.claim(ME, copy()) == CANCELLED_FIRST
    assert await store.claim(ME, copy("other body")) == Conflict()


async def test_the_holder_of_a_running_request_learns_of_its_cancellation_and_ends_it(store: Store) -> None:
    held = await claimed(store)

    assert await store.cancel(ME, CANCELLED) == Cancelling.TOLD
    assert await store.cancel(ME, failed("cancelled", ended_ms=9)) == Cancelling.TOLD
    assert await store.renew([held]) == {held: Stop.CANCELLED}
    assert await store.complete(ME, copy(), answered(), token=held.token) == answered()
    assert await store.cancel(ME, CANCELLED) == Cancelling.ENDED


async def test_a_cancelled_request_counts_as_running_until_its_holder_ends_it(store: Store) -> None:
    await claimed(store)
    await store.cancel(ME, CANCELLED)

    found = await store.find(ME)
    assert found is not None
    assert (found.completion, found.running) == (None, True)


async def test_a_cancelled_request_ends_as_cancelled_if_its_holder_dies(store: Store) -> None:
    zombie = await claimed(store)
    await store.cancel(ME, CANCELLED)

    assert await store.claim(ME, copy(redelivered=True)) == CANCELLED_FIRST
    assert await store.complete(ME, copy(), answered(), token=zombie.token) == CANCELLED


async def test_a_cancelled_request_ends_as_cancelled_instead_of_a_retry(store: Store) -> None:
    held = await claimed(store)
    await store.cancel(ME, CANCELLED)
    await store.release(held, attempts=1)

    found = await store.find(ME)
    assert found is not None
    assert found.completion == CANCELLED
    assert await store.claim(ME, copy()) == CANCELLED_FIRST


async def test_a_holder_that_was_away_too_long_learns_of_the_cancellation_not_of_a_lost_claim(opened: Opened) -> None:
    store = await opened(lease_s=0.1)
    held = await claimed(store)

    async def is_over() -> bool:
        found = await store.find(ME)
        return found is not None and not found.running

    await until(is_over)
    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    assert await store.renew([held]) == {held: Stop.CANCELLED}
    assert await store.complete(ME, copy(), answered(), token=held.token) == CANCELLED


async def test_cancelling_changes_nothing_after_the_end(store: Store) -> None:
    held = await claimed(store)
    await store.complete(ME, copy(), answered(), token=held.token)

    assert await store.cancel(ME, CANCELLED) == Cancelling.ENDED
    assert await store.claim(ME, copy()) == Ended(completion=answered(), same_copy=True)


async def test_a_request_whose_ending_was_only_noted_can_be_cancelled(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))

    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN
    assert await store.claim(ME, copy()) == CANCELLED_FIRST
