"""A queue holds requests ready for its next free slots only while its calls are short and more requests wait."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from consumers.capacity import ahead as ahead_module
from consumers.capacity.ahead import Ahead, Fast, ahead
from lanekeeper.contract.problems import BrokerUnreachable
from tests.support.waiting import until

QUEUE = "lane.batch"


class FakeHolding:
    """Runs until it is told to stop; if it `holds` a request, until that was given back."""

    def __init__(self, *, holds: bool) -> None:
        self._stopped = asyncio.Event()
        self._returned = asyncio.Event()
        self.is_at_work = False
        if not holds:
            self._returned.set()

    async def run(self) -> None:
        self.is_at_work = True
        await self._stopped.wait()
        await self._returned.wait()
        self.is_at_work = False

    async def stop(self) -> None:
        self._stopped.set()

    def give_back_waiting(self) -> None:
        self._returned.set()


class Lane:
    """A lane of two slots. At each question how many requests wait, `turns` more requests a slot have begun."""

    def __init__(self, *, turns: float = 4.0, waiting: int = 100) -> None:
        self.slots = 2
        self.turns = turns
        self.waiting = waiting
        self.made: list[FakeHolding] = []
        self.asked = 0
        self.looks = 0
        self.is_unreachable = False
        self.holds = False
        self._begun = 0.0
        self.ahead = Ahead([Fast(queue=QUEUE, bench=self, more=self._more)], depths=self._depths)

    @property
    def begun(self) -> int:
        """Read twice at each look: once to compare, once to remember."""
        self.looks += 1
        self._begun += self.turns * self.slots if self.looks % 2 else 0
        return round(self._begun)

    @property
    def at_work(self) -> int:
        return sum(each.is_at_work for each in self.made)

    def _more(self) -> FakeHolding:
        self.made.append(FakeHolding(holds=self.holds))
        return self.made[-1]

    async def _depths(self, queues: list[str]) -> Mapping[str, int]:
        self.asked += 1
        if self.is_unreachable:
            raise BrokerUnreachable("down")
        return {QUEUE: self.waiting}

    @asynccontextmanager
    async def looked_at(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.ahead.run())
        try:
            yield
        finally:
            await self.ahead.stop()
            await asyncio.wait_for(running, 30)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "LOOK_EVERY_S", 0.005)


@pytest.mark.parametrize(("slots", "held"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 2), (1000, 2)])
def test_one_request_or_two_are_held_however_many_slots_there_are(slots: int, held: int) -> None:
    assert ahead(slots) == held


async def test_requests_are_held_while_calls_are_short_and_more_wait() -> None:
    lane = Lane()
    async with lane.looked_at():
        await until(lambda: lane.at_work == 1)
        lane.turns = 0.5  # a call takes half a second now
        await until(lambda: lane.at_work == 0)
        lane.turns = 4
        await until(lambda: lane.at_work == 1)
    assert len(lane.made) == 2
    assert lane.at_work == 0


async def test_none_is_held_while_calls_take_long_and_the_broker_is_not_asked() -> None:
    lane = Lane(turns=1.5)
    async with lane.looked_at():
        await until(lambda: lane.looks > 20)
    assert not lane.made
    assert not lane.asked


async def test_none_is_held_while_no_more_requests_wait_than_there_are_slots() -> None:
    lane = Lane(waiting=2)
    async with lane.looked_at():
        await until(lambda: lane.asked > 2)
        assert not lane.made
        lane.waiting = 3
        await until(lambda: lane.at_work == 1)
        lane.waiting = 0
        await until(lambda: lane.at_work == 0)


async def test_a_broker_that_does_not_answer_changes_nothing() -> None:
    lane = Lane()
    lane.is_unreachable = True
    async with lane.looked_at():
        await until(lambda: lane.asked > 2)
        assert not lane.made
        lane.is_unreachable = False
        await until(lambda: lane.at_work == 1)


async def test_none_is_held_during_a_pause() -> None:
    lane = Lane()
    async with lane.looked_at():
        await until(lambda: lane.at_work == 1)
        await lane.ahead.pause("store is away")
        await until(lambda: lane.at_work == 0)
        asked = lane.asked
        await until(lambda: lane.asked > asked + 2)
        assert lane.at_work == 0
        await lane.ahead.resume()
        await until(lambda: lane.at_work == 1)


async def test_after_a_stop_what_is_held_is_given_back() -> None:
    lane = Lane()
    lane.holds = True
    async with lane.looked_at():
        await until(lambda: lane.at_work == 1)
        await lane.ahead.stop()
        assert lane.at_work == 1
        lane.ahead.give_back_waiting()
    assert lane.at_work == 0
