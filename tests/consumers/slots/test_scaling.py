"""Added slots are separate pools: added when needed, removed when another lane needs them, shown in `status`; and
scouts. In virtual time."""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ParamSpec

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from consumers.job import Job
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import LaneSlots, QueueSlots
from consumers.slots.scaling import AT_MOST, ExtraSlots, QueueLoad, ScaledQueue, Scaling, decide
from lanekeeper.contract.problems import BrokerUnreachable
from lanekeeper.telemetry import signals
from tests.support.examples import examples
from tests.support.jobs import NOW_MS, Bench, FakePool
from tests.support.virtual_time import virtually
from tests.support.waiting import until

P = ParamSpec("P")


class HoldingPool(FakePool):
    """Ends when it was told to stop and its last request has ended."""

    @override
    async def run(self) -> None:
        self.began_s = asyncio.get_running_loop().time()
        await until(lambda: self.is_stopped and not self.in_hand, within_s=1e6)
        self.is_over = True

    @override
    def give_back_waiting(self) -> None:
        assert self.is_stopped
        self.in_hand = 0


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **given: P.kwargs) -> None:
        virtually(test(*args, **given))

    return run


def _queue(*, pool: FakePool, **given: Any) -> ScaledQueue:
    given.setdefault("new_pool", lambda count: FakePool(pool.queue, count))
    given.setdefault("load", QueueLoad(slots=pool.slots, reserved=1, max_slots=pool.slots, target_wait_s=2))
    given.setdefault("shared", LaneSlots().queue(pool.slots))
    activity = LaneActivity(pool.queue, slots=pool.slots, due_slots=0)
    return ScaledQueue(lane=pool.queue, pool=pool, activity=activity, **given)


class World:
    """Two lanes: one with eight slots, and a less urgent one with two. `in_time`: the system clock goes on."""

    def __init__(self, *, high: int = 8, kept: int = 2, most: int = 20, in_time: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.began_s, self.in_time = loop.time(), in_time
        self.waiting: dict[str, int] = {}
        self.held: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.added: list[HoldingPool] = []
        self.pools: dict[str, HoldingPool] = {}
        self.is_broker_away = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.now_ms = NOW_MS
        self.high = self._line("high", slots=high, kept=kept, most=2 * high)
        self.low = self._line("low", slots=2, kept=1, most=most)
        self.braked: set[str] = set()
        self.slots = Scaling(
            [self.high, self.low],
            depths=self._depths,
            ready=self._depths,
            waiting_for=lambda: self.held,
            now_ms=lambda: self.now_ms + in_time * round(1000 * (loop.time() - self.began_s)),
            is_braked=lambda lane: lane in self.braked,
        )

    def _line(self, lane: str, *, slots: int, kept: int, most: int) -> ScaledQueue:
        def more(count: int) -> HoldingPool:
            self.added.append(HoldingPool(lane, count))
            return self.added[-1]

        self.pools[lane] = HoldingPool(lane, slots)
        load = QueueLoad(slots=slots, reserved=kept, max_slots=most, target_wait_s=2 if self.in_time else 1)
        return _queue(pool=self.pools[lane], new_pool=more, load=load)

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


@in_virtual_time
async def test_lent_slots_are_taken_back_at_once_and_their_running_requests_end() -> None:
    world = World()
    async with world.lending():
        first, second = world.added
        assert world.low.shared.size == 2 + 4 + 2, "so many requests of the lane run at once now"
        assert world.low.activity.extra_slots == 6
        first.in_hand, second.in_hand = 4, 2
        world.pools["high"].in_hand = 8
        await until(lambda: first.is_stopped and second.is_stopped)
        ends_later = not first.is_over
        world.pools["high"].in_hand = 0
        await asyncio.sleep(8)
        assert world.open == [], "what still runs on them is not lent a second time"
        first.in_hand = 0
        await asyncio.sleep(0.3)
        assert world.open == [4], "before the broker is asked again"
        assert ends_later
        assert first.is_over
        second.in_hand = 0
        await until(lambda: world.open == [4, 2])


@pytest.mark.parametrize(("busy", "open_now"), [(1, [4, 2]), (2, [4, 1]), (3, [2, 1, 1]), (6, [1])])
@in_virtual_time
async def test_as_few_added_consumers_are_taken_back_as_free_enough_slots(busy: int, open_now: list[int]) -> None:
    world = World(high=9)
    async with world.lending():
        assert world.open == [4, 2, 1]
        world.pools["high"].in_hand = busy
        await asyncio.sleep(0.3)
        assert world.open == open_now


def job(bench: Bench, *, waited_ms: int | None, ago_ms: int = 0) -> Job:
    """`waited_ms`: None: it is not decoded yet."""
    found = bench.job()
    found.taken_ms -= ago_ms
    if waited_ms is not None:
        found.decoded = SimpleNamespace(request=SimpleNamespace(start_ms=found.taken_ms - waited_ms))  # type: ignore[assignment]
    return found


@in_virtual_time
async def test_if_the_broker_cannot_be_asked_nothing_changes() -> None:
    world = World()
    world.flood()
    world.is_broker_away = True
    async with world.watched():
        await until(lambda: len(world.asked) > 3)
        assert not world.added


@in_virtual_time
async def test_while_paused_all_added_slots_are_taken_back_and_none_is_added() -> None:
    world = World()
    async with world.lending():
        world.added[0].in_hand = 1
        await world.slots.pause("store: away")
        assert world.slots.is_paused
        assert not world.open
        assert world.low.added_slots == 0, "what still runs has no slots of the queue"
        assert (world.low.shared.size, world.low.activity.extra_slots) == (2, 0)
        world.added[0].in_hand = 0
        await asyncio.sleep(3)
        assert not world.open
        await world.slots.resume()
        await until(lambda: world.open)


@in_virtual_time
async def test_slots_that_end_do_not_count_as_those_for_which_requests_wait() -> None:
    world = World(high=20)
    world.flood()
    world.waiting["low"] = 8
    async with world.watched():
        await until(lambda: world.open == [8])
        world.added[0].in_hand = 8
        await world.slots.pause("store: away")
        world.waiting["low"] = 3
        await world.slots.resume()
        await until(lambda: world.open == [2, 1])


@in_virtual_time
async def test_a_pause_that_begins_while_the_broker_is_asked_adds_no_slots() -> None:
    world = World()
    world.flood()
    world.waiting["low"] = 0
    async with world.watched():
        await asyncio.sleep(5)
        world.answers.clear()
        world.waiting["low"] = 500
        asked = len(world.asked)
        await until(lambda: len(world.asked) > asked)
        await world.slots.pause("store: away")
        world.answers.set()
        await asyncio.sleep(3)
        assert not world.added


@in_virtual_time
async def test_on_a_stop_deliveries_that_wait_on_added_slots_are_returned() -> None:
    world = World()
    world.flood()
    running = asyncio.create_task(world.slots.run())
    await until(lambda: world.open)
    world.added[0].in_hand = 3
    await world.slots.stop()
    world.slots.give_back_waiting()
    await asyncio.wait_for(running, 30)


CRITICAL = QueueLoad(slots=16, reserved=2, max_slots=128, target_wait_s=1)
NORMAL = QueueLoad(slots=8, reserved=1, max_slots=64, target_wait_s=10)
BATCH = QueueLoad(slots=4, reserved=1, max_slots=32, target_wait_s=60)
FULL = {"critical": replace(CRITICAL, busiest=16), "normal": replace(NORMAL, busiest=8)}


def shares(**seen: QueueLoad) -> dict[str, ExtraSlots]:
    lanes = {"critical": CRITICAL, "normal": NORMAL, "batch": BATCH, **seen}
    return dict(zip(lanes, decide(list(lanes.values())), strict=True))


def flooded(lane: QueueLoad, **given: Any) -> QueueLoad:
    return replace(lane, **{"busiest": lane.slots, "waiting": 500, **given})


def test_nothing_is_lent_to_a_queue_without_waiting_requests() -> None:
    assert set(shares().values()) == {ExtraSlots()}


def test_a_flooded_lane_gets_the_idle_slots_of_all_others_except_their_reserve() -> None:
    assert shares(batch=flooded(BATCH))["batch"] == ExtraSlots(lent=14 + 7)


def test_slots_in_use_are_not_lent_and_the_reserve_is_kept_in_addition() -> None:
    found = shares(critical=replace(CRITICAL, busiest=9), normal=FULL["normal"], batch=flooded(BATCH))
    assert found["batch"] == ExtraSlots(lent=16 - 9 - 2)


def test_no_more_slots_are_lent_than_requests_wait() -> None:
    assert shares(batch=flooded(BATCH, waiting=3))["batch"] == ExtraSlots(lent=3)


def test_the_most_urgent_lane_borrows_first() -> None:
    found = shares(normal=flooded(NORMAL, waiting=10), batch=flooded(BATCH))
    assert (found["normal"], found["batch"]) == (ExtraSlots(lent=10), ExtraSlots(lent=4))


def test_slots_that_end_are_no_longer_idle_but_stay_with_their_queue() -> None:
    found = shares(normal=flooded(NORMAL, waiting=2, extra=4, ending=4, busiest=12), batch=flooded(BATCH))
    assert (found["normal"], found["batch"]) == (ExtraSlots(lent=6), ExtraSlots(lent=14 - 4 - 2))


def test_borrowed_slots_that_were_unused_for_a_while_are_returned() -> None:
    assert shares(batch=replace(BATCH, extra=10, grown=10, busiest=6))["batch"] == ExtraSlots(lent=2)
    assert shares(batch=replace(BATCH, extra=10, grown=10, busiest=3))["batch"] == ExtraSlots()


@pytest.mark.parametrize(("slots", "grown", "grows_to"), [(4, 0, 1), (4, 4, 6), (16, 0, 4), (16, 100, 112)])
def test_a_queue_that_waits_too_long_grows_by_a_quarter(slots: int, grown: int, grows_to: int) -> None:
    seen = QueueLoad(
        slots=slots, reserved=1, max_slots=128, target_wait_s=10, extra=grown, grown=grown, waiting=500, wait_s=10.1,
        busiest=slots + grown,
    )  # fmt: skip
    assert shares(**FULL, batch=seen)["batch"] == ExtraSlots(grown=grows_to)


@pytest.mark.parametrize(("most", "grown", "grows_to"), [(128, 0, 6), (32, 2, 7)])
def test_a_queue_that_also_borrows_grows_by_a_quarter_of_all_its_slots_up_to_slots_max(
    most: int, grown: int, grows_to: int
) -> None:
    seen = flooded(BATCH, max_slots=most, extra=21 + grown, grown=grown, busiest=25 + grown, wait_s=61)
    assert shares(batch=seen)["batch"] == ExtraSlots(lent=21, grown=grows_to)


def test_a_queue_does_not_grow_while_its_wait_is_within_the_target() -> None:
    assert shares(**FULL, batch=flooded(BATCH, wait_s=60))["batch"] == ExtraSlots()


def test_a_queue_does_not_grow_while_the_provider_is_the_limit() -> None:
    found = shares(**FULL, batch=flooded(BATCH, extra=5, grown=5, busiest=9, wait_s=300, bottleneck="itpm"))
    assert found["batch"] == ExtraSlots(grown=5, limit="itpm")


def test_a_queue_does_not_grow_beyond_slots_max_and_reports_that() -> None:
    at_most = flooded(BATCH, extra=28, grown=28, busiest=32, wait_s=300)
    assert shares(**FULL, batch=at_most)["batch"] == ExtraSlots(grown=28, limit=AT_MOST)


def test_a_lane_with_slots_max_equal_to_slots_gets_none_but_lends() -> None:
    fixed = replace(CRITICAL, max_slots=16)
    found = shares(critical=flooded(fixed, wait_s=5), batch=flooded(BATCH))
    assert found["critical"] == ExtraSlots(limit=AT_MOST)
    assert shares(critical=fixed, batch=flooded(BATCH))["batch"].lent == 21


def test_borrowed_slots_are_added_before_grown_ones() -> None:
    before = flooded(BATCH, extra=6, grown=6, busiest=10, waiting=0)
    assert shares(batch=before)["batch"] == ExtraSlots(lent=6, grown=0)


@st.composite
def seen(draw: st.DrawFn) -> QueueLoad:
    slots = draw(st.integers(1, 20))
    extra = draw(st.integers(0, 40))
    ending = draw(st.integers(0, extra))
    return QueueLoad(
        slots=slots,
        reserved=draw(st.integers(0, slots)),
        max_slots=slots + draw(st.integers(0, 60)),
        target_wait_s=10,
        extra=extra,
        grown=draw(st.integers(0, extra)),
        ending=ending,
        busiest=draw(st.integers(ending, slots + extra)),
        waiting=draw(st.integers(0, 50)),
        wait_s=draw(st.sampled_from([0.0, 10.0, 11.0])),
        bottleneck=draw(st.sampled_from([None, None, "rpm"])),
    )


@given(st.lists(seen(), min_size=1, max_size=6))
def test_no_reserve_is_lent_no_slot_is_lent_twice_and_no_queue_exceeds_slots_max(queues: list[QueueLoad]) -> None:
    found = decide(queues)

    lendable = sum(max(0, each.slots - each.reserved - each.busiest) for each in queues)
    ending = sum(each.ending for each in queues)
    newly = sum(max(0, share.lent - each.ending) for each, share in zip(queues, found, strict=True))
    assert newly <= max(0, lendable - ending)
    for each, share in zip(queues, found, strict=True):
        assert share.lent >= 0
        assert share.grown >= 0
        assert each.slots + share.total <= each.max_slots
        if each.bottleneck is not None or not each.waiting:
            assert share.total <= each.extra
            assert share.grown <= each.grown
        if each.wait_s <= each.target_wait_s:
            assert share.grown <= each.grown


@st.composite
def lanes_and_demands(draw: st.DrawFn) -> list[tuple[QueueLoad, int]]:
    lanes = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.integers(1, 16))
        lane = QueueLoad(
            slots=slots,
            reserved=draw(st.integers(0, slots)),
            max_slots=slots + draw(st.integers(0, 30)),
            target_wait_s=1,
            bottleneck=draw(st.sampled_from([None, None, "otpm"])),
        )
        lanes.append((lane, draw(st.integers(0, 60))))
    return lanes


@settings(deadline=None, max_examples=examples(60))
@given(lanes_and_demands(), st.sampled_from([0.0, 5.0]), st.integers(1, 4))
def test_under_constant_load_the_slots_stop_changing(
    world: list[tuple[QueueLoad, int]], wait_s: float, ask_every: int
) -> None:
    """Each lane has a constant number of requests that would run at the same time; decided repeatedly, as the loop
    does."""
    given_now = [ExtraSlots()] * len(world)
    used = [deque([lane.slots], maxlen=6) for lane, _ in world]
    history = []
    for look in range(160):
        found = []
        for (lane, demand), share, past in zip(world, given_now, used, strict=True):
            room = lane.slots + share.total
            past.append(min(demand, room))
            waits = max(0, demand - room) if look % ask_every == 0 else 0
            state: dict[str, Any] = {"extra": share.total, "grown": share.grown, "busiest": max(past), "waiting": waits}
            found.append(replace(lane, wait_s=wait_s, **state))
        before, given_now = given_now, decide(found)
        for (lane, _), was, share, past in zip(world, before, given_now, used, strict=True):
            if share.total > was.total:
                past.append(lane.slots + share.total)
        history.append([(share.lent, share.grown) for share in given_now])
    assert all(each == history[-1] for each in history[-40:])
    lent = sum(share.lent for share in given_now)
    assert lent <= sum(max(0, lane.slots - lane.reserved - min(demand, lane.slots)) for lane, demand in world)


@in_virtual_time
async def test_requests_that_run_on_slots_that_were_taken_back_do_not_make_their_queue_full() -> None:
    world = World()
    async with world.lending():
        full = [world.low.is_full]  # only its own two slots are in use
        for each in world.added:
            each.in_hand = each.slots
        assert [*full, world.low.is_full] == [False, True]
        world.high.pool.in_hand = 8  # type: ignore[misc]
        await until(lambda: not world.open)
        assert world.low.is_full, "its own two slots are in use"
        world.low.pool.in_hand = 1  # type: ignore[misc]
        assert not world.low.is_full


@in_virtual_time
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


@pytest.mark.parametrize(
    ("deliveries", "since_ms", "waits_s"),
    [
        ([], None, 0),
        ([(3000, 7000), (1000, 2000)], None, 7),
        ([(3001, 7000), (1000, 2000)], None, 2),
        ([(3001, 7000), (2500, None)], None, 0),
        ([], 9000, 9),
        ([(12_000, 1000), (5000, None), (4000, 1000)], 9000, 4),
        ([(12_000, 1000)], 9000, 9),
        ([(1000, 2000)], 9000, 2),
    ],
)
def test_the_wait_is_that_of_the_last_three_seconds_or_the_time_since_something_was_delivered(
    deliveries: list[tuple[int, int | None]], since_ms: int | None, waits_s: float
) -> None:
    """`deliveries`: how many ms ago each was, and how long it had waited."""
    side, bench = FakePool("low"), Bench()
    queue = _queue(pool=FakePool("low", 2), side=side)
    queue.waiting_since_ms = None if since_ms is None else NOW_MS - since_ms
    side.jobs = {job(bench, waited_ms=waited_ms, ago_ms=ago_ms) for ago_ms, waited_ms in deliveries}

    assert queue.wait_s(NOW_MS) == waits_s


def test_what_runs_of_the_side_queues_holds_slots_too() -> None:
    side = FakePool("low")
    queue = _queue(pool=FakePool("low", 2), side=side)
    side.in_hand = 1
    assert (queue.in_hand, queue.is_full) == (1, False)
    side.in_hand = 2
    assert (queue.in_hand, queue.is_full) == (2, True)


@in_virtual_time
async def test_a_queue_grows_if_nothing_was_delivered_for_too_long() -> None:
    world = World()
    world.flood()
    world.pools["high"].in_hand = 8
    async with world.watched():
        await until(lambda: len(world.asked) > 3)
        assert not world.added
        world.now_ms += 1100
        await until(lambda: world.added)


@in_virtual_time
async def test_a_lane_that_an_operator_pauses_loses_its_added_slots_at_once_and_is_not_starved() -> None:
    world = World()
    async with world.lending():
        for pool in world.added:
            pool.in_hand = pool.slots
        world.braked = {"low"}
        await until(lambda: not world.open)
        assert [pool.in_hand for pool in world.added] == [0, 0], "what has not begun is given back"
        asked = len(world.asked)
        await asyncio.sleep(5)
        assert (world.open, len(world.asked), world.low.activity.slots_limit) == ([], asked, None)
        world.braked = set()
        await until(lambda: world.open)


@in_virtual_time
async def test_slots_are_lent_when_they_were_idle_for_three_seconds_and_the_lane_keeps_one() -> None:
    world = World(high=4, kept=1, most=5, in_time=True)
    world.flood()
    async with world.watched():
        await asyncio.sleep(2.6)
        assert not world.added
        await asyncio.sleep(0.7)
        assert sum(each.slots for each in world.added) == 3
        assert all(3.0 <= each.began_s - world.began_s <= 3.01 for each in world.added)


@in_virtual_time
async def test_added_slots_that_no_request_used_for_three_seconds_are_given_up_and_forgotten() -> None:
    world = World()
    with structlog.testing.capture_logs() as logs:
        async with world.lending():
            world.waiting["low"] = 0
            await asyncio.sleep(2.9)
            assert world.open == [4, 2]
            await asyncio.sleep(0.4)
            assert (world.open, world.low.taken_back) == ([], [])
            await asyncio.sleep(5)
    assert [(each["lent"], each["grown"]) for each in logs if each["event"] == signals.SLOTS_CHANGED] == [
        (6, 0),
        (0, 0),
    ]


@in_virtual_time
async def test_what_limits_a_lane_is_logged_at_once_and_then_once_a_minute() -> None:
    world = World(high=4, kept=4, most=2, in_time=True)
    world.flood()
    with structlog.testing.capture_logs() as logs:
        async with world.watched():
            counts = []
            for seconds, limit in ((1, None), (1.5, AT_MOST), (56, AT_MOST), (3, AT_MOST)):
                await asyncio.sleep(seconds)
                counts.append(len([each for each in logs if each["event"] == signals.SLOTS_LIMITED]))
                for _ in range(4):  # the broker is asked at one of these
                    assert world.low.activity.slots_limit == limit
                    await asyncio.sleep(0.25)
        assert counts == [0, 1, 1, 2]
        assert {each["limit"] for each in logs} == {AT_MOST}
        assert [each["wait_s"] for each in logs] == pytest.approx([2, 62], abs=1.3)


@in_virtual_time
async def test_a_provider_that_was_the_bottleneck_within_two_seconds_still_is() -> None:
    world = World(high=4, kept=4, in_time=True)
    world.flood()
    world.held["low"] = "itpm"
    async with world.watched():
        await asyncio.sleep(10.1)
        assert not world.added
        world.held.clear()
        await asyncio.sleep(1.8)
        assert not world.added
        await asyncio.sleep(1.3)
        assert world.added


QUEUE = "lane.normal"


class Lane:
    """A lane of two slots, looked at four times a second."""

    def __init__(self, waiting: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting = waiting
        self.slots: QueueSlots = LaneSlots().queue(2)
        self.scouts: list[FakePool] = []
        queue = _queue(pool=FakePool(QUEUE, 2), shared=self.slots, new_scout=self._scout)
        self.scaling = Scaling([queue], depths=self._depths, ready=self._depths, now_ms=lambda: NOW_MS)
        self._running = asyncio.create_task(self.scaling.run())
        self.began_s = self.loop.time()

    def _scout(self) -> FakePool:
        self.scouts.append(FakePool(QUEUE))
        return self.scouts[-1]

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        return dict.fromkeys(queues, self.waiting)

    def fill(self) -> None:
        while self.slots.begin("crm"):
            pass

    async def end(self) -> None:
        await self.scaling.stop()
        await self._running


@in_virtual_time
async def test_a_scout_goes_out_after_a_second_in_which_no_slot_became_free() -> None:
    lane = Lane(waiting=1)
    await asyncio.sleep(5.1)
    lane.fill()
    full_s = lane.loop.time()
    await asyncio.sleep(3)
    (scout,) = lane.scouts
    assert 1.0 <= scout.began_s - full_s <= 1.26
    await lane.end()


@in_virtual_time
async def test_no_scout_goes_out_in_a_shorter_burst() -> None:
    lane = Lane(waiting=1)
    for _ in range(5):
        lane.fill()
        await asyncio.sleep(0.74)
        lane.slots.end("crm")
        await asyncio.sleep(0.3)
    assert not lane.scouts
    await lane.end()


@in_virtual_time
async def test_a_scout_comes_back_when_slots_were_free_for_two_seconds() -> None:
    lane = Lane(waiting=1)
    lane.fill()
    await asyncio.sleep(3.1)
    (scout,) = lane.scouts
    free_s = lane.loop.time()
    lane.slots.end("crm")
    await asyncio.sleep(1.5)
    assert not scout.stopped_s
    await asyncio.sleep(1.5)
    assert 1.75 <= scout.stopped_s - free_s <= 2.01
    await lane.end()


@pytest.mark.parametrize(("tenants", "goes"), [(("crm",), False), (("crm", "chat"), True)])
@in_virtual_time
async def test_while_slots_become_free_a_scout_goes_out_only_between_several_tenants(
    tenants: tuple[str, ...], goes: bool
) -> None:
    lane = Lane(waiting=1000)
    lane.slots.begin("crm")  # one slot is held, the other one turns over
    for _ in range(40):
        await asyncio.sleep(0.2)
        for tenant in (*tenants, *tenants):
            assert lane.slots.begin(tenant)
            lane.slots.end(tenant)
        assert lane.slots.begin("crm")
        await asyncio.sleep(0.06)
        lane.slots.end("crm")
    assert bool(lane.scouts) == goes
    await lane.end()


@pytest.mark.parametrize(("waiting", "goes"), [(1, False), (2, True)])
@in_virtual_time
async def test_in_a_slow_lane_of_one_tenant_a_scout_goes_out_for_more_than_begin_in_a_quarter_of_a_second(
    waiting: int, goes: bool
) -> None:
    lane = Lane(waiting=waiting)
    await asyncio.sleep(0.1)
    lane.fill()
    for _ in range(20):  # four calls a second
        await asyncio.sleep(0.25)
        lane.slots.end("crm")
        assert lane.slots.begin("crm")
    assert bool(lane.scouts) == goes
    await lane.end()


@in_virtual_time
async def test_while_a_scout_is_out_requests_over_their_tenants_share_are_set_aside() -> None:
    lane = Lane(waiting=10)
    lane.fill()
    await asyncio.sleep(2)
    assert lane.slots.sets_surplus_aside
    await lane.end()
    assert not lane.slots.sets_surplus_aside


@pytest.mark.parametrize(("waiting", "goes"), [(8, False), (9, True)])
@in_virtual_time
async def test_with_several_tenants_a_scout_goes_out_for_more_than_begin_in_a_second(waiting: int, goes: bool) -> None:
    lane = Lane(waiting=waiting)
    await asyncio.sleep(0.1)
    lane.fill()
    for _ in range(40):  # eight calls a second
        await asyncio.sleep(0.25)
        for before, tenant in (("crm", "chat"), ("chat", "crm")):
            lane.slots.end(before)
            assert lane.slots.begin(tenant)
    assert bool(lane.scouts) == goes
    await lane.end()


@in_virtual_time
async def test_no_scout_is_out_while_the_lane_is_paused() -> None:
    lane = Lane(waiting=10)
    lane.fill()
    await asyncio.sleep(2)
    await lane.scaling.pause("store is away")
    await asyncio.sleep(10)
    assert [each.is_over for each in lane.scouts] == [True]
    await lane.scaling.resume()
    await asyncio.sleep(2)
    assert [each.is_over for each in lane.scouts] == [True, False]
    await lane.end()


@in_virtual_time
async def test_no_scout_is_sent_while_no_request_waits() -> None:
    lane = Lane(waiting=0)
    lane.fill()
    await asyncio.sleep(10)
    assert not lane.scouts
    lane.waiting = 1
    await asyncio.sleep(0.5)
    assert len(lane.scouts) == 1
    await lane.end()
