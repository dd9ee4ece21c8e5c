"""Dead letters beyond the limits are removed, the oldest first; only one process at a time does that."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import structlog

from consumers.dead_letters import LEASE, DeadLetters, DeadSpec
from consumers.lifecycle import Lifecycle
from consumers.state.base import StoreUnavailable
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.store import SqliteStore
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import signals
from tests.support.jobs import NAMES, NOW_MS, FakeNotices
from tests.support.virtual_time import virtually
from tests.support.waiting import until
from topology.broker.admin.deadletters import FetchedMessage


class Queue:
    """Like `OldestMessages`, with dead letters in memory; counts how often it was opened."""

    def __init__(self, *ages_s: float, body: bytes = b"x") -> None:
        self.letters = [Message(body=body, headers={n.DEAD_AT: moment(age_s)}) for age_s in ages_s]
        self._held: list[Message] = []
        self.looked = 0

    async def __aenter__(self) -> "Queue":
        self.looked += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.letters[:0], self._held = self._held, []

    async def take(self) -> FetchedMessage | None:
        if not self.letters:
            return None
        self._held.append(self.letters.pop(0))
        return FetchedMessage(self._held[-1], behind=len(self.letters), tag=1)

    async def remove(self, letter: FetchedMessage) -> None:
        self._held.remove(letter.message)


def moment(age_s: float) -> str:
    return datetime.fromtimestamp(NOW_MS / 1000 - age_s, tz=UTC).isoformat()


def looking_after(queue: Queue, store: Any = None, **spec: Any) -> DeadLetters:
    lifecycle = Lifecycle(FakeNotices([]), names=NAMES, now_ms=lambda: NOW_MS)
    oldest: Callable[[], Any] = lambda: queue  # noqa: E731
    return DeadLetters(oldest, store=store, spec=DeadSpec(**spec), lifecycle=lifecycle, now_ms=lambda: NOW_MS)


async def test_dead_letters_that_are_too_old_are_removed_however_few_there_are() -> None:
    queue = Queue(*[200.0] * 12, 50.0, 10.0)
    assert await looking_after(queue, keep_s=100).look() == 12
    assert [each.headers[n.DEAD_AT] for each in queue.letters] == [moment(50), moment(10)]


@pytest.mark.parametrize(("bound", "left"), [({"max_count": 3}, 3), ({"max_bytes": 250}, 2)])
async def test_dead_letters_beyond_the_number_or_size_are_removed_oldest_first(
    bound: dict[str, int], left: int
) -> None:
    queue = Queue(*map(float, range(20, 0, -1)), body=b"x" * 100)
    assert await looking_after(queue, **bound).look() == 20 - left
    assert [each.headers[n.DEAD_AT] for each in queue.letters] == [moment(each) for each in range(left, 0, -1)]


async def test_without_a_folder_dead_letters_are_dropped_with_a_warning_and_counted() -> None:
    letters = looking_after(Queue(3, 2, 1), max_count=1)
    with structlog.testing.capture_logs() as logs:
        await letters.look()
    (told,) = (each for each in logs if each["event"] == signals.DEAD_LETTERS_REMOVED)
    assert (told["log_level"], told["removed"], told["exported_to"]) == ("warning", 2, None)
    assert (letters.exported, letters.dropped) == (0, 2)


async def test_an_exported_dead_letter_and_the_name_of_its_new_file_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    await looking_after(Queue(3, 2, 1), max_count=1, folder=tmp_path).look()
    file, *others = synced
    assert Path(file).parent == tmp_path
    assert others == [str(tmp_path), file]


async def test_a_dead_letter_that_cannot_be_written_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    queue = Queue(3, 2, 1)
    with pytest.raises(OSError, match="file"):
        await looking_after(queue, max_count=1, folder=tmp_path / "file").look()
    assert len(queue.letters) == 3


@pytest.mark.slow
async def test_only_one_of_several_processes_looks(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "a.sqlite", namespace="lane", spec=StoreSpec()) as store:
        queues = [Queue(3, 2, 1) for _ in range(3)]
        running = [
            asyncio.create_task(looking_after(queue, store).run(owner=str(number), every_s=0.1))
            for number, queue in enumerate(queues)
        ]
        await until(lambda: max(each.looked for each in queues) >= 3)
        assert sorted(each.looked > 0 for each in queues) == [False, False, True]
        for each in running:
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each


def test_the_event_of_a_dead_letter_names_its_lane_application_attempts_and_code() -> None:
    notices = FakeNotices([])
    lifecycle = Lifecycle(notices, names=NAMES, now_ms=lambda: NOW_MS)
    key, headers = "batch.shop.chat", {n.ATTEMPT: 4, n.DEAD_CODE: "attempts_exhausted"}
    lifecycle.publish_for_letter(Message(body=b"", message_id="m-1", routing_key=key, headers=headers), "removed")
    lifecycle.publish_for_letter(Message(body=b"", routing_key=key), "removed")

    told = [json.loads(each) for each in notices.bodies]
    same = {"event": "removed", "lane": "batch", "app": "shop", "at_ms": NOW_MS}
    assert told == [
        {**same, "id": "m-1", "attempt": 4, "code": "attempts_exhausted"},
        {**same, "id": "", "attempt": 0, "code": ""},
    ]


class Leasing:
    """A store in which this process gets the lease, or does not; or which is away."""

    def __init__(self, answer: int | Exception | None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str, float]] = []

    async def hold(self, name: str, owner: str, *, for_s: float) -> int | None:
        self.asked.append((name, owner, for_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "looks", "logged"),
    [(1, 5, []), (None, 0, []), (StoreUnavailable("away"), 0, ["dead_letters.unkept"] * 5)],
)
def test_dead_letters_are_looked_after_once_a_minute_by_the_process_that_has_the_lease(
    answer: int | Exception | None, looks: int, logged: list[str]
) -> None:
    async def story() -> tuple[int, list[tuple[str, str, float]]]:
        queue, store = Queue(), Leasing(answer)
        running = asyncio.create_task(looking_after(queue, store).run(owner="me"))
        await asyncio.sleep(5 * 60 + 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return queue.looked, store.asked

    with structlog.testing.capture_logs() as logs:
        looked, asked = virtually(story())
    assert (looked, asked) == (looks, [(LEASE, "me", 120)] * 5)
    assert [each["event"] for each in logs] == logged


async def test_dead_letters_within_the_limits_are_kept() -> None:
    queue = Queue(3, 2, 1, body=b"x" * 100)
    assert await looking_after(queue, max_count=3, max_bytes=300, keep_s=4).look() == 0
    assert len(queue.letters) == 3
