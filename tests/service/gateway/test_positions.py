"""The place of a request in its lane, and when it may start: told where they are known."""

import pytest
from typing_extensions import override

from consumers.capacity import pace
from consumers.state.base import StoreUnavailable, Taken
from lanekeeper import Client
from lanekeeper.amqp.depth import Depth
from service.gateway import positions
from service.gateway.positions import Place, Positions


class Lane(Client):
    """Its queue has this depth."""

    def __init__(self, ready: int | None, *, consumers: int = 1) -> None:
        super().__init__("amqp://a:b@127.0.0.1:1/")
        self.ready = ready
        self.consumers = consumers
        self.asked = 0

    @override
    async def depth(self, lane: str) -> Depth | None:
        self.asked += 1
        return None if self.ready is None else Depth(self.ready, self.consumers)


class Counts:
    """So many requests have ended in the last half minute."""

    def __init__(self, used: float | None) -> None:
        self.used = used

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        if self.used is None:
            raise StoreUnavailable("away")
        return Taken(granted=True, used=self.used, resets_in_s=pace.PERIOD_S / 2)

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        raise NotImplementedError


async def test_a_start_is_predicted_from_the_pace_of_the_lane() -> None:
    assert await Positions(Lane(12), Counts(60)).of("batch") == Place(11, starts_in_s=6)


async def test_the_last_request_of_a_lane_whose_pace_is_unknown_has_a_position_alone() -> None:
    for used in (0, None):
        assert await Positions(Lane(1), Counts(used)).of("batch") == Place(0, starts_in_s=None)


async def test_no_start_is_predicted_while_no_worker_consumes_the_lane() -> None:
    assert await Positions(Lane(12, consumers=0), Counts(60)).of("batch") == Place(11, starts_in_s=None)


async def test_where_the_depth_is_unknown_or_the_request_is_not_in_the_queue_there_is_no_place() -> None:
    for ready in (None, 0):
        assert await Positions(Lane(ready), Counts(60)).of("batch") is None


async def test_a_pace_is_remembered_while_it_cannot_be_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "AGE_S", 0)
    counts = Counts(30)
    own = Positions(Lane(1), counts)
    await own.of("batch")
    counts.used = 0

    assert await own.of("batch") == Place(0, starts_in_s=1)
    monkeypatch.setattr(positions, "PACE_AGE_S", 0)
    assert await own.of("batch") == Place(0, starts_in_s=None)


async def test_many_who_ask_are_one_question_a_second() -> None:
    lane = Lane(3)
    own = Positions(lane, Counts(0))
    for _ in range(50):
        await own.of("batch")

    assert lane.asked == 1
