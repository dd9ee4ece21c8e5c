"""A pool runs a task for each delivery. A failure affects no other delivery; a stop returns what has not ended."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from typing_extensions import override

from consumers import settle
from consumers.job import Attempted, Job, Source
from consumers.outcomes import Answered, Outcome, Refused
from consumers.pool import Pool
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import Admission, LaneSlots, QueueAdmitter
from consumers.state.base import Pause
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import Bench, FakeDelivery, a_pause
from tests.support.waiting import until
from topology.broker.consume import Deliveries, Delivery
from topology.lanes import CRITICAL

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
        self.sessions_opened = 0
        self.waiting: list[FakeDelivery] = []
        self.looks = 0
        self.keeps_channel: list[bool] = []
        self.is_resizing = False
        self._ended = False

    @override
    async def sessions(self) -> AsyncGenerator[Any, None]:
        while not self._ended:
            self.sessions_opened += 1
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


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "RETURN_AFTER_S", 0)


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


async def test_a_consumer_begins_again_on_the_same_channel_only_while_a_delivery_is_in_hand() -> None:
    bench, may_end = Bench(), asyncio.Event()

    async def wait(job: Job) -> Outcome:
        await may_end.wait()
        return ANSWERED

    working = Working(bench, wait)
    await working.pool.consume_again()
    working.deliver(bench.delivery())
    await until(lambda: working.pool.in_hand == 1)
    await working.pool.consume_again()
    assert working.deliveries.keeps_channel == [False, True]
    may_end.set()
    await working.stop()


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


async def test_a_pool_whose_lane_an_operator_pauses_gives_back_what_has_not_begun_and_is_well() -> None:
    bench = Bench()
    may_end = asyncio.Event()

    async def wait(job: Job) -> Outcome:
        if job.id == "begun":
            job.attempted = Attempted(started_ms=1)
        await may_end.wait()
        return ANSWERED

    working = Working(bench, wait)
    working.deliver(bench.delivery(message_id="begun"), bench.delivery(message_id="waits"))
    await until(lambda: working.pool.running == 2)
    await working.pool.pause("store: away")  # what holds all lanes gives nothing back
    assert (working.pool.is_paused, bench.log) == (True, [])

    working.pause = a_pause()
    working.deliveries.trouble = "paused: store"  # type: ignore[assignment]
    assert (working.pool.is_paused, working.pool.trouble) == (False, None)
    await working.pool.pause(working.pool.brake or "")
    working.deliver(bench.delivery(message_id="late"))
    await until(lambda: bench.log.count("nack") == 2)
    assert (working.pool.is_paused, working.pool.running) == (True, 1)

    working.pause = None
    await working.pool.resume()
    assert not working.pool.is_paused
    may_end.set()
    working.deliver(bench.delivery(message_id="new"))
    await until(lambda: working.activity.answered == 2)
    await working.stop()
    assert bench.log.count("nack") == 2


async def nothing(_: Job) -> Outcome:
    raise AssertionError


def job_now(delivery: Delivery) -> Job:
    return Job(delivery, lane=CRITICAL, source=Source.REQUESTER, taken_ms=time.time_ns() // 1_000_000)


async def test_of_a_paused_lane_only_what_is_late_is_worked_on_and_what_was_returned_often_is_put_off() -> None:
    bench = Bench()

    async def refuse(job: Job) -> Outcome:
        return Refused(RequestProblem("deadline_exceeded", job.id))

    working = Working(bench, refuse, admitter=QueueAdmitter(LaneSlots().queue(0)), job_of=job_now)
    working.pause = a_pause()
    await working.pool.pause("paused")
    sent = {n.SENT_MS: time.time_ns() // 1_000_000}
    late = {**sent, n.SENT_MS: sent[n.SENT_MS] - 5000, n.DEADLINE_MS: 4000}
    worn = bench.delivery(message_id="worn", headers=sent)
    worn.times_delivered = 6
    working.deliveries.waiting = [
        bench.delivery(message_id="waits", headers=sent),
        bench.delivery(message_id="late", headers=late),
        worn,
        bench.delivery(message_id="wrong", headers={n.DEADLINE_MS: "soon"}),
    ]
    await working.pool.end_late()
    assert (working.activity.failed, working.activity.deferred_for["paused"]) == (1, 1)
    assert (bench.log.count("ack"), bench.log.count("nack")) == (2, 2)

    working.deliveries.waiting = [bench.delivery(headers=sent) for _ in range(210)]
    await working.pool.end_late()
    await working.pool.end_late()
    assert bench.log.count("nack") == 202
    assert working.deliveries.looks == 2, "none of them can be late yet"
    await working.stop()


async def test_a_look_at_the_front_of_a_paused_lane_holds_a_few_large_messages() -> None:
    bench = Bench()

    working = Working(bench, nothing, admitter=QueueAdmitter(LaneSlots().queue(0)), job_of=job_now)
    working.pause = a_pause()
    await working.pool.pause("paused")
    body = bytes(8 * 1024 * 1024 + 1)
    sent = {n.SENT_MS: time.time_ns() // 1_000_000}
    working.deliveries.waiting = [bench.delivery(body=body, headers=sent) for _ in range(3)]
    await working.pool.end_late()
    assert bench.log.count("nack") == 2
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


async def test_slots_are_given_back_by_those_who_had_one() -> None:
    left: list[str] = []

    class Asked(QueueAdmitter):
        @override
        async def admit(self, job: Job) -> Admission:
            return Admission[job.id]

        @override
        async def set_aside(self, job: Job) -> Outcome | None:
            return None if job.id == "ASIDE" else ANSWERED

        @override
        def leave(self, job: Job) -> None:
            left.append(job.id)

    def job_of(delivery: Delivery) -> Job:
        if delivery.message.message_id == "unread":
            raise ValueError("a fault")
        return bench.job(delivery=delivery)

    bench = Bench()
    working = Working(bench, answer, admitter=Asked(LaneSlots().queue(4)), job_of=job_of)
    for id in ("BEGIN", "BACK", "ASIDE", "unread"):
        working.deliver(bench.delivery(message_id=id))
        await until(
            lambda: working.pool.in_hand == 0 and working.pool.taken > 0 and working.deliveries.arriving.empty()
        )
    await working.stop()
    assert left == ["BEGIN"]
    assert [each for each in bench.log if each in {"ack", "nack", "reject"}] == ["ack", "nack", "ack", "reject"]
