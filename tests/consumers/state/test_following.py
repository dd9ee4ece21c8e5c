"""A request that was submitted is known before a worker sees it; its entries can be read in order, after any number."""

import time
from typing import Any

import pytest

from consumers.state.base import (
    AppendRefusal,
    Granted,
    Held,
    Identity,
    Look,
    NewEntries,
    NewEntry,
    Submission,
    Submitted,
)
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, ME, answered, failed, fingerprint

pytestmark = pytest.mark.slow

QUEUED = NewEntry("queued", b"{}")


def submission(**said: Any) -> Submission:
    found: dict[str, Any] = {
        "body_hash": fingerprint().body_hash,
        "lane": "critical",
        "submitted_ms": 1000,
        "due_ms": None,
        "deadline_ms": 9000,
        **said,
    }
    return Submission(**found)


async def followed(store: Store, **said: Any) -> Submitted:
    until_ms = time.time_ns() // 1_000_000 + 60_000
    return await store.follow(ME, submission(**said), first_entry=QUEUED, keep_until_ms=until_ms)


async def held(store: Store, me: Identity = ME) -> Held:
    found = await store.claim(me, fingerprint())
    assert isinstance(found, Granted)
    return Held(me, found.token)


def part(holder: Held, *told: tuple[str, bytes]) -> NewEntries:
    return NewEntries(holder, submission(), [NewEntry(*each) for each in told])


async def look(store: Store, after: int = 0) -> Look:
    (found,) = await store.look([(ME, after)])
    assert found is not None
    return found


async def test_what_was_not_published_is_forgotten_unless_a_worker_has_seen_it(store: Store) -> None:
    await followed(store)
    await store.unfollow(ME)
    assert await store.find(ME) is None
    assert await store.submission(ME) is None
    found = await look(store)
    assert (list(found.entries), found.last, found.ended, found.is_known) == ([], 0, False, False)

    await followed(store)
    await held(store)
    await store.unfollow(ME)
    assert await store.submission(ME) is not None


async def test_an_answer_can_be_forgotten_but_neither_a_request_that_runs_nor_a_cancellation(
    store: Store,
) -> None:
    await followed(store)
    holder = await held(store)
    await store.forget(ME)
    assert await store.find(ME) is not None
    await store.complete(ME, fingerprint(), answered(), token=holder.token)
    await store.forget(ME)
    assert await store.find(ME) is None
    assert not (await look(store)).is_known

    await followed(store)
    await store.cancel(ME, CANCELLED)
    await store.forget(ME)
    assert await store.find(ME) is not None


async def test_only_the_holder_of_the_claim_appends_and_not_after_the_end(store: Store) -> None:
    await followed(store)
    late = await held(store)
    await store.release(late)
    assert await store.append([part(late, ("event", b"too late"))]) == [AppendRefusal.FENCED]
    holder = await held(store)
    assert await store.append([part(late, ("event", b"late")), part(holder, ("event", b"a"))]) == [
        AppendRefusal.FENCED,
        None,
    ]
    await store.complete(ME, fingerprint(), answered("{}"), token=holder.token)
    assert await store.append([part(holder, ("event", b"b"))]) == [AppendRefusal.FENCED]
    assert [each.body for each in (await look(store)).entries] == [b"{}", b"a"]


async def test_a_restart_removes_the_events_before_it(store: Store) -> None:
    await followed(store)
    holder = await held(store)
    await store.append([part(holder, ("started", b""), ("event", b"a"))])
    await store.append([part(holder, ("event", b"b"), ("restart", b"{}"), ("event", b"c"))])

    found = await look(store)
    assert [(each.kind, each.body) for each in found.entries] == [
        ("queued", b"{}"),
        ("started", b""),
        ("restart", b"{}"),
        ("event", b"c"),
    ]
    numbers = [each.number for each in found.entries]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == found.last
    await store.append([part(holder, ("restart", b"{}"), ("event", b"d"))])
    assert [each.body for each in (await look(store)).entries if each.kind == "event"] == [b"d"]


async def test_events_above_the_limits_are_refused_and_its_life_is_not(opened: Opened) -> None:
    store: Store = await opened(events_per_request=3, event_bytes_per_request=100)
    holder = await held(store)
    assert await store.append([part(holder, *[("event", b"")] * 4)]) == [AppendRefusal.FULL]
    assert await store.append([part(holder, ("event", b"x" * 101))]) == [AppendRefusal.FULL]
    assert await store.append([part(holder, *[("event", b"")] * 2, ("event", b"x" * 100))]) == [None]
    assert await store.append([part(holder, ("event", b""))]) == [AppendRefusal.FULL]
    assert await store.append([part(holder, ("truncated", b"{}"))]) == [None]
    assert await store.append([part(holder, ("restart", b"{}"), ("event", b"x"))]) == [None]


async def test_no_entry_has_the_number_of_an_ending_if_the_dead_letter_runs_again(opened: Opened) -> None:
    store: Store = await opened(events_per_request=2)
    await followed(store)
    holder = await held(store)
    assert await store.append([part(holder, ("started", b"1"), ("event", b"old"), ("event", b"old"))]) == [None]
    await store.complete(ME, fingerprint(), failed(ended_ms=7), token=holder.token)
    end = (await look(store)).last + 1

    found = await store.claim(ME, fingerprint(dead_at_ms=7))
    assert isinstance(found, Granted)
    assert [(each.number, each.kind) for each in (await look(store, after=end)).entries] == [(end + 1, "restart")]
    again = Held(ME, found.token)
    assert await store.append([part(again, ("started", b"2"), ("event", b"new"), ("event", b"new"))]) == [None]
    news = (await look(store)).entries
    assert [each.kind for each in news] == ["queued", "started", "restart", "started", "event", "event"]
    assert [each.number for each in news[2:]] == [end + 1, end + 2, end + 3, end + 4]


async def test_a_dead_letter_that_ends_again_without_a_claim_has_another_number_for_its_end(
    store: Store,
) -> None:
    await followed(store)
    holder = await held(store)
    await store.complete(ME, fingerprint(), failed(ended_ms=7), token=holder.token)
    before = (await look(store)).last

    late = failed("deadline_exceeded", ended_ms=9)
    assert await store.complete(ME, fingerprint(dead_at_ms=7), late, token=None) == late
    found = await look(store, after=before + 1)
    assert ([each.kind for each in found.entries], found.last, found.ended) == (["restart"], before + 2, True)


async def test_what_ends_before_any_worker_had_it_runs_for_the_first_time(store: Store) -> None:
    await followed(store)
    await store.complete(ME, fingerprint(), failed("deadline_exceeded"), token=None)
    assert [each.kind for each in (await look(store)).entries] == ["queued"]


async def test_of_two_restarts_told_at_once_the_events_before_the_last_are_removed(store: Store) -> None:
    holder = await held(store)
    told = [("event", b"a"), ("restart", b""), ("event", b"b"), ("step", b""), ("restart", b""), ("event", b"c")]
    assert await store.append([part(holder, *told)]) == [None]
    assert [each[1:] for each in (await look(store)).entries] == [told[1], told[3], told[4], told[5]]


@pytest.mark.parametrize("then", ["submitted again", "published again"])
async def test_no_entry_has_the_number_of_a_refusal_that_was_noted(store: Store, then: str) -> None:
    await followed(store)
    await store.note(ME, failed("invalid_request"))
    end = (await look(store)).last + 1

    if then == "submitted again":
        assert await followed(store, body_hash=b"x" * 16) is Submitted.NEW
    else:
        await held(store)
    assert [each.number for each in (await look(store, after=end)).entries] == [end + 1]


async def test_events_that_are_refused_remove_none_of_those_before(opened: Opened) -> None:
    store: Store = await opened(events_per_request=1)
    holder = await held(store)
    await store.append([part(holder, ("event", b"a"))])

    assert await store.append([part(holder, ("restart", b"{}"), *[("event", b"b")] * 2)]) == [AppendRefusal.FULL]
    assert [each.body for each in (await look(store)).entries] == [b"a"]


async def test_entries_go_with_the_result(opened: Opened) -> None:
    store: Store = await opened(keep_s=0.05)
    holder = await held(store)
    await store.append([part(holder, ("event", b"a"))])
    await store.complete(ME, fingerprint(), answered("{}"), token=holder.token)
    while await store.find(ME) is not None:
        pass
    while await store.sweep():
        pass
    assert (await look(store)).is_known is False
    assert await store.submission(ME) is None


async def test_a_look_returns_at_most_200_entries_of_a_request_and_the_next_look_the_rest(
    store: Store,
) -> None:
    holder = await held(store)
    await store.append([part(holder, *[("step", b"%d" % number) for number in range(250)])])
    first = await look(store)
    second = await look(store, after=first.entries[-1].number)

    assert (len(first.entries), len(second.entries)) == (200, first.last - first.entries[-1].number)
    assert [each.number for each in (*first.entries, *second.entries)] == list(range(1, first.last + 1))
