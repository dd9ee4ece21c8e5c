"""Cancelling: before it came, while it waits, while it runs, after it ended; its ending is never forgotten."""

from consumers.state.base import Cancelling, Conflict, Ended, Granted, Held, Stop, Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, copy, failed
from tests.support.waiting import until

CANCELLED_FIRST = Ended(completion=CANCELLED, same_copy=True)


async def claimed(store: Store) -> Held:
    found = await store.claim(ME, copy())
    assert isinstance(found, Granted), found
    return Held(ME, found.token)


async def test_what_nobody_has_seen_yet_ends_as_cancelled_when_it_comes(store: Store) -> None:
    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN

    assert await store.claim(ME, copy()) == CANCELLED_FIRST
    assert await store.complete(ME, copy(), failed("deadline_exceeded"), token=None) == CANCELLED


async def test_what_waits_for_its_next_attempt_ends_as_cancelled(store: Store) -> None:
    await store.release(await claimed(store), attempts=1)

    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    assert await store.claim(ME, copy()) == CANCELLED_FIRST
    assert await store.claim(ME, copy("other body")) == Conflict()


async def test_what_runs_is_told_and_ends_as_its_holder_says(store: Store) -> None:
    held = await claimed(store)

    assert await store.cancel(ME, CANCELLED) == Cancelling.TOLD
    assert await store.cancel(ME, failed("cancelled", ended_ms=9)) == Cancelling.TOLD
    assert await store.renew([held]) == {held: Stop.CANCELLED}
    assert await store.complete(ME, copy(), answered(), token=held.token) == answered()
    assert await store.cancel(ME, CANCELLED) == Cancelling.ENDED


async def test_while_it_is_told_it_still_runs(store: Store) -> None:
    await claimed(store)
    await store.cancel(ME, CANCELLED)

    found = await store.find(ME)
    assert found is not None
    assert (found.completion, found.running) == (None, True)


async def test_it_ends_as_cancelled_where_its_holder_dies_after_it_was_told(store: Store) -> None:
    zombie = await claimed(store)
    await store.cancel(ME, CANCELLED)

    assert await store.claim(ME, copy(redelivered=True)) == CANCELLED_FIRST
    assert await store.complete(ME, copy(), answered(), token=zombie.token) == CANCELLED


async def test_it_ends_as_cancelled_where_its_holder_would_try_again(store: Store) -> None:
    held = await claimed(store)
    await store.cancel(ME, CANCELLED)
    await store.release(held, attempts=1)

    found = await store.find(ME)
    assert found is not None
    assert found.completion == CANCELLED
    assert await store.claim(ME, copy()) == CANCELLED_FIRST


async def test_a_holder_that_was_away_for_too_long_learns_that_it_was_cancelled_not_fenced_off(opened: Opened) -> None:
    store = await opened(lease_s=0.1)
    held = await claimed(store)

    async def is_over() -> bool:
        found = await store.find(ME)
        return found is not None and not found.running

    await until(is_over)
    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    assert await store.renew([held]) == {held: Stop.CANCELLED}
    assert await store.complete(ME, copy(), answered(), token=held.token) == CANCELLED


async def test_what_has_ended_stays_as_it_is(store: Store) -> None:
    held = await claimed(store)
    await store.complete(ME, copy(), answered(), token=held.token)

    assert await store.cancel(ME, CANCELLED) == Cancelling.ENDED
    assert await store.claim(ME, copy()) == Ended(completion=answered(), same_copy=True)


async def test_a_noted_id_can_be_cancelled(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))

    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN
    assert await store.claim(ME, copy()) == CANCELLED_FIRST
