"""Cancelling a request before it arrives, while it waits, while it runs and after its end. Its ending is never
forgotten."""

import pytest

from consumers.state.base import Cancelling, Completion, Conflict, Ended, Granted, Held, Stop, Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, failed, fingerprint
from tests.support.waiting import until

CANCELLED_FIRST = Ended(completion=CANCELLED, is_same_message=True)


async def _ending(store: Store, mark: str) -> tuple[Completion, bytes | None]:
    found = await store.claim(ME, fingerprint(mark=mark))
    assert isinstance(found, Ended)
    return found.completion, found.completion.mark


async def claimed(store: Store) -> Held:
    found = await store.claim(ME, fingerprint())
    assert isinstance(found, Granted), found
    return Held(ME, found.token)


async def test_a_request_cancelled_before_it_arrives_ends_as_cancelled(store: Store) -> None:
    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN

    assert await store.claim(ME, fingerprint()) == CANCELLED_FIRST
    assert await store.complete(ME, fingerprint(), failed("deadline_exceeded"), token=None) == CANCELLED


@pytest.mark.parametrize("first", ["claim", "complete"])
async def test_the_first_copy_of_a_request_that_was_cancelled_before_leaves_its_mark(store: Store, first: str) -> None:
    await store.cancel(ME, CANCELLED)

    if first == "claim":
        assert await _ending(store, "first") == (CANCELLED, None)
    else:
        held = await store.complete(ME, fingerprint(mark="first"), failed("deadline_exceeded"), token=None)
        assert (held, held and held.mark) == (CANCELLED, None)
    for mark in ("first", "second"):
        assert await _ending(store, mark) == (CANCELLED, fingerprint(mark="first").mark)


async def test_a_request_that_was_cancelled_while_it_waited_keeps_the_mark_of_its_copy(store: Store) -> None:
    await store.release(await claimed(store), attempts=1)
    await store.cancel(ME, CANCELLED)

    assert await _ending(store, "second") == (CANCELLED, fingerprint().mark)


async def test_a_request_that_waits_for_its_next_attempt_ends_as_cancelled(store: Store) -> None:
    await store.release(await claimed(store), attempts=1)

    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    assert await store.claim(ME, fingerprint()) == CANCELLED_FIRST
    assert await store.claim(ME, fingerprint("other body")) == Conflict()


async def test_the_holder_of_a_running_request_learns_of_its_cancellation_and_ends_it(store: Store) -> None:
    held = await claimed(store)

    assert await store.cancel(ME, CANCELLED) == Cancelling.TOLD
    assert await store.cancel(ME, failed("cancelled", ended_ms=9)) == Cancelling.TOLD
    assert await store.renew([held]) == {held: Stop.CANCELLED}
    assert await store.complete(ME, fingerprint(), answered(), token=held.token) == answered()
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

    assert await store.claim(ME, fingerprint(redelivered=True)) == CANCELLED_FIRST
    assert await store.complete(ME, fingerprint(), answered(), token=zombie.token) == CANCELLED


async def test_a_cancelled_request_ends_as_cancelled_instead_of_a_retry(store: Store) -> None:
    held = await claimed(store)
    await store.cancel(ME, CANCELLED)
    await store.release(held, attempts=1)

    found = await store.find(ME)
    assert found is not None
    assert found.completion == CANCELLED
    assert await store.claim(ME, fingerprint()) == CANCELLED_FIRST


async def test_a_holder_that_was_away_too_long_learns_of_the_cancellation_not_of_a_lost_claim(opened: Opened) -> None:
    store = await opened(lease_s=0.1)
    held = await claimed(store)

    async def is_over() -> bool:
        found = await store.find(ME)
        return found is not None and not found.running

    await until(is_over)
    assert await store.cancel(ME, CANCELLED) == Cancelling.RECORDED
    assert await store.renew([held]) == {held: Stop.CANCELLED}
    assert await store.complete(ME, fingerprint(), answered(), token=held.token) == CANCELLED


async def test_cancelling_changes_nothing_after_the_end(store: Store) -> None:
    held = await claimed(store)
    await store.complete(ME, fingerprint(), answered(), token=held.token)

    assert await store.cancel(ME, CANCELLED) == Cancelling.ENDED
    assert await store.claim(ME, fingerprint()) == Ended(completion=answered(), is_same_message=True)


async def test_a_request_whose_ending_was_only_noted_can_be_cancelled(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))

    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN
    assert await store.claim(ME, fingerprint()) == CANCELLED_FIRST
