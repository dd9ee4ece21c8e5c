"""Claims: one live holder and one completion, for every engine."""

import asyncio
from typing import Any

import pytest

from consumers.state.base import Conflict, Ended, Granted, Held, Identity, Running, Stop, Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, failed, fingerprint
from tests.support.waiting import until

SHORT = 0.2
RENEWED = 3.0


async def granted(store: Store, **of_copy: Any) -> int:
    found = await store.claim(ME, fingerprint(**of_copy))
    assert isinstance(found, Granted), found
    return found.token


async def test_one_of_fifty_concurrent_claims_wins(store: Store) -> None:
    found = await asyncio.gather(*(store.claim(ME, fingerprint(mark=str(each))) for each in range(50)))

    assert sum(isinstance(each, Granted) for each in found) == 1
    assert sum(isinstance(each, Running) for each in found) == 49


async def test_one_of_fifty_claims_through_two_stores_wins(opened: Opened) -> None:
    stores = [await opened(), await opened()]
    found = await asyncio.gather(*(stores[each % 2].claim(ME, fingerprint(mark=str(each))) for each in range(50)))

    assert sum(isinstance(each, Granted) for each in found) == 1


async def test_tenants_do_not_share_ids(store: Store) -> None:
    odd = ["", "a", "b", "a:b", "a%3Ab", "ä", "x" * 200, "a/'\";--"]
    found = [await store.claim(Identity(tenant, "b:id"), fingerprint(body=tenant[:16])) for tenant in odd]

    assert all(isinstance(each, Granted) for each in found)


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


async def test_the_same_copy_waits_unless_it_was_redelivered(store: Store) -> None:
    await granted(store)

    assert isinstance(await store.claim(ME, fingerprint()), Running)


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


async def test_a_running_claim_says_how_long_it_lasts(store: Store) -> None:
    await granted(store)
    first = await store.claim(ME, fingerprint())
    assert isinstance(first, Running)

    async def longer() -> bool:
        found = await store.claim(ME, fingerprint())
        assert isinstance(found, Running)
        return found.for_ms > first.for_ms

    assert 0 <= first.for_ms < 5_000
    await until(longer)


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


async def test_a_completion_is_returned_as_it_was_stored(store: Store) -> None:
    token = await granted(store)
    await store.complete(ME, fingerprint(), failed("provider_rejected", ended_ms=1_790_000_000_123), token=token)

    found = await store.claim(ME, fingerprint(mark="other"))

    assert found == Ended(completion=failed("provider_rejected", ended_ms=1_790_000_000_123), is_same_message=False)


async def test_the_completion_of_a_holder_that_lost_its_claim_is_refused(store: Store) -> None:
    zombie = await granted(store)
    token = await granted(store, redelivered=True)

    assert await store.complete(ME, fingerprint(), answered("zombie"), token=zombie) is None
    assert await store.complete(ME, fingerprint(), answered("ours"), token=token) == answered("ours")
    assert await store.complete(ME, fingerprint(), answered("zombie"), token=zombie) == answered("ours")


async def test_the_release_of_a_holder_that_lost_its_claim_changes_nothing(store: Store) -> None:
    zombie = await granted(store)
    await granted(store, redelivered=True)
    await store.release(Held(ME, zombie), attempts=9)

    assert isinstance(await store.claim(ME, fingerprint()), Running)


async def test_a_released_claim_can_be_taken_again(store: Store) -> None:
    first = await granted(store)
    await store.release(Held(ME, first), attempts=2)

    found = await store.find(ME)
    assert found is not None
    assert (found.completion, found.running, found.attempts) == (None, False, 2)
    assert await granted(store) > first


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


async def test_a_holder_that_released_its_claim_is_not_counted(store: Store) -> None:
    token = await granted(store)
    await store.release(Held(ME, token))

    assert await deaths(store) == 0


async def test_a_holder_that_releases_after_a_takeover_is_no_longer_counted(store: Store) -> None:
    token = await granted(store)
    await deaths(store)
    await store.release(Held(ME, token))

    assert await deaths(store) == 1, "the second holder alone"


async def test_a_claim_whose_answer_was_lost_is_granted_again_to_the_same_delivery(store: Store) -> None:
    token = await granted(store, nonce=b"n" * 8)

    assert await granted(store, nonce=b"n" * 8) == token
    assert isinstance(await store.claim(ME, fingerprint(nonce=b"m" * 8)), Running)
