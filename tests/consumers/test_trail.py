"""What a worker writes for whoever follows a request: in groups, bounded, and without waiting."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from consumers.background import Background
from consumers.state.base import Held, Identity, StoreUnavailable
from consumers.state.following import Part, Refused, Submission
from consumers.state.sqlite.store import SqliteStore
from consumers.trail import UNWRITTEN_BYTES, Trail, Trails
from tests.support.waiting import until

SUBMISSION = Submission(body_hash=b"", lane="critical", submitted_ms=0, due_ms=None, deadline_ms=0)


class Store(SqliteStore):
    """Records what is appended; `waits` holds the answer back."""

    def __init__(self) -> None:
        self.calls: list[list[Part]] = []
        self.answer: Refused | None = None
        self.failing = False
        self.fault: Exception | None = None
        self.waits = asyncio.Event()
        self.waits.set()

    @override
    async def append(self, parts: Sequence[Part]) -> Sequence[Refused | None]:
        self.calls.append(list(parts))
        is_failing = self.failing
        await self.waits.wait()
        if self.fault is not None:
            raise self.fault
        if is_failing:
            raise StoreUnavailable("away")
        return [self.answer] * len(parts)

    def told(self) -> list[tuple[str, bytes]]:
        return [(each.kind, each.body) for call in self.calls for part in call for each in part.entries]


def trails(store: Store) -> Trails:
    return Trails(store, Background())


def trail(of: Trails, id: str = "a", *, is_takeover: bool = False) -> Trail:
    return Trail(of, Held(Identity("", id), 1), SUBMISSION, is_takeover=is_takeover)


async def test_the_first_entry_is_written_at_once_and_those_that_follow_together() -> None:
    store = Store()
    writing = trails(store)
    one, other = trail(writing, "a"), trail(writing, "b")
    one.tell("started", attempt=1)
    await until(lambda: len(store.calls) == 1)
    for number in range(50):
        one.part("event", b"%d" % number)
        other.part("event", b"%d" % number)
    await one.flushed()
    await other.flushed()

    assert len(store.calls) == 2
    assert [len(part.entries) for part in store.calls[1]] == [50, 50]
    assert store.told()[0] == ("started", b'{"attempt": 1}')


async def test_flushed_waits_until_all_is_written() -> None:
    store = Store()
    one = trail(trails(store))
    store.waits.clear()
    one.part("event", b"a")
    flushing = asyncio.create_task(one.flushed())
    await until(lambda: len(store.calls) == 1)
    assert not flushing.done()
    store.waits.set()
    await flushing

    assert one.is_written


@pytest.mark.slow
async def test_a_store_that_is_away_stops_the_events_and_not_the_life() -> None:
    store = Store()
    one = trail(trails(store))
    store.failing = True
    one.tell("started")
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 1)
    one.part("event", b"b")
    store.failing = False
    await until(lambda: len(store.calls) == 2)
    one.part("event", b"c")
    one.tell("retrying")
    await one.flushed()

    assert [kind for kind, _ in store.told()[2:]] == ["started", "truncated", "retrying"]


@pytest.mark.slow
async def test_a_store_that_stays_away_is_told_that_events_are_missing_as_soon_as_it_is_back() -> None:
    store = Store()
    one = trail(trails(store))
    store.failing = True
    one.tell("started")
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 3)
    store.calls.clear()
    store.failing = False
    await until(lambda: one.is_written)

    assert [kind for kind, _ in store.told()] == ["started", "truncated"]


async def test_a_claim_that_was_taken_over_begins_its_events_with_one_restart() -> None:
    store = Store()
    writing = trails(store)
    one, other = (trail(writing, id, is_takeover=True) for id in "ab")
    one.tell("started")
    one.part("event", b"a")
    one.part("event", b"b")
    await one.flushed()
    assert [kind for kind, _ in store.told()] == ["started", "restart", "event", "event"]

    store.calls.clear()
    other.part("restart", b"{}")
    other.part("event", b"a")
    await other.flushed()
    assert [kind for kind, _ in store.told()] == ["restart", "event"]


@pytest.mark.slow
async def test_a_fault_of_ours_ends_the_trails_that_it_hit_and_delays_nothing() -> None:
    store = Store()
    writing = trails(store)
    one = trail(writing)
    store.fault = ValueError("odd")
    with capture_logs() as logs:
        one.tell("started")
        await until(lambda: one.is_written)
    assert [each["event"] for each in logs] == ["handler.failed"]
    one.part("event", b"a")
    assert one.is_written

    store.fault = None
    other = trail(writing, "b")
    other.part("event", b"a")
    await until(lambda: other.is_written)
    assert store.told()[-1] == ("event", b"a")


@pytest.mark.slow
async def test_events_after_a_restart_are_written_if_those_before_it_failed() -> None:
    store = Store()
    one = trail(trails(store))
    store.failing = True
    store.waits.clear()
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 1)
    store.failing = False
    one.part("restart", b"{}")
    one.part("event", b"b")
    store.waits.set()
    await until(lambda: one.is_written)

    assert store.told()[1:] == [("restart", b"{}"), ("event", b"b")]


async def test_events_above_the_limit_of_the_store_stop_until_a_restart() -> None:
    store = Store()
    one = trail(trails(store))
    store.answer = Refused.FULL
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 1)
    store.answer = None
    await one.flushed()
    one.part("event", b"b")
    one.part("restart", b"{}")
    one.part("event", b"c")
    await one.flushed()

    assert store.told() == [("event", b"a"), ("truncated", b"{}"), ("restart", b"{}"), ("event", b"c")]


async def test_what_waits_in_memory_is_bounded() -> None:
    store = Store()
    one = trail(trails(store))
    store.waits.clear()
    one.tell("started")
    await until(lambda: len(store.calls) == 1)
    for _ in range(20):
        one.part("event", bytes(UNWRITTEN_BYTES // 10))
    store.waits.set()
    await one.flushed()

    assert [kind for kind, _ in store.told()] == ["started", "truncated"]


async def test_a_claim_that_was_taken_over_writes_nothing_more() -> None:
    store = Store()
    one = trail(trails(store))
    store.answer = Refused.FENCED
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 1)
    await one.flushed()
    one.part("event", b"b")
    one.tell("retrying")
    await one.flushed()

    assert store.told() == [("event", b"a")]
