"""Claims: one live holder and one completion, for every engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from consumers.state.base import (
    Cancelling,
    Completion,
    Conflict,
    Ended,
    Found,
    Granted,
    Held,
    Identity,
    Running,
    Stop,
    StoreUnavailable,
)
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened, in_ms
from tests.support.completions import CANCELLED, ME, answered, failed, fingerprint
from tests.support.waiting import until

SHORT = 0.2
RENEWED = 3.0


async def granted(store: Store, **of_copy: Any) -> int:
    found = await store.claim(ME, fingerprint(**of_copy))
    assert isinstance(found, Granted), found
    return found.token


async def test_one_of_fifty_claims_through_two_stores_wins(opened: Opened) -> None:
    stores = [await opened(), await opened()]
    found = await asyncio.gather(*(stores[each % 2].claim(ME, fingerprint(mark=str(each))) for each in range(50)))

    assert sum(isinstance(each, Granted) for each in found) == 1


async def test_a_redelivered_copy_takes_over_its_claim_at_once_with_a_higher_token(store: Store) -> None:
    first = await granted(store)

    assert await granted(store, redelivered=True) > first


async def test_a_redelivered_copy_of_another_publish_waits(store: Store) -> None:
    await granted(store)

    assert isinstance(await store.claim(ME, fingerprint(mark="other", redelivered=True)), Running)


async def test_a_redelivered_request_does_not_take_the_claim_over_from_its_copy_in_a_side_queue(store: Store) -> None:
    """Its acknowledgement was lost after it was set aside, and the copy runs: a takeover would call the model twice."""
    await granted(store, nonce=b"s1")

    assert isinstance(await store.claim(ME, fingerprint(redelivered=True, nonce=b"q1")), Running)
    assert await store.complete(ME, fingerprint(redelivered=True, nonce=b"q2"), failed("poison"), token=None) is None
    assert isinstance(await store.claim(ME, fingerprint(redelivered=True, nonce=b"s2")), Granted), "the copy itself may"


async def test_another_body_under_the_same_id_is_a_conflict(store: Store) -> None:
    token = await granted(store)
    assert await store.claim(ME, fingerprint("other body", redelivered=True)) == Conflict()

    await store.complete(ME, fingerprint(), answered(), token=token)
    assert await store.claim(ME, fingerprint("other body")) == Conflict()


async def test_a_claim_that_is_not_renewed_can_be_taken_by_others(opened: Opened) -> None:
    store = await opened(lease_s=SHORT)
    first = await granted(store)

    async def taken() -> int | None:
        found = await store.claim(ME, fingerprint(mark="other"))
        return found.token if isinstance(found, Granted) else None

    assert await until(taken) > first


@pytest.mark.slow
async def test_a_claim_that_is_renewed_is_kept(opened: Opened) -> None:
    """Renewed far more often than needed: a busy machine may hold the test up for a second."""
    store = await opened(lease_s=RENEWED)
    held = Held(ME, await granted(store))
    end = asyncio.get_running_loop().time() + 1.2 * RENEWED
    while asyncio.get_running_loop().time() < end:
        assert await store.renew([held]) == {}
        assert isinstance(await store.claim(ME, fingerprint(mark="other")), Running)
        await asyncio.sleep(RENEWED / 20)


async def test_a_renewal_reports_lost_claims_and_cancellations(store: Store) -> None:
    others = [Identity("tenant", f"id-{each}") for each in (2, 3)]
    tokens = [await granted(store)]
    for each in others:
        found = await store.claim(each, fingerprint())
        assert isinstance(found, Granted)
        tokens.append(found.token)
    fenced, cancelled, well = (Held(*each) for each in zip([ME, *others], tokens, strict=True))
    await store.claim(ME, fingerprint(redelivered=True))
    await store.cancel(cancelled.identity, CANCELLED)

    assert await store.renew([fenced, cancelled, well]) == {fenced: Stop.FENCED, cancelled: Stop.CANCELLED}
    assert await store.renew([]) == {}


async def test_a_holder_may_complete_a_claim_that_the_store_has_lost(store: Store) -> None:
    held = Held(ME, 7)

    assert await store.renew([held]) == {}
    await store.release(held)
    assert await store.complete(ME, fingerprint(), answered(), token=7) == answered()
    assert await store.complete(ME, fingerprint(), answered("later"), token=7) == answered()


async def test_the_first_completion_is_kept(store: Store) -> None:
    token = await granted(store)

    assert await store.complete(ME, fingerprint(), answered("first"), token=token) == answered("first")
    assert await store.complete(ME, fingerprint(), answered("second"), token=token) == answered("first")
    assert await store.claim(ME, fingerprint()) == Ended(completion=answered("first"), is_same_message=True)


async def test_the_completion_of_a_holder_that_lost_its_claim_is_refused(store: Store) -> None:
    zombie = await granted(store)
    token = await granted(store, redelivered=True)

    assert await store.complete(ME, fingerprint(), answered("zombie"), token=zombie) is None
    assert await store.complete(ME, fingerprint(), answered("ours"), token=token) == answered("ours")
    assert await store.complete(ME, fingerprint(), answered("zombie"), token=zombie) == answered("ours")


async def test_a_request_without_a_holder_can_be_completed_without_a_claim(store: Store) -> None:
    assert await store.complete(ME, fingerprint(), failed("deadline_exceeded"), token=None) == failed(
        "deadline_exceeded"
    )
    assert await store.complete(ME, fingerprint(), failed("poison"), token=None) == failed("deadline_exceeded")


async def test_a_request_with_another_holder_cannot_be_completed_without_a_claim(store: Store) -> None:
    token = await granted(store)

    assert await store.complete(ME, fingerprint(mark="other"), failed("deadline_exceeded"), token=None) is None
    assert await store.complete(ME, fingerprint(), answered(), token=token) == answered()


async def test_a_redelivered_copy_may_complete_without_a_claim_and_the_old_holder_loses_its_claim(store: Store) -> None:
    zombie = await granted(store)

    assert await store.complete(ME, fingerprint(redelivered=True), failed("poison"), token=None) == failed("poison")
    assert await store.complete(ME, fingerprint(), answered(), token=zombie) == failed("poison")
    assert await store.renew([Held(ME, zombie)]) == {Held(ME, zombie): Stop.FENCED}


async def test_an_ending_for_another_body_with_the_same_id_does_not_affect_the_request(store: Store) -> None:
    token = await granted(store)
    other = fingerprint("other body", mark="other")

    assert await store.complete(ME, other, failed("deadline_exceeded"), token=None) == failed("deadline_exceeded")
    assert await store.complete(ME, fingerprint(), answered(), token=token) == answered()
    assert await store.complete(ME, other, failed("deadline_exceeded"), token=None) == failed("deadline_exceeded")


async def test_a_dead_letter_can_run_again_once_for_each_of_its_endings(store: Store) -> None:
    token = await granted(store)
    await store.complete(ME, fingerprint(), failed(ended_ms=100), token=token)
    replayed: dict[str, Any] = {"body": "edited", "mark": "replay", "dead_at_ms": 100}

    again = await granted(store, **replayed)
    assert again > token
    assert isinstance(await store.claim(ME, fingerprint("edited", "second replay", dead_at_ms=100)), Running)
    await store.complete(ME, fingerprint(**replayed), failed(ended_ms=200), token=again)

    assert isinstance(await store.claim(ME, fingerprint(**replayed)), Ended)
    assert await granted(store, body="edited twice", dead_at_ms=200) > again


async def test_an_answered_request_does_not_run_again_as_a_dead_letter(store: Store) -> None:
    token = await granted(store)
    await store.complete(ME, fingerprint(), answered(ended_ms=100), token=token)

    assert isinstance(await store.claim(ME, fingerprint(dead_at_ms=100)), Ended)


async def test_a_rerun_dead_letter_that_expires_before_its_claim_has_a_new_ending(store: Store) -> None:
    token = await granted(store)
    await store.complete(ME, fingerprint(), failed(ended_ms=100), token=token)
    expired = failed("deadline_exceeded", ended_ms=200)

    assert await store.complete(ME, fingerprint(mark="replay", dead_at_ms=100), expired, token=None) == expired


async def test_a_noted_ending_is_found_and_prevents_nothing(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))
    await store.note(ME, failed("too_large"))
    found = await store.find(ME)
    assert found is not None
    assert found.completion == failed("too_large")

    token = await granted(store, body="a better one")
    await store.note(ME, failed("invalid_request"))
    assert await store.complete(ME, fingerprint("a better one"), answered(), token=token) == answered()
    await store.note(ME, failed("invalid_request"))
    found = await store.find(ME)
    assert found is not None
    assert found.completion == answered()


@pytest.mark.parametrize("size", [0, 1_000, 3_000_000])
async def test_answers_of_any_size_are_kept(store: Store, size: int) -> None:
    token = await granted(store)
    await store.complete(ME, fingerprint(), answered("x" * size), token=token)

    found = await store.find(ME)

    assert found is not None
    assert found.completion == answered("x" * size)


async def deaths(store: Store) -> int:
    found = await store.claim(ME, fingerprint(redelivered=True))
    assert isinstance(found, Granted)
    return found.deaths


async def test_holders_that_never_released_their_claim_are_counted(store: Store) -> None:
    await granted(store)

    assert [await deaths(store) for _ in range(4)] == [1, 2, 3, 4]


async def test_a_holder_whose_request_waits_is_not_counted(store: Store) -> None:
    async def taken_over(number: int) -> tuple[Held, int]:
        found = await store.claim(ME, fingerprint(redelivered=True, nonce=b"q%d" % number))
        assert isinstance(found, Granted)
        return Held(ME, found.token), found.deaths

    first, _ = await taken_over(1)
    await store.note_waiting(first, is_waiting=True)
    second, deaths = await taken_over(2)
    assert deaths == 0, "the first waited"
    await store.note_waiting(second, is_waiting=True)
    await store.note_waiting(second, is_waiting=False)
    third, deaths = await taken_over(3)
    assert deaths == 1, "the second waited no longer"
    await store.note_waiting(second, is_waiting=True)
    assert (await taken_over(4))[1] == 2, "who holds the claim no longer notes nothing"
    assert third.token > second.token


async def test_while_a_request_waits_only_its_own_message_takes_over_its_claim(store: Store) -> None:
    await store.note_waiting(Held(ME, await granted(store, nonce=b"q1")), is_waiting=True)

    assert isinstance(await store.claim(ME, fingerprint(mark="other", redelivered=True, nonce=b"q2")), Running)
    assert isinstance(await store.claim(ME, fingerprint(redelivered=True, nonce=b"s2")), Running)
    assert isinstance(await store.claim(ME, fingerprint(redelivered=True, nonce=b"q2")), Granted)


async def test_a_release_by_a_worker_that_survived_the_request_forgets_earlier_deaths(store: Store) -> None:
    for _ in range(3):
        token = await granted(store, redelivered=True)
    await store.release(Held(ME, token))

    assert await deaths(store) == 0


async def test_a_release_before_any_attempt_forgets_no_deaths(store: Store) -> None:
    """Otherwise a request that kills its workers, and is deferred in between, would kill them for ever."""
    for _ in range(3):
        token = await granted(store, redelivered=True)
    await store.release(Held(ME, token), is_survived=False)

    assert await deaths(store) == 2


async def test_a_holder_that_releases_after_a_takeover_is_no_longer_counted(store: Store) -> None:
    token = await granted(store)
    await deaths(store)
    await store.release(Held(ME, token))
    assert await deaths(store) == 1, "the second holder alone"

    await store.release(Held(ME, token))
    await store.release(Held(ME, token))
    assert await deaths(store) == 1, "of none it is none less"


async def test_a_claim_whose_answer_was_lost_is_granted_again_to_the_same_delivery(store: Store) -> None:
    token = await granted(store, nonce=b"n" * 8)

    assert await granted(store, nonce=b"n" * 8) == token
    assert isinstance(await store.claim(ME, fingerprint(nonce=b"m" * 8)), Running)


async def test_a_renewal_that_comes_after_a_release_renews_the_other_claims_only(opened: Opened) -> None:
    store = await opened(lease_s=SHORT)
    released = Held(ME, await granted(store))
    other = Identity("tenant", "other")
    held = await store.claim(other, fingerprint())
    assert isinstance(held, Granted)
    await store.release(released)

    async def expired() -> bool:
        now = await store.find(other)
        return now is not None and not now.running

    await until(expired)

    async def other_is_renewed() -> bool:  # a busy machine may need longer than the lease lasts until it looks
        await store.renew([released, Held(other, held.token)])
        running = [await store.find(each) for each in (other, ME)]
        assert not (running[1] and running[1].running)
        return running[0] is not None and running[0].running

    await until(other_is_renewed)


async def test_a_claim_that_comes_again_after_its_release_is_not_granted(store: Store) -> None:
    """Its answer was lost, it was asked for again, and the first question arrives last: nobody would hold the claim."""
    held = Held(ME, await granted(store, nonce=b"n" * 8))
    await store.release(held)
    await store.shelter(held)

    again = await store.claim(ME, fingerprint(nonce=b"n" * 8))
    assert isinstance(again, Running)
    assert 0 <= again.for_ms < 60_000
    assert isinstance(await store.claim(ME, fingerprint(nonce=b"m" * 8)), Granted)


async def test_every_late_message_of_an_earlier_holder_changes_nothing_for_the_next(store: Store) -> None:
    late = Held(ME, await granted(store))
    await store.release(late)
    await granted(store, nonce=b"q1")
    await store.renew([late])
    await store.shelter(late)
    await store.release(late, attempts=7)
    token = await granted(store, nonce=b"q2", redelivered=True)

    assert await store.complete(ME, fingerprint(), answered("late"), token=late.token) is None
    found = await store.find(ME)
    assert found is not None
    assert (found.running, found.attempts) == (True, 0)
    assert await store.complete(ME, fingerprint(), answered(), token=token) == answered()
    for held in (late, Held(ME, token)):
        await store.renew([held])
        await store.shelter(held)
        await store.release(held, attempts=7)
    found = await store.find(ME)
    assert found is not None
    assert (found.running, found.completion) == (False, answered())


async def test_a_sheltered_claim_is_taken_over_only_after_its_lease(opened: Opened) -> None:
    store = await opened(lease_s=SHORT)
    held = Held(ME, await granted(store, nonce=b"q1"))
    renewed_s = time.monotonic()
    await store.renew([held])
    await store.shelter(held)

    async def taken() -> bool:
        return isinstance(await store.claim(ME, fingerprint(redelivered=True, nonce=b"q2")), Granted)

    await until(taken)
    assert time.monotonic() - renewed_s > 0.95 * SHORT, "its times are whole milliseconds"


async def test_the_answer_of_a_sheltered_claim_is_found_by_the_redelivery(store: Store) -> None:
    token = await granted(store, nonce=b"q1")
    await store.shelter(Held(ME, token))
    await store.complete(ME, fingerprint(), answered(), token=token)

    assert await store.claim(ME, fingerprint(redelivered=True, nonce=b"q2")) == Ended(
        completion=answered(), is_same_message=True
    )


async def test_a_store_that_was_closed_says_so(opened: Callable[..., Awaitable[Store]]) -> None:
    store = await opened()
    token = await granted(store)
    await store.__aexit__(None, None, None)

    async with asyncio.timeout(5):
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.claim(ME, fingerprint())
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.complete(ME, fingerprint(), answered(), token=token)
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.look([(ME, 0)])


CANCELLED_FIRST = Ended(completion=CANCELLED, is_same_message=True)


async def _ending(store: Store, mark: str) -> tuple[Completion, bytes | None]:
    found = await store.claim(ME, fingerprint(mark=mark))
    assert isinstance(found, Ended)
    return found.completion, found.completion.mark


async def claimed(store: Store) -> Held:
    found = await store.claim(ME, fingerprint())
    assert isinstance(found, Granted), found
    return Held(ME, found.token)


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


async def test_a_request_whose_ending_was_only_noted_can_be_cancelled(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))

    assert await store.cancel(ME, CANCELLED) == Cancelling.UNSEEN
    assert await store.claim(ME, fingerprint()) == CANCELLED_FIRST


DUE_MS = 1_790_000_060_000


async def deferred(store: Store) -> None:
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(60_000))


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


async def test_an_invalid_request_with_the_same_id_does_not_hide_a_deferred_one(store: Store) -> None:
    await store.note(ME, failed("invalid_request"))
    await deferred(store)
    await store.note(ME, failed("invalid_request"))

    assert await store.find(ME) == Found(completion=None, running=False, due_ms=DUE_MS)


async def test_a_deferred_request_is_forgotten_after_its_keeping_time(opened: Opened) -> None:
    store = await opened()
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(200))
    assert await store.find(ME) is not None

    async def is_forgotten() -> bool:
        return await store.find(ME) is None

    await until(is_forgotten)
    await store.defer(ME, due_ms=DUE_MS, keep_until_ms=in_ms(-1))
    assert await store.find(ME) is None


async def end(store: Store, identity: Identity, text: str = "answer") -> None:
    found = await store.claim(identity, fingerprint())
    assert isinstance(found, Granted), found
    assert await store.complete(identity, fingerprint(), answered(text), token=found.token) is not None


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


LONG = "x" * 10_000
HOSTILE = (
    "'; DROP TABLE requests; --",
    '" OR ""="',
    "a\0b",
    "\r\nFLUSHALL\r\n",
    "*1\r\n$8\r\nFLUSHALL\r\n",
    "{lane}:x",
    "a:b",
    "*",
    "?",
    "[a-z]*",
    "../../etc/passwd",
    "%s%n",
    "ü\U0001f600",
    "\u202e",
    LONG,
    LONG + "'",
    "",
)


@pytest.mark.slow
async def test_each_hostile_id_is_a_separate_identity_and_returns_its_own_result(store: Store) -> None:
    identities = [Identity(tenant, id) for tenant in HOSTILE for id in HOSTILE]
    for number, identity in enumerate(identities):
        found = await store.claim(identity, fingerprint(f"body {number}"))
        assert isinstance(found, Granted), identity
        text = f"{number} {identity.id}"
        assert await store.complete(identity, fingerprint(f"body {number}"), answered(text), token=found.token)
    for number, identity in enumerate(identities):
        kept = await store.find(identity)
        assert kept is not None
        assert kept.completion == answered(f"{number} {identity.id}"), identity
        assert isinstance(await store.claim(identity, fingerprint(f"body {number}", redelivered=True)), Ended)


@pytest.mark.slow
@pytest.mark.parametrize("one", [("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "")])
async def test_a_tenant_and_an_id_cannot_be_taken_for_another_tenant_and_id(store: Store, one: tuple[str, str]) -> None:
    others = [("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "")]
    found = await store.claim(Identity(*one), fingerprint())
    assert isinstance(found, Granted)
    await store.complete(Identity(*one), fingerprint(), answered("mine"), token=found.token)
    assert [pair for pair in others if await store.find(Identity(*pair)) is not None] == [one]
