"""Added slots are separate pools: added when needed, removed when another lane needs them, shown in `status`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from consumers.capacity import scaling
from consumers.capacity.activity import LaneActivity
from consumers.capacity.lending import QueueLoad
from consumers.capacity.scaling import ScaledQueue, Scaling
from consumers.job import Job
from lanekeeper.contract.problems import BrokerUnreachable
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench
from tests.support.pools import FakePool
from tests.support.waiting import until


class HoldingPool(FakePool):
    """Ends when it was told to stop and its last request has ended."""

    @override
    async def run(self) -> None:
        await until(lambda: self.is_stopped and not self.in_hand, within_s=60)
        self.is_over = True

    @override
    def give_back_waiting(self) -> None:
        assert self.is_stopped
        self.in_hand = 0


class World:
    """Two lanes: one with eight slots, and a less urgent one with two."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.held: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.added: list[HoldingPool] = []
        self.pools: dict[str, HoldingPool] = {}
        self.is_broker_away = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.now_ms = NOW_MS
        self.high = self._line("high", slots=8, kept=2, most=16)
        self.low = self._line("low", slots=2, kept=1, most=20)
        self.slots = Scaling(
            [self.high, self.low], depths=self._depths, waiting_for=lambda: self.held, now_ms=lambda: self.now_ms
        )

    def _line(self, lane: str, *, slots: int, kept: int, most: int) -> ScaledQueue:
        def more(count: int) -> HoldingPool:
            self.added.append(HoldingPool(lane, count))
            return self.added[-1]

        self.pools[lane] = HoldingPool(lane, slots)
        return ScaledQueue(
            lane=lane,
            pool=self.pools[lane],
            new_pool=more,
            load=QueueLoad(slots=slots, reserved=kept, max_slots=most, target_wait_s=1),
            activity=LaneActivity(lane, slots=slots, due_slots=0),
        )

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        self.asked.append(queues)
        if self.is_broker_away:
            raise BrokerUnreachable("no connection")
        await self.answers.wait()
        return {queue: self.waiting.get(queue, 0) for queue in queues}

    def flood(self) -> None:
        """All slots of the less urgent lane are in use, and many more requests wait."""
        self.pools["low"].in_hand = 2
        self.waiting["low"] = 500

    @property
    def open(self) -> list[int]:
        return [each.slots for each in self.added if not each.is_stopped]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.slots.run())
        yield
        await self.slots.stop()
        for each in self.added:
            each.in_hand = 0
        await asyncio.wait_for(running, 30)

    @asynccontextmanager
    async def lending(self) -> AsyncIterator[None]:
        """As `watched`, from the moment when the less urgent lane got slots."""
        self.flood()
        async with self.watched():
            await until(lambda: self.open)
            yield


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_EVERY_S": 0.005, "ASK_EVERY_S": 0.02, "STEADY_S": 0.06, "BOTTLENECK_FOR_S": 0.04}.items():
        monkeypatch.setattr(scaling, name, value)


async def test_the_length_is_asked_only_of_queues_whose_slots_are_all_in_use() -> None:
    world = World()
    async with world.watched():
        await asyncio.sleep(0.06)
        assert not world.asked
        world.pools["low"].in_hand = 2
        await until(lambda: world.asked)
    assert world.asked[0] == ["low"]


async def test_idle_slots_are_lent_as_another_pool_on_the_busy_queue_and_reported() -> None:
    world = World()
    async with world.lending():
        assert [(each.queue, each.slots) for each in world.added] == [("low", 4), ("low", 2)]
        assert world.low.activity.snapshot()["extra_slots"] == 6
        assert world.high.activity.snapshot()["extra_slots"] == 0


async def test_slots_are_lent_only_after_being_idle_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "STEADY_S", 60)
    world = World()
    world.flood()
    async with world.watched():
        await until(lambda: len(world.asked) > 3)
        assert not world.added


async def test_lent_slots_are_taken_back_at_once_and_their_running_requests_end() -> None:
    world = World()
    async with world.lending():
        first, second = world.added
        first.in_hand, second.in_hand = 4, 2
        world.pools["high"].in_hand = 8
        await until(lambda: first.is_stopped and second.is_stopped)
        ends_later = not first.is_over
        world.pools["high"].in_hand = 0
        await asyncio.sleep(0.15)
        assert world.open == [], "what still runs on them is not lent a second time"
        first.in_hand = 0
        await until(lambda: world.open == [4])
        assert ends_later
        assert first.is_over
        second.in_hand = 0
        await until(lambda: world.open == [4, 2])


async def test_requests_that_run_on_slots_that_were_taken_back_do_not_make_their_queue_full() -> None:
    world = World()
    async with world.lending():
        for each in world.added:
            each.in_hand = each.slots
        assert world.low.is_full
        world.high.pool.in_hand = 8  # type: ignore[misc]
        await until(lambda: not world.open)
        assert world.low.is_full, "its own two slots are in use"
        world.low.pool.in_hand = 1  # type: ignore[misc]
        assert not world.low.is_full


async def test_no_more_slots_are_taken_back_than_needed() -> None:
    world = World()
    async with world.lending():
        for each in world.added:
            each.in_hand = each.slots
        world.pools["high"].in_hand = 2
        await until(lambda: world.added[1].is_stopped)
        await asyncio.sleep(0.05)
        assert world.open == [4]


async def test_borrowed_slots_that_are_unused_are_given_up() -> None:
    world = World()
    async with world.lending():
        world.waiting.clear()
        world.pools["low"].in_hand = 1
        await until(lambda: all(each.is_over for each in world.added))
        assert world.low.activity.snapshot()["extra_slots"] == 0


def job(bench: Bench, *, waited_ms: int) -> Job:
    found = bench.job()
    found.decoded = SimpleNamespace(request=SimpleNamespace(start_ms=found.taken_ms - waited_ms))  # type: ignore[assignment]
    return found


async def test_a_queue_grows_while_its_deliveries_have_waited_too_long() -> None:
    world = World()
    world.flood()
    world.pools["high"].in_hand = 8
    world.pools["low"].jobs = {job(Bench(), waited_ms=900)}
    async with world.watched():
        await until(lambda: len(world.asked) > 3)
        assert not world.added, "within the target"
        world.pools["low"].jobs = {job(Bench(), waited_ms=1100)}
        await until(lambda: world.open == [1])
        world.added[0].in_hand = 1
        await until(lambda: world.open == [1, 1])


async def test_a_queue_grows_if_nothing_was_delivered_for_too_long() -> None:
    world = World()
    world.flood()
    world.pools["high"].in_hand = 8
    async with world.watched():
        await until(lambda: len(world.asked) > 3)
        assert not world.added
        world.now_ms += 1100
        await until(lambda: world.added)


async def test_a_queue_does_not_grow_while_the_provider_is_the_limit_and_that_is_reported_once() -> None:
    world = World()
    world.flood()
    world.pools["high"].in_hand = 8
    world.pools["low"].jobs = {job(Bench(), waited_ms=9000)}
    world.held["low"] = "itpm"
    with capture_logs() as logs:
        async with world.watched():
            await until(lambda: len(world.asked) > 5)
            assert not world.added
            assert world.low.activity.snapshot()["slots_limit"] == "itpm"
            world.held.clear()
            await until(lambda: world.added)
    said = [each for each in logs if each["event"] == signals.SLOTS_LIMITED]
    assert [(each["lane"], each["limit"], each["wait_s"]) for each in said] == [("low", "itpm", 9.0)]


async def test_if_the_broker_cannot_be_asked_nothing_changes() -> None:
    world = World()
    world.flood()
    world.is_broker_away = True
    async with world.watched():
        await until(lambda: len(world.asked) > 3)
        assert not world.added


async def test_while_paused_all_added_slots_are_taken_back_and_none_is_added() -> None:
    world = World()
    async with world.lending():
        world.added[0].in_hand = 1
        await world.slots.pause("store: away")
        assert world.slots.is_paused
        assert not world.open
        assert world.low.added_slots == 0, "what still runs has no slots of the queue"
        world.added[0].in_hand = 0
        await asyncio.sleep(0.05)
        assert not world.open
        await world.slots.resume()
        await until(lambda: world.open)


async def test_a_pause_that_begins_while_the_broker_is_asked_adds_no_slots() -> None:
    world = World()
    world.flood()
    world.waiting["low"] = 0
    async with world.watched():
        await asyncio.sleep(0.1)
        world.answers.clear()
        world.waiting["low"] = 500
        asked = len(world.asked)
        await until(lambda: len(world.asked) > asked)
        await world.slots.pause("store: away")
        world.answers.set()
        await asyncio.sleep(0.05)
        assert not world.added


async def test_a_stop_takes_no_more_deliveries_and_waits_for_running_ones() -> None:
    world = World()
    world.flood()
    running = asyncio.create_task(world.slots.run())
    await until(lambda: world.open)
    world.added[0].in_hand = 3
    await world.slots.stop()
    assert not world.open
    await asyncio.sleep(0.05)
    assert not running.done()
    world.added[0].in_hand = 0
    await asyncio.wait_for(running, 30)


async def test_on_a_stop_deliveries_that_wait_on_added_slots_are_returned() -> None:
    world = World()
    world.flood()
    running = asyncio.create_task(world.slots.run())
    await until(lambda: world.open)
    world.added[0].in_hand = 3
    await world.slots.stop()
    world.slots.give_back_waiting()
    await asyncio.wait_for(running, 30)
