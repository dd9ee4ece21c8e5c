"""Setting aside: requests above a tenant's share go into a side queue; they are acknowledged only after the confirm."""

import dataclasses
from typing import Any

from consumers.job import Job
from consumers.outcomes import Deferred, Refused
from consumers.slots.admission import SideQueues, may_move
from lanekeeper.contract.names import REPLY_TRY, SENT_MS
from lanekeeper.contract.problems import PublishRefused
from tests.support.jobs import NAMES, NOW_MS, Bench
from topology.lanes import CRITICAL

LANE = dataclasses.replace(CRITICAL, side_queues=4)


class Side:
    """The side queues of a lane, with fakes."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.aside = SideQueues(LANE, publisher=self.bench.publisher, names=NAMES, now_ms=lambda: NOW_MS)

    def job(self, tenant: str, **properties: Any) -> Job:
        return self.bench.job(lane=LANE, user_id=tenant, headers={SENT_MS: NOW_MS - 50}, **properties)

    def held(self, tenant: str, queue: int) -> Job:
        delivery = self.bench.delivery(queue=NAMES.side(LANE.name, queue), user_id=tenant)
        return self.bench.job(lane=LANE, delivery=delivery)

    @property
    def used(self) -> list[str]:
        return [each.exchange for each in self.bench.publisher.sent]


async def test_a_request_is_set_aside_once_its_copy_is_confirmed_and_is_then_left_to_be_acknowledged() -> None:
    side = Side()
    assert await side.aside.put(side.job("crm")) is None
    assert side.bench.log == [f"confirmed: {side.used[0]}"]
    assert side.aside.has("crm")


async def test_a_full_side_queue_refuses_fresh_requests_and_defers_those_with_attempts() -> None:
    side = Side()
    side.bench.publisher.failing = {NAMES.side_exchange(each): PublishRefused("full") for each in range(4)}
    refused = await side.aside.put(side.job("crm"))
    assert isinstance(refused, Refused)
    assert side.bench.publisher.refused_within_s == [0], "the request is not held until there is room"
    assert refused.problem.code == "too_many_waiting"
    again = await side.aside.put(side.job("crm", exchange=NAMES.due_exchange))
    assert isinstance(again, Deferred)


async def test_a_request_that_expired_while_it_was_held_is_answered_instead_of_set_aside() -> None:
    side = Side()
    assert await side.aside.put(side.job("crm", expiration="100")) is None
    assert [each.message.expiration for each in side.bench.publisher.sent] == ["50"]
    outcome = await side.aside.put(side.job("crm", expiration="50"))
    assert isinstance(outcome, Refused)
    assert outcome.problem.code == "deadline_exceeded"
    assert len(side.used) == 1


async def test_a_request_that_is_refused_for_its_headers_is_not_set_aside() -> None:
    side = Side()
    assert may_move(side.job("crm"), NAMES)
    assert not may_move(side.job("crm", exchange=""), NAMES)
    assert not may_move(side.job("crm", routing_key="batch.crm.x"), NAMES)
    assert not may_move(side.job("crm", priority=30), NAMES)


async def test_the_highest_priority_may_be_set_aside_and_a_request_with_only_its_reply_left_may_not() -> None:
    side = Side()
    assert may_move(side.job("crm", priority=9), NAMES)
    assert not may_move(side.job("crm", priority=10), NAMES)
    back: dict[str, Any] = {"exchange": NAMES.due_exchange}
    assert may_move(side.bench.job(lane=LANE, headers={}, **back), NAMES)
    assert not may_move(side.bench.job(lane=LANE, headers={REPLY_TRY: 1}, **back), NAMES)
