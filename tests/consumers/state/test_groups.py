"""Groups of requests in the store."""

import asyncio
from typing import Any

import pytest

from consumers.clock import now_ms
from consumers.job import group_in
from consumers.state.base import Completion, Fingerprint, Granted, Identity, InGroup
from consumers.state.groups import ENDED_AT_ONCE, KINDS, Head, Kind, Opened, State, StoredGroup, progress
from consumers.state.store import Store
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import GROUP_AT_MOST

GROUP = Identity("crm", "msgbatch_1")
IN_GROUP = InGroup(GROUP.id, 4, "batch.app.x")
IDS = ["msgbatch_1.a", "msgbatch_1.b", "msgbatch_1.c", "msgbatch_1.d"]


def head(**given: Any) -> Head:
    now = now_ms()
    made: dict[str, Any] = {
        "lease_ms": now + 60_000, "owner": "key", "digest": "d", "size_bytes": 10,
        "created_ms": now, "expires_ms": now + 3_600_000, "keep_ms": now + 7_200_000,
    }  # fmt: skip
    return Head(**{**made, **given})


def message(body: bytes = b"1", **given: Any) -> Fingerprint:
    return Fingerprint(body_hash=body * 16, mark=b"m" * 16, redelivered=False, nonce=b"q1234567", **given)


def ended(status: Any = "ok", code: str = "", body: bytes = b"{}") -> Completion:
    return Completion(status=status, code=code, body=body, headers={"x": 1}, ended_ms=now_ms())


async def created(store: Store) -> None:
    assert await store.open_group(GROUP, head()) is Opened.NEW
    assert await store.join("crm", IN_GROUP, IDS, keep_until_ms=now_ms() + 7_200_000)
    assert await store.seal_group(GROUP) is not None


async def counts(store: Store) -> str:
    group = await found(store)
    return " ".join(f"{kind}={number}" for kind, number in group.counts.items() if number)


async def found(store: Store) -> StoredGroup:
    group = await store.group(GROUP)
    assert group is not None
    return group


async def runs(store: Store, id: str, completion: Completion) -> None:
    identity = Identity("crm", id)
    granted = await store.claim(identity, message())
    assert isinstance(granted, Granted)
    await store.complete(identity, message(), completion, token=granted.token)


async def test_its_counts_are_true_from_the_first_request_to_the_last(store: Store) -> None:
    await created(store)
    assert await counts(store) == "processing=4"

    await runs(store, IDS[0], ended())
    await runs(store, IDS[1], ended("error", "attempts_exhausted"))
    await store.claim(Identity("crm", IDS[2]), message())
    assert await counts(store) == "processing=2 succeeded=1 errored=1"
    assert not (await found(store)).has_ended

    await store.cancel(Identity("crm", IDS[2]), ended("error", "cancelled"))  # its holder has still to end it
    assert await counts(store) == "processing=2 succeeded=1 errored=1"
    await store.cancel(Identity("crm", IDS[3]), ended("error", "cancelled"))
    assert await counts(store) == "processing=1 succeeded=1 errored=1 canceled=1"


async def test_a_request_that_ends_twice_counts_once(store: Store) -> None:
    await created(store)
    await runs(store, IDS[0], ended())
    await store.complete(Identity("crm", IDS[0]), message(), ended("error", "internal"), token=None)
    await store.join("crm", IN_GROUP, IDS, keep_until_ms=now_ms() + 1000)

    assert await counts(store) == "processing=3 succeeded=1"


async def test_a_dead_letter_that_runs_again_is_processing_again(store: Store) -> None:
    await created(store)
    failed = ended("error", "attempts_exhausted")
    await runs(store, IDS[0], failed)

    await store.claim(Identity("crm", IDS[0]), message(dead_at_ms=failed.ended_ms))

    assert await counts(store) == "processing=4"


async def test_it_comes_to_be_with_a_request_and_ends_when_as_many_have_ended_as_one_says(store: Store) -> None:
    group = InGroup(GROUP.id, 0, "batch.app.x")
    await store.note(Identity("crm", "refused"), ended("error", "invalid_request"), group=group)
    await store.defer(Identity("crm", "later"), due_ms=now_ms(), keep_until_ms=now_ms() + 60_000, group=group)
    assert await counts(store) == "processing=1 errored=1"

    said = message(group=InGroup(GROUP.id, 3, "batch.app.y", "https://example.com"))
    await store.complete(Identity("crm", "late"), said, ended("error", "deadline_exceeded"), token=None)
    granted = await store.claim(Identity("crm", "later"), message(group=group))
    assert isinstance(granted, Granted)
    assert not (await found(store)).has_ended
    paid = Completion(status="ok", body=b"{}", ended_ms=now_ms(), saved_usd=0.25)
    await store.complete(Identity("crm", "later"), message(group=group), paid, token=granted.token)

    now = await found(store)
    assert await counts(store) == "succeeded=1 errored=1 expired=1"
    assert now.has_ended
    assert (now.size, now.key, now.webhook, now.saved_usd) == (3, "batch.app.x", "https://example.com", 0.25)
    assert [each.id for each in await store.members(GROUP)] == ["refused", "later", "late"]
    assert [each.identity for each in await store.ended_groups()] == [GROUP]
    await store.end_was_told(GROUP)
    await store.claim(Identity("crm", "refused"), message(group=group))  # sent again, corrected
    await store.cancel(Identity("crm", "refused"), ended("error", "cancelled"))
    assert not await store.ended_groups()


async def test_groups_that_never_end_do_not_hold_back_the_end_of_another(store: Store) -> None:
    failed = ended("error", "invalid_request")
    for number in range(10 * ENDED_AT_ONCE):
        group = InGroup(f"g-{number}", 2, "batch.app.x")
        await store.note(Identity("other", f"k-{number}"), failed, group=group)
    await store.note(Identity("crm", "only"), failed, group=InGroup(GROUP.id, 1, "batch.app.x"))

    assert [each.identity for each in await store.ended_groups()] == [GROUP]


def test_an_end_that_is_too_far_away_for_a_date_is_not_predicted() -> None:
    created_ms = now_ms()
    counts: dict[Kind, int] = {**dict.fromkeys(KINDS, 0), "succeeded": 1, "processing": 1}
    group = StoredGroup(
        identity=GROUP,
        head=head(state=State.SEALED, created_ms=created_ms),
        counts=counts,
        last_ended_ms=created_ms,
        size=GROUP_AT_MOST,
        key="batch.app.x",
        webhook="",
        saved_usd=0.0,
    )

    assert "predicted_end_at" in progress(group, now_ms=created_ms + 3_600_000)
    assert "predicted_end_at" not in progress(group, now_ms=created_ms + 30 * 86_400_000)


@pytest.mark.parametrize("text", ["normal.\0.x", "\x1f", "x" * 5000])
async def test_what_a_wrong_request_says_of_its_group_does_no_harm(store: Store, text: str) -> None:
    headers = {n.GROUP: GROUP.id, n.GROUP_SIZE: 2**70, n.WEBHOOK: text}
    await store.note(Identity("crm", "a"), ended("error", "invalid_request"), group=group_in(headers, key=text[:255]))

    assert await counts(store) == "errored=1"
    assert ((await found(store)).size, (await found(store)).webhook) == (0, "")


async def test_a_tenant_has_no_more_of_them_than_it_may(opened: Any) -> None:
    store: Store = await opened(groups_per_tenant=2)
    for number in range(3):
        identity, group = Identity("crm", f"k-{number}"), InGroup(f"g-{number}")
        await store.note(identity, ended("error", "invalid_request"), group=group)

    assert await store.count_groups("crm") == 2
    assert await store.group(Identity("crm", "g-2")) is None


async def test_a_group_whose_creator_died_is_void_for_good_and_may_be_created_again(store: Store) -> None:
    await store.open_group(GROUP, head(lease_ms=now_ms() + 50))
    await asyncio.sleep(0.1)

    assert (await found(store)).head.state is State.VOID
    assert await store.seal_group(GROUP) is None
    assert not await store.renew_group(GROUP, lease_ms=now_ms() + 1000)
    assert await store.open_group(GROUP, head()) is Opened.NEW
    assert await store.seal_group(GROUP) is not None
    assert await store.count_groups("crm") == len(await store.groups_of("crm")) == 1


async def test_a_group_that_was_removed_has_no_requests_and_no_results(store: Store) -> None:
    await created(store)
    for refused in (await store.discard_group(GROUP), await store.remove_group(GROUP)):
        assert refused is not None
        assert refused.head.state is State.SEALED  # it has not ended
    for id in IDS:
        await runs(store, id, ended())

    await store.remove_group(GROUP)
    while await store.remove_members(GROUP):
        pass

    assert (await found(store)).head.state is State.VOID
    assert await store.count_groups("crm") == 0
    assert [*await store.groups_of("crm"), *await store.newest_groups(most=9)] == []
    assert await store.members(GROUP) == []
    assert await store.find(Identity("crm", IDS[0])) is None


async def test_the_groups_of_all_tenants_are_listed_newest_first_and_in_pages(store: Store) -> None:
    now = now_ms()
    for number, tenant in enumerate(["crm", "a:b", "", "crm"]):
        await store.open_group(Identity(tenant, f"g-{number}"), head(created_ms=now - 1000 + number // 2))
    await store.note(Identity("x", "k"), ended("error", "invalid_request"), group=InGroup("by-request"))
    await store.cancel_group(Identity("crm", "g-0"))

    wanted = {Identity("x", "by-request"), Identity("crm", "g-0"), Identity("a:b", "g-1")}
    wanted |= {Identity("", "g-2"), Identity("crm", "g-3")}
    first = await store.newest_groups(most=2)
    second = await store.newest_groups(most=2, after=first[-1].place)
    third = await store.newest_groups(most=2, after=second[-1].place)

    found = [*first, *second, *third]
    assert {each.identity for each in found} == wanted
    assert len(found) == 5
    assert found[0].identity.id == "by-request"
    times = [each.head.created_ms for each in found]
    assert times == sorted(times, reverse=True)
    assert await store.newest_groups(most=2, after=third[-1].place) == []


async def test_a_group_that_is_kept_no_longer_is_listed_no_longer(store: Store) -> None:
    for number in range(3):
        end_ms = now_ms() + (50 if number == 1 else 60_000)
        await store.open_group(Identity("crm", f"g-{number}"), head(created_ms=number, keep_ms=end_ms))
    await asyncio.sleep(0.1)

    assert [each.identity.id for each in await store.newest_groups(most=2)] == ["g-2", "g-0"]
    await store.sweep()
    assert [each.identity.id for each in await store.newest_groups(most=5)] == ["g-2", "g-0"]


@pytest.mark.parametrize("opened_with", [{"keep_s": 0.05}])
async def test_the_results_of_a_group_are_kept_together(opened: Any, opened_with: dict[str, float]) -> None:
    store: Store = await opened(**opened_with)
    await created(store)
    await runs(store, IDS[0], ended())
    await asyncio.sleep(0.1)

    assert (await store.members(GROUP))[0].completion is not None
