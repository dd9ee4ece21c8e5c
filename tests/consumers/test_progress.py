"""What a worker writes for whoever follows a request: in groups, bounded, and without waiting."""

import asyncio
from collections.abc import Sequence

import pytest
from typing_extensions import override

from consumers.background import Background
from consumers.progress import Progress, ProgressWriter
from consumers.state.base import AppendRefusal, Held, Identity, NewEntries, StoreUnavailable, Submission
from consumers.state.sqlite.store import SqliteStore
from tests.support.waiting import until

SUBMISSION = Submission(body_hash=b"", lane="critical", submitted_ms=0, due_ms=None, deadline_ms=0)


class Store(SqliteStore):
    """Records what is appended; `waits` holds the answer back."""

    def __init__(self) -> None:
        self.calls: list[list[NewEntries]] = []
        self.answer: AppendRefusal | None = None
        self.failing = False
        self.fault: Exception | None = None
        self.waits = asyncio.Event()
        self.waits.set()

    @override
    async def append(self, parts: Sequence[NewEntries]) -> Sequence[AppendRefusal | None]:
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


def requests(store: Store) -> ProgressWriter:
    return ProgressWriter(store, Background())


def progress(of: ProgressWriter, id: str = "a", *, is_takeover: bool = False) -> Progress:
    return Progress(of, Held(Identity("", id), 1), SUBMISSION, is_takeover=is_takeover)


async def test_a_claim_that_was_taken_over_begins_its_events_with_one_restart() -> None:
    store = Store()
    writing = requests(store)
    one, other = (progress(writing, id, is_takeover=True) for id in "ab")
    one.publish_event("started")
    one.part("event", b"a")
    one.part("event", b"b")
    await one.flushed()
    assert [kind for kind, _ in store.told()] == ["started", "restart", "event", "event"]

    store.calls.clear()
    other.part("restart", b"{}")
    other.part("event", b"a")
    await other.flushed()
    assert [kind for kind, _ in store.told()] == ["restart", "event"]


async def test_events_above_the_limit_of_the_store_stop_until_a_restart() -> None:
    store = Store()
    one = progress(requests(store))
    store.answer = AppendRefusal.FULL
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 1)
    store.answer = None
    await one.flushed()
    one.part("event", b"b")
    one.part("restart", b"{}")
    one.part("event", b"c")
    await one.flushed()

    assert store.told() == [("event", b"a"), ("truncated", b"{}"), ("restart", b"{}"), ("event", b"c")]


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ([MIB // 2] * 2, ["started", "event", "event"]),
        ([MIB // 2, MIB // 2, 1, 5], ["started", "truncated"]),
        ([3 * MIB], ["started", "event"]),  # one whole event, whatever its size
        ([3 * MIB, 1], ["started", "truncated"]),
    ],
)
async def test_up_to_a_mebibyte_of_events_waits_in_memory(sizes: list[int], kinds: list[str]) -> None:
    store = Store()
    one = progress(requests(store))
    store.waits.clear()
    one.publish_event("started")
    await until(lambda: len(store.calls) == 1)
    for size in sizes:
        one.part("event", bytes(size))
    store.waits.set()
    await one.flushed()
    assert [kind for kind, _ in store.told()] == kinds

    one.part("restart", b"{}")  # after which there is room for as much again
    for _ in range(2):
        one.part("event", bytes(MIB // 2 - 1))
    await one.flushed()
    assert [kind for kind, _ in store.told()] == [*kinds, "restart", "event", "event"]


async def test_a_claim_that_was_taken_over_writes_nothing_more() -> None:
    store = Store()
    one = progress(requests(store))
    store.answer = AppendRefusal.FENCED
    one.part("event", b"a")
    await until(lambda: len(store.calls) == 1)
    await one.flushed()
    one.part("event", b"b")
    one.publish_event("retrying")
    await one.flushed()

    assert store.told() == [("event", b"a")]
