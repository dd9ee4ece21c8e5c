"""A pool runs a task for each delivery. A failure affects no other delivery; a stop returns what has not ended."""

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typing_extensions import override

from consumers import settle
from consumers.capacity.activity import LaneActivity
from consumers.fairness.entrance import QueueEntrance
from consumers.fairness.lane_slots import Admission, LaneSlots
from consumers.job import Attempted, Job
from consumers.outcomes import Answered, Outcome, Refused
from consumers.pool import Pool
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import BrokerUnreachable, RequestProblem
from lanekeeper.telemetry import logs as loggers
from lanekeeper.telemetry.tracing import Tracing
from service.telemetry import logs
from tests.support.jobs import Bench, FakeDelivery
from tests.support.waiting import until
from topology.broker.deliveries import Deliveries
from topology.broker.session import ChannelLost, Delivery

ANSWERED = Answered(body=b"{}", model="m", provider="p")


class FakeDeliveries(Deliveries):
    """Sessions that the test fills; an exception in one ends it."""

    queue = "lane.critical"
    trouble = None
    prefetch = 4
    is_paused = False

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[FakeDelivery | Exception | None] = asyncio.Queue()
        self.sessions_opened = 0
        self._ended = False

    @override
    async def sessions(self) -> AsyncGenerator[Any, None]:
        while not self._ended:
            self.sessions_opened += 1
            yield self._arrived()

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
        entrance: QueueEntrance | None = None,
        tracing: Tracing | None = None,
        job_of: Callable[[Delivery], Job] | None = None,
    ) -> None:
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
            entrance=entrance,
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


async def test_deliveries_are_worked_on_concurrently_and_counted() -> None:
    bench = Bench()
    together = asyncio.Barrier(3)

    async def meet(job: Job) -> Outcome:
        await together.wait()
        return ANSWERED

    working = Working(bench, meet)
    working.deliver(*(bench.delivery(message_id=f"m-{at}") for at in range(3)))
    await until(lambda: working.activity.answered == 3)
    assert (working.activity.running, working.pool.running) == (0, 0)
    await working.stop()
    assert bench.log.count("ack") == 3


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


@pytest.mark.slow
async def test_a_request_that_cannot_even_be_dead_lettered_is_requeued_and_the_lane_continues() -> None:
    bench = Bench()
    bench.publisher.failing = {"lane.dead": TypeError("cannot be written")}

    async def fail(job: Job) -> Outcome:
        if job.id == "bad":
            raise ZeroDivisionError
        return ANSWERED

    working = Working(bench, fail)
    working.deliver(bench.delivery(message_id="bad"), bench.delivery(message_id="good"))
    await until(lambda: "reject" in bench.log and "ack" in bench.log)
    assert not working.running.done()
    assert working.activity.failed == 0
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


async def test_a_request_that_was_set_aside_is_acknowledged_and_neither_handled_nor_counted() -> None:
    class Moving(QueueEntrance):
        @override
        async def enter(self, job: Job) -> Admission:
            return Admission.ASIDE

        @override
        async def set_aside(self, job: Job) -> Outcome | None:
            bench.log.append("moved")
            return None

    bench = Bench()
    working = Working(bench, answer, entrance=Moving(LaneSlots().queue(4)))
    working.deliver(bench.delivery())
    await until(lambda: bench.log == ["moved", "ack"])
    await working.stop()
    assert working.activity.answered == 0


async def test_an_internal_error_while_setting_aside_requeues_the_delivery_and_the_lane_continues() -> None:
    class Broken(QueueEntrance):
        @override
        async def enter(self, job: Job) -> Admission:
            return Admission.ASIDE

        @override
        async def set_aside(self, job: Job) -> Outcome | None:
            raise ZeroDivisionError

    bench = Bench()
    working = Working(bench, answer, entrance=Broken(LaneSlots().queue(4)))
    working.deliver(bench.delivery(), bench.delivery())
    await until(lambda: bench.log == ["reject", "reject"])
    assert not working.running.done()
    await working.stop()


async def test_an_unsettled_delivery_is_not_counted() -> None:
    bench = Bench()
    bench.publisher.failing = {"": BrokerUnreachable("down")}
    working = Working(bench, answer)
    working.deliver(bench.delivery())
    await until(lambda: "nack" in bench.log or "reject" in bench.log)
    await working.stop()
    assert working.activity.answered == 0


async def test_a_lost_channel_ends_the_work_on_its_deliveries_and_a_new_one_is_opened() -> None:
    bench = Bench()
    cancelled: list[str] = []

    async def hold(job: Job) -> Outcome:
        if job.id == "after":
            return ANSWERED
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(job.id)
            raise
        return ANSWERED

    working = Working(bench, hold)
    working.deliver(bench.delivery(message_id="before"))
    await until(lambda: working.activity.running)
    working.deliver(ChannelLost("gone"), bench.delivery(message_id="after"))
    await until(lambda: working.activity.answered)
    assert cancelled == ["before"]
    assert not {"nack", "reject"} & set(bench.log), "nothing is given back on a lost channel"
    assert working.deliveries.sessions_opened == 2
    await working.stop()


async def test_stopping_lets_running_requests_end() -> None:
    bench = Bench()
    go = asyncio.Event()

    async def wait(job: Job) -> Outcome:
        await go.wait()
        return ANSWERED

    working = Working(bench, wait)
    working.deliver(bench.delivery())
    await until(lambda: working.activity.running)
    await working.pool.stop()
    await asyncio.sleep(0.01)
    assert not working.running.done()
    go.set()
    await asyncio.wait_for(working.running, 30)
    assert "ack" in bench.log


async def test_on_a_stop_requests_without_a_call_are_returned_at_once_and_those_with_a_call_end() -> None:
    bench = Bench()
    go = asyncio.Event()

    async def hold(job: Job) -> Outcome:
        if job.id.startswith("running"):
            job.attempted = Attempted(started_ms=1)
        await go.wait()
        return ANSWERED

    working = Working(bench, hold)
    names = ("running-1", "waiting-1", "running-2", "waiting-2", "without-a-slot-1", "without-a-slot-2")
    deliveries = {name: bench.delivery(message_id=name) for name in names}
    working.deliver(*deliveries.values())
    await until(lambda: working.pool.in_hand == 6)
    await working.pool.stop()
    working.pool.give_back_waiting()
    await until(lambda: working.pool.in_hand == 2)
    assert bench.log == ["nack"] * 4
    assert (working.activity.running, len(working.pool.jobs), working.running.done()) == (2, 2, False)
    go.set()
    await asyncio.wait_for(working.running, 30)
    assert bench.log.count("ack") == 2
    assert bench.log.count("nack") == 4


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
    working.pool.give_back_waiting()
    await asyncio.sleep(0.01)
    assert not working.running.done()
    confirmed.set()
    await asyncio.wait_for(working.running, 30)
    assert (bench.log.count("ack"), bench.log.count("nack")) == (1, 0)


async def test_a_delivery_that_arrives_after_everything_was_returned_is_not_started() -> None:
    bench = Bench()
    handled: list[str] = []

    async def handle(job: Job) -> Outcome:
        handled.append(job.id)
        return ANSWERED

    working = Working(bench, handle)
    working.pool._stopping = True
    working.pool.give_back_waiting()
    working.deliver(bench.delivery(), bench.delivery())
    await until(lambda: bench.log == ["nack"] * 2)
    await working.stop()
    assert not handled


async def test_requests_that_still_run_when_the_pool_is_cancelled_are_returned_once() -> None:
    bench = Bench()

    async def hang(job: Job) -> Outcome:
        await asyncio.sleep(60)
        return ANSWERED

    working = Working(bench, hang)
    working.deliver(bench.delivery(message_id="1"), bench.delivery(message_id="2"))
    await until(lambda: working.activity.running == 2)
    assert (working.pool.slots, working.pool.in_hand) == (4, 2)
    assert {job.id for job in working.pool.jobs} == {"1", "2"}
    await working.pool.stop()
    working.running.cancel()
    await asyncio.wait([working.running])
    assert working.running.cancelled()
    assert bench.log == ["nack", "nack"]
    assert (working.activity.running, working.pool.in_hand, len(working.pool.jobs)) == (0, 0, 0)


async def test_deliveries_after_a_pause_wait_for_a_slot() -> None:
    bench = Bench()
    go = asyncio.Event()

    async def wait(job: Job) -> Outcome:
        await go.wait()
        return ANSWERED

    working = Working(bench, wait)
    working.deliver(*(bench.delivery(message_id=f"m-{at}") for at in range(6)))
    await until(lambda: working.pool.in_hand == 6)
    assert working.activity.running == 4
    await working.pool.pause("store: away")
    await working.pool.resume()
    kept_paused = working.pool.is_paused
    assert kept_paused, "more is in hand than there are slots"
    working.deliveries.prefetch = 6  # no more than the prefetch
    await working.pool.resume()
    assert not working.pool.is_paused
    await working.pool.pause("store: away")
    go.set()
    await until(lambda: working.activity.answered == 6)
    await working.pool.resume()
    assert not working.pool.is_paused
    await working.stop()


async def test_a_request_that_waits_for_a_slot_is_returned_when_the_pool_stops_at_once() -> None:
    bench = Bench()

    async def hold(job: Job) -> Outcome:
        await asyncio.sleep(60)
        return ANSWERED

    working = Working(bench, hold)
    working.deliver(*(bench.delivery(message_id=f"m-{at}") for at in range(5)))
    await until(lambda: working.pool.in_hand == 5)
    await working.pool.stop()
    working.running.cancel()
    await asyncio.wait([working.running])
    assert bench.log.count("nack") == 5


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_each_log_line_of_a_request_has_its_id_lane_and_attempt() -> None:
    bench, out = Bench(), io.StringIO()
    together = asyncio.Barrier(2)
    log = loggers.logger()

    async def work(job: Job) -> Outcome:
        log.info("before the call")
        await together.wait()
        job.attempted = Attempted(started_ms=1)
        await asyncio.create_task(speak())
        return ANSWERED

    async def speak() -> None:
        log.info("in a task of its own")

    with logs.configured(service="s", level="debug", stream=out):
        working = Working(bench, work)
        working.deliver(
            bench.delivery(message_id="a", headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}),
            bench.delivery(message_id="b"),
        )
        await until(lambda: working.activity.answered == 2)
        log.info("about none")
        await working.stop()

    told = [each for each in lines(out) if each["event"] != "about none"]
    assert sorted((each["event"], each["request"], each["lane"], each["attempt"]) for each in told) == [
        (event, request, "critical", attempt)
        for event, attempt in (("before the call", 0), ("in a task of its own", 1), ("request.answered", 1))
        for request in ("a", "b")
    ]
    assert {each["request"]: each.get("trace_id") for each in told} == {"a": "a" * 32, "b": None}
    (other,) = (each for each in lines(out) if each["event"] == "about none")
    assert other.keys() == {"timestamp", "level", "event", "service"}


async def test_log_lines_of_a_request_that_starts_a_trace_have_its_trace_id() -> None:
    bench, out = Bench(), io.StringIO()
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    with logs.configured(service="s", level="debug", stream=out):
        working = Working(bench, answer, tracing=Tracing(provider))
        working.deliver(bench.delivery(message_id="a"))
        await until(lambda: working.activity.answered == 1)
        await working.stop()

    (span,) = (each for each in spans.get_finished_spans() if each.name == "process lane.critical")
    assert span.context is not None
    assert [each["trace_id"] for each in lines(out)] == [f"{span.context.trace_id:032x}"]


async def test_a_log_call_below_the_level_computes_no_fields() -> None:
    class Subject:
        asked = 0

        def log_fields(self) -> dict[str, str]:
            self.asked += 1
            return {"request": "a"}

    subject, out = Subject(), io.StringIO()
    with logs.configured(service="s", level="info", stream=out), loggers.about(subject):
        loggers.logger().debug("not read")
        assert subject.asked == 0
        loggers.logger().info("read")

    assert [each["request"] for each in lines(out)] == ["a"]
