"""After how long a scout goes out and comes back: in virtual time."""

import asyncio
from collections.abc import Mapping

import pytest

from consumers.fairness.lane_slots import LaneSlots, QueueSlots
from consumers.fairness.scouting import Scouted, Scouting
from tests.support.pools import FakePool
from tests.support.virtual_time import virtually

QUEUE = "lane.normal"


class Lane:
    """A lane of two slots, looked at four times a second."""

    def __init__(self, waiting: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting = waiting
        self.slots: QueueSlots = LaneSlots().queue(2)
        self.scouts: list[FakePool] = []
        self._scouting = Scouting([Scouted(queue=QUEUE, slots=self.slots, scout=self._scout)], depths=self._depths)
        self._running = asyncio.create_task(self._scouting.run())
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
        await self._scouting.stop()
        await self._running


def test_a_scout_goes_out_after_a_second_in_which_no_slot_became_free() -> None:
    async def story() -> None:
        lane = Lane(waiting=1)
        await asyncio.sleep(5.1)
        lane.fill()
        full_s = lane.loop.time()
        await asyncio.sleep(3)
        (scout,) = lane.scouts
        assert 1.0 <= scout.began_s - full_s <= 1.26
        await lane.end()

    virtually(story())


def test_a_scout_goes_out_for_calls_of_half_a_second_that_all_begin_and_end_together() -> None:
    """Every second look finds as many new requests as there are slots; over a second, it is half as many as looks."""

    async def story() -> None:
        lane = Lane(waiting=600)
        await asyncio.sleep(5.1)
        full_s = lane.loop.time()
        for _ in range(6):
            lane.fill()
            await asyncio.sleep(0.5)
            for _ in range(2):
                lane.slots.end("crm")
        (scout,) = lane.scouts
        assert 1.0 <= scout.began_s - full_s <= 1.26
        await lane.end()

    virtually(story())


def test_no_scout_goes_out_in_a_shorter_burst() -> None:
    async def story() -> None:
        lane = Lane(waiting=1)
        for _ in range(5):
            lane.fill()
            await asyncio.sleep(0.74)
            lane.slots.end("crm")
            await asyncio.sleep(0.3)
        assert not lane.scouts
        await lane.end()

    virtually(story())


def test_a_scout_comes_back_when_slots_were_free_for_two_seconds() -> None:
    async def story() -> None:
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

    virtually(story())


def test_no_scout_is_sent_while_no_request_waits() -> None:
    async def story() -> None:
        lane = Lane(waiting=0)
        lane.fill()
        await asyncio.sleep(10)
        assert not lane.scouts
        lane.waiting = 1
        await asyncio.sleep(0.5)
        assert len(lane.scouts) == 1
        await lane.end()

    virtually(story())


@pytest.mark.parametrize(("tenants", "goes"), [(("crm",), False), (("crm", "chat"), True)])
def test_while_slots_become_free_a_scout_goes_out_only_between_several_tenants(
    tenants: tuple[str, ...], goes: bool
) -> None:
    async def story() -> None:
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

    virtually(story())
