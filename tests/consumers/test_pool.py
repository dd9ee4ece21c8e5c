"""A pool runs a task for each delivery. A failure affects no other delivery; a stop returns what has not ended."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from typing_extensions import override

from consumers.job import Attempted, Job
from consumers.outcomes import Answered, Outcome, Refused
from consumers.pool import Pool
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import Admission, LaneSlots, QueueAdmitter
from consumers.state.base import Pause
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import Bench, FakeDelivery
from tests.support.waiting import until
from topology.broker.consume import Deliveries, Delivery

ANSWERED = Answered(body=b"{}", model="m", provider="p")


class FakeDeliveries(Deliveries):
    """Sessions that the test fills; an exception in one ends it."""

    queue = "lane.critical"
    trouble = None
    prefetch = 4
    is_paused = False
    is_short_of_room = False

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[FakeDelivery | Exception | None] = asyncio.Queue()
        self.waiting: list[FakeDelivery] = []
        self.looks = 0
        self.keeps_channel: list[bool] = []
        self.is_resizing = False
        self._ended = False

    @override
    async def sessions(self) -> AsyncGenerator[Any, None]:
        while not self._ended:
            yield self._arrived()

    @override
    async def front(self) -> AsyncGenerator[Any, None]:
        self.looks += 1
        for each in self.waiting:
            yield each

    async def _arrived(self) -> AsyncIterator[FakeDelivery]:
        while (found := await self.arriving.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    @override
    async def pause(self, reason: str) -> None:
        self.is_paused = True

    @override
    async def resume(self) -> None:
        self.is_paused = False

    @override
    async def resize(self, prefetch: int) -> None:
        self.is_resizing = prefetch != self.prefetch
        self.prefetch = prefetch

    @override
    async def resized(self) -> None:
        self.is_resizing = False

    @override
    async def consume_again(self, *, keeps_channel: bool) -> None:
        self.keeps_channel.append(keeps_channel)

    @override
    async def stop(self) -> None:
        self._ended = True
        self.arriving.put_nowait(None)


class Working:
    """A running pool with fakes."""

    def __init__(
        self,
        bench: Bench,
        handle: Callable[[Job], Awaitable[Outcome]],
        *,
        admitter: QueueAdmitter | None = None,
        tracing: Tracing | None = None,
        job_of: Callable[[Delivery], Job] | None = None,
    ) -> None:
        self.pause: Pause | None = None
        self.bench = bench
        self.deliveries = FakeDeliveries()
        self.activity = LaneActivity("critical", slots=4, due_slots=1)
        self.pool = Pool(
            self.deliveries,
            job_of=job_of or (lambda delivery: bench.job(delivery=delivery)),
            handle=handle,
            settler=bench.settler,
            activity=self.activity,
            tracing=tracing or Tracing(),
            admitter=admitter,
            brake=lambda: self.pause,
        )
        self.running = asyncio.create_task(self.pool.run())

    def deliver(self, *found: FakeDelivery | Exception) -> None:
        for each in found:
            self.deliveries.arriving.put_nowait(each)

    async def stop(self) -> None:
        await self.pool.stop()
        await asyncio.wait_for(self.running, 30)


async def answer(job: Job) -> Outcome:
    return ANSWERED


pytestmark = pytest.mark.usefixtures("returned_at_once")


async def test_an_unforeseen_error_dead_letters_its_request_and_affects_no_other() -> None:
    bench = Bench()

    async def fail(job: Job) -> Outcome:
        if job.id == "bad":
            raise ZeroDivisionError("secret words")
        return ANSWERED

    working = Working(bench, fail)
    working.deliver(bench.delivery(message_id="bad"), bench.delivery(message_id="good"))
    await until(lambda: (working.activity.failed, working.activity.answered) == (1, 1))
    await working.stop()
    dead = bench.to("lane.dead")
    assert (dead.message_id, dead.headers[n.DEAD_CODE]) == ("bad", "internal")
    assert "secret" not in dead.headers[n.DEAD_DETAIL]


async def test_a_delivery_that_cannot_become_a_job_is_requeued() -> None:
    def fail(delivery: Delivery) -> Job:
        raise ValueError("a fault")

    bench = Bench()
    working = Working(bench, answer, job_of=fail)
    working.deliver(bench.delivery())
    await until(lambda: bench.log == ["reject"])
    assert working.activity.running == 0
    await working.stop()


async def test_a_request_that_may_neither_wait_nor_be_moved_is_returned_to_its_queue() -> None:
    class Full(QueueAdmitter):
        @override
        async def admit(self, job: Job) -> Admission:
            return Admission.BACK

    bench = Bench()
    working = Working(bench, answer, admitter=Full(LaneSlots().queue(4)))
    working.deliver(bench.delivery())
    await until(lambda: bench.log == ["nack"])
    await working.stop()


async def test_a_request_that_gets_its_turn_while_it_is_returned_does_not_start() -> None:
    bench = Bench()
    turn = asyncio.Event()

    async def begin(job: Job) -> Outcome:
        await turn.wait()
        job.attempted = Attempted(started_ms=1)
        return ANSWERED

    working = Working(bench, begin)
    working.deliver(*(bench.delivery(message_id=f"m-{at}") for at in range(5)))
    await until(lambda: working.pool.in_hand == 5)
    await working.pool.stop()
    turn.set()
    working.pool.give_back_waiting()
    await asyncio.wait_for(working.running, 30)
    assert bench.log == ["nack"] * 5


async def test_a_request_that_is_still_leaving_when_a_pause_ends_is_returned() -> None:
    """It releases its claim before, and the store may be slow."""
    bench, released, is_leaving = Bench(), asyncio.Event(), asyncio.Event()

    async def wait(job: Job) -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            is_leaving.set()
            await released.wait()
        raise AssertionError

    working = Working(bench, wait)
    working.deliver(bench.delivery())
    await until(lambda: working.pool.running)
    working.pause = Pause(kind="lane", name="critical", since_ms=1, until_ms=None, who="", why="")
    await working.pool.pause("by an operator")
    await is_leaving.wait()
    working.pause = None
    await working.pool.resume()
    released.set()
    await until(lambda: not working.pool.in_hand)

    assert bench.log == ["nack"]
    await working.stop()


async def test_a_pool_whose_late_requests_cannot_be_settled_holds_up_no_resume_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("consumers.pool.ENDED_AT_ONCE", 1)
    bench, confirmed = Bench(), asyncio.Event()

    async def publish(*_: Any, **__: Any) -> None:
        await confirmed.wait()

    bench.publisher.publish_surely = publish  # type: ignore[method-assign]
    working = Working(bench, answer)
    working.deliveries.waiting = [bench.delivery(), bench.delivery()]
    for each in working.deliveries.waiting:
        each.times_delivered = 100
    await working.pool.pause("by an operator")
    ending = asyncio.create_task(working.pool.end_late())
    await until(lambda: working.deliveries.looks)
    await asyncio.wait_for(working.pool.resume(), 5)
    is_paused = [working.pool.is_paused]
    confirmed.set()
    await ending
    await working.pool.resume()  # it is asked again
    assert [*is_paused, working.pool.is_paused] == [True, False]
    await working.stop()


async def test_on_a_stop_a_request_with_an_outcome_is_settled_although_others_are_returned() -> None:
    bench = Bench()
    confirmed = asyncio.Event()

    async def refuse(job: Job) -> Outcome:
        return Refused(RequestProblem("deadline_exceeded", "too late"))

    settling = asyncio.Event()

    async def publish(*_: Any, **__: Any) -> None:
        settling.set()
        await confirmed.wait()

    bench.publisher.publish_surely = publish  # type: ignore[method-assign]
    working = Working(bench, refuse)
    working.deliver(bench.delivery())
    await asyncio.wait_for(settling.wait(), 30)
    await working.pool.stop()
    assert working.pool.trouble == "stopping"
    working.pool.give_back_waiting()
    await asyncio.sleep(0.01)
    assert not working.running.done()
    confirmed.set()
    await asyncio.wait_for(working.running, 30)
    assert (bench.log.count("ack"), bench.log.count("nack")) == (1, 0)


async def test_an_internal_error_while_setting_aside_requeues_the_delivery_and_the_lane_continues() -> None:
    class Broken(QueueAdmitter):
        @override
        async def admit(self, job: Job) -> Admission:
            return Admission.ASIDE

        @override
        async def set_aside(self, job: Job) -> Outcome | None:
            raise ZeroDivisionError

    bench = Bench()
    working = Working(bench, answer, admitter=Broken(LaneSlots().queue(4)))
    working.deliver(bench.delivery(), bench.delivery())
    await until(lambda: bench.log == ["reject", "reject"])
    assert not working.running.done()
    await working.stop()


async def test_a_pool_is_made_smaller_once_it_holds_no_more_and_larger_only_if_it_is_full() -> None:
    bench, may_end = Bench(), asyncio.Event()

    async def wait(job: Job) -> Outcome:
        await may_end.wait()
        return ANSWERED

    working = Working(bench, wait)
    for number in range(3):
        working.deliver(bench.delivery(message_id=f"m-{number}"))
    await until(lambda: working.pool.in_hand == 3)
    await working.pool.resize(6)
    assert working.deliveries.prefetch == 4, "nothing waits at the broker"
    await working.pool.resize(2)
    assert (working.deliveries.prefetch, working.deliveries.is_resizing) == (2, True)
    may_end.set()
    await until(lambda: working.pool.in_hand == 0)
    await working.pool.resize(2)
    assert not working.deliveries.is_resizing
    await working.stop()
