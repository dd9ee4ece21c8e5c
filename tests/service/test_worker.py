"""A worker stops in time, even if the broker does not answer; it ends if one of its lanes ends."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from consumers.brake import Brake
from consumers.claiming import Claiming
from consumers.settle import Settler
from consumers.slots.activity import LaneActivity
from consumers.slots.pausing import Pausing
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import BrokerUnreachable
from service.worker import running as worker
from service.worker.assembly import BrokerParts, Budgeting, Worker
from tests.support.memory_store import MemoryStore


class NoConnection:
    async def channel(self, **_: Any) -> None:
        raise BrokerUnreachable("no connection")


class FakePool:
    """Runs until it is stopped, or ends in the given way."""

    trouble: str | None = None
    brake: str | None = None

    def __init__(self, queue: str, *, ends: BaseException | None = None, stops: bool = True) -> None:
        self.queue = queue
        self.was_cancelled = False
        self.gave_back = False
        self.may_stop = asyncio.Event()
        """`stop` waits for it."""
        if stops:
            self.may_stop.set()
        self._ends = ends
        self._stop = asyncio.Event()

    async def run(self, **_: str) -> None:
        if self._ends is not None:
            raise self._ends
        try:
            await self._stop.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    @property
    def deliveries(self) -> "FakePool":
        return self

    @property
    def is_paused(self) -> bool:
        return False

    async def stop(self) -> None:
        await self.may_stop.wait()
        self._stop.set()

    def give_back_waiting(self) -> None:
        self.gave_back = True


def parts(*pools: FakePool, watchdog: object = None) -> Worker:
    broker = SimpleNamespace(names=Names(), consuming=NoConnection(), watch=FakePool("watch"))
    settler = SimpleNamespace(claiming=Claiming(MemoryStore()), bodies=SimpleNamespace(own=None))
    fakes: dict[str, Any] = {
        name: FakePool(name)
        for name in (
            *("lengths", "control", "dead_letters", "scaling", "watchdog", "posting", "gatherer", "collector"),
            "group_ends",
        )
    }
    fakes["schedules"] = SimpleNamespace(specs=())
    if watchdog is not None:
        fakes["watchdog"] = watchdog
    return Worker(
        lanes=(),
        broker=cast(BrokerParts, broker),
        store=MemoryStore(),
        settler=cast(Settler, settler),
        budgeting=cast(Budgeting, None),
        brake=Brake(),
        pausing=Pausing({}),
        pools=cast(Any, pools),
        lane_slots={},
        activities=(LaneActivity("critical", slots=1, due_slots=1),),
        simulated=False,
        **fakes,
    )


def run(*pools: FakePool, stop: asyncio.Event, grace_s: float = 5) -> "asyncio.Task[None]":
    return asyncio.create_task(worker.run(parts(*pools), stop=stop, grace_s=grace_s))


async def test_on_a_stop_deliveries_are_returned_only_after_all_our_consumers_have_ended() -> None:
    stop = asyncio.Event()
    quick, slow = FakePool("quick"), FakePool("slow", stops=False)
    working = run(quick, slow, stop=stop)
    stop.set()
    await asyncio.sleep(0.05)
    early = quick.gave_back
    slow.may_stop.set()
    await asyncio.wait_for(working, 30)
    assert (early, quick.gave_back, slow.gave_back) == (False, True, True)


async def test_a_lane_that_fails_ends_the_worker() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(run(FakePool("a", ends=ZeroDivisionError()), FakePool("b"), stop=asyncio.Event()), 30)
    assert failed.group_contains(ZeroDivisionError)


async def test_a_lane_that_is_cancelled_unexpectedly_ends_the_worker() -> None:
    """An unexpected CancelledError ends a task without any message."""
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(run(FakePool("a", ends=asyncio.CancelledError()), stop=asyncio.Event()), 30)
    assert failed.group_contains(RuntimeError, match="pool a ended by itself")


async def test_the_worker_is_ready_when_every_queue_is_consumed() -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    late = FakePool("late")
    late.trouble = "not consuming yet"
    working = asyncio.create_task(worker.run(parts(FakePool("a"), late), stop=stop, grace_s=5, on_ready=ready.set))
    await asyncio.sleep(0.05)
    assert not ready.is_set()
    late.trouble = None
    await asyncio.wait_for(ready.wait(), 30)
    stop.set()
    await asyncio.wait_for(working, 30)


async def test_a_worker_whose_lane_has_lost_slots_stops_in_the_ordinary_way_and_ends_with_an_error() -> None:
    stop, pool = asyncio.Event(), FakePool("a")
    watchdog = FakePool("watchdog", ends=None)
    watchdog.trouble = "lane critical has lost slots"
    await watchdog.stop()  # its `run` returns
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(worker.run(parts(pool, watchdog=watchdog), stop=stop, grace_s=5), 30)
    assert failed.group_contains(RuntimeError, match="has lost slots")
    assert (pool.gave_back, pool.was_cancelled) == (True, False)
