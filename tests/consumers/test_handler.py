"""The pipeline: each step, in order, can end a request, and each gate gives back what it took."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from consumers.attempt import SLACK_S
from consumers.capacity.pausing import Pausing
from consumers.chain import Route
from consumers.failures import UNREACHABLE, OverloadedError, RejectedError, TransientError
from consumers.gates.base import Gate
from consumers.gates.claim import DEATHS_AT_MOST, SUSPECT_FROM, ClaimGate
from consumers.gates.deadline import DeadlineGate
from consumers.gates.schedule import ScheduleGate
from consumers.job import ATTEMPT_WITHIN_S, CLAIM_WITHIN_S, STORE_WITHIN_S, Decoded, Job
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.providers.base import Answer, OnEvent
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Registry
from consumers.replies.parts import Parts
from consumers.state.base import Completion
from lanekeeper.amqp.confirming import Answer as Confirm
from lanekeeper.amqp.publisher import SURELY_WITHIN_S
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import BODY, NOW_MS, Bench, attempts, decoded, handler, read
from tests.support.waiting import until
from topology.codec.request import Request
from topology.lanes import CRITICAL


class FakeProvider:
    """Answers, or raises. `asked`: the requests that it got."""

    name = "fake"

    def __init__(self, error: BaseException | None = None, *, takes_s: float = 0) -> None:
        self.error = error
        self.takes_s = takes_s
        self.asked: list[tuple[Request, float]] = []

    async def stream(self, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        self.asked.append((request, timeout_s))
        for event in (b'{"type":"a"}', b'{"type":"b"}') if parts else ():
            await parts(event)  # type: ignore[misc]
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return Answer(body=b"{}", model="claude-x", provider="fake")

    async def aclose(self) -> None: ...


class FakeGate:
    def __init__(self, log: list[str], name: str, outcome: Outcome | None = None) -> None:
        self._log, self._name, self._outcome = log, name, outcome

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        self._log.append(f"{self._name} enter")
        return self._outcome

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        self._log.append(f"{self._name} leave {type(outcome).__name__}")


CANCELLED = Completion(status="error", code="cancelled", body=b"{}", ended_ms=NOW_MS)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def handle(
    bench: Bench,
    job: Job,
    provider: FakeProvider | None = None,
    *,
    gates: Sequence[Gate] | None = None,
    now_ms: Callable[[], int] = lambda: NOW_MS,
    pausing: Pausing | None = None,
    breakers: Breakers | None = None,
) -> Outcome:
    steps = handler(
        attempts(
            Registry(provider or FakeProvider(), tracing=Tracing()),
            replies=bench.replies,
            lifecycle=bench.lifecycle,
            breakers=breakers,
            pausing=pausing,
            now_ms=now_ms,
        ),
        gates=(DeadlineGate(now_ms=now_ms), ScheduleGate(bench.claiming, now_ms=now_ms)) if gates is None else gates,
        provider="fake",
        replies=bench.replies,
    )
    return await steps.handle(job, lane=job.lane or CRITICAL)


def again(bench: Bench, **properties: Any) -> Job:
    """The next delivery of the request, after one that was never settled."""
    delivery = bench.delivery(**properties)
    delivery.redelivered = True
    return bench.job(delivery=delivery)


def code(outcome: Outcome) -> str:
    assert isinstance(outcome, Buried | Refused)
    return outcome.problem.code


async def test_a_request_is_answered(bench: Bench) -> None:
    provider = FakeProvider()
    job = bench.job()
    outcome = await handle(bench, job, provider)
    assert outcome == Answered(body=b"{}", model="claude-x", provider="fake")
    ((request, timeout_s),) = provider.asked
    assert (request.body, request.model, timeout_s) == (BODY, "m", CRITICAL.call_timeout_s)
    assert (job.attempts, job.wait_ms) == (1, 0)
    assert bench.log == ["event: started"]


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"exchange": ""}, "invalid_request"),
        ({"exchange": "amq.topic"}, "invalid_request"),
        ({"reply_to": "lane.critical"}, "forbidden_reply_to"),
        ({"reply_to": "lane.dead"}, "forbidden_reply_to"),
        ({"reply_to": "amq.rabbitmq.trace"}, "forbidden_reply_to"),
        ({"reply_to": "amq.gen-short"}, "forbidden_reply_to"),
        ({"body": b"{"}, "invalid_request"),
        ({"content_type": "text/plain"}, "unsupported_media"),
        ({"headers": {"x-lane-webhook": "https://a.example"}}, "invalid_request"),
    ],
)
async def test_an_invalid_request_is_parked_and_the_provider_is_not_called(
    bench: Bench, properties: dict[str, Any], expected: str
) -> None:
    provider = FakeProvider()
    outcome = await handle(bench, bench.job(**properties), provider)
    assert isinstance(outcome, Buried)
    assert code(outcome) == expected
    assert provider.asked == []


@pytest.mark.parametrize(
    "reply_to", ["answers", "shop.replies", "lane.reply.shop.1", "lanes.x", "amq.rabbitmq.reply-to.g1h2.x==", None]
)
async def test_a_forbidden_reply_address_is_refused(bench: Bench, reply_to: str | None) -> None:
    assert isinstance(await handle(bench, bench.job(reply_to=reply_to)), Answered)


@pytest.mark.parametrize("exchange", ["lane.due", "lane.delay.00", "lane.delay.28"])
async def test_internal_headers_are_believed_on_a_message_from_a_delay(bench: Bench, exchange: str) -> None:
    job = bench.job(exchange=exchange, headers={n.ATTEMPT: 2, n.USER_ID: "shop"}, user_id="the-workers")
    assert isinstance(await handle(bench, job), Answered)
    assert job.attempts == 3
    assert job.identity.tenant == "shop"


@pytest.mark.parametrize("exchange", ["lane.requests", "", "lane.delayed", "lane.due2", "my.lane.due", "lane.fallen"])
async def test_internal_headers_are_not_believed_on_other_messages(bench: Bench, exchange: str) -> None:
    job = bench.job(exchange=exchange, headers={n.ATTEMPT: 2, n.USER_ID: "bank"}, user_id="shop")
    await handle(bench, job)
    assert job.attempts <= 1
    assert job.identity.tenant == "shop"


@pytest.mark.parametrize("deaths", range(DEATHS_AT_MOST + 2))
async def test_a_request_whose_workers_die_one_after_another_is_poison(bench: Bench, deaths: int) -> None:
    for _ in range(deaths):
        await bench.claiming.claim(again(bench))
    outcome = await handle(bench, again(bench), gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),))
    if deaths < DEATHS_AT_MOST:
        assert isinstance(outcome, Answered)
    else:
        assert isinstance(outcome, Buried)
        assert code(outcome) == "poison"
        assert f"delivered {deaths + 1} times" in outcome.problem.detail


async def test_losing_only_the_channel_again_and_again_is_no_poison(bench: Bench) -> None:
    for _ in range(20):
        job = again(bench)
        await bench.claiming.claim(job)
        await bench.claiming.release(job)
    assert isinstance(
        await handle(bench, again(bench), gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),)), Answered
    )


async def test_releasing_the_claim_only_after_another_worker_took_over_is_no_poison(bench: Bench) -> None:
    before = again(bench)
    await bench.claiming.claim(before)
    for _ in range(20):
        job = again(bench)
        await bench.claiming.claim(job)
        await bench.claiming.release(before)
        before = job
    assert isinstance(
        await handle(bench, again(bench), gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),)), Answered
    )


async def test_requests_suspected_of_killing_workers_are_worked_on_one_at_a_time(bench: Bench) -> None:
    gate = ClaimGate(bench.claiming, now_ms=lambda: NOW_MS)
    for id in ("m-1", "m-2"):
        for _ in range(SUSPECT_FROM):
            await bench.claiming.claim(again(bench, message_id=id))
    first, second = (read(again(bench, message_id=each)) for each in ("m-1", "m-2"))
    third, fourth = read(bench.job(message_id="m-3")), read(again(bench, message_id="m-2"))
    assert await gate.enter(first, decoded(first)) is None
    assert await gate.enter(second, decoded(second)) == Deferred(delay_ms=1000, reason="suspect")
    assert await gate.enter(third, decoded(third)) is None
    await gate.leave(first, decoded(first), None)
    assert await gate.enter(fourth, decoded(fourth)) is None


async def test_a_redelivery_from_a_queue_without_a_counter_is_moved_to_the_due_queue(bench: Bench) -> None:
    delivery = bench.delivery()
    delivery.redelivered, delivery.times_delivered = True, None
    provider = FakeProvider()
    outcome = await handle(bench, bench.job(delivery=delivery), provider)
    assert outcome == Deferred(delay_ms=0, reason="redelivered", redelivered=True)
    assert provider.asked == []


@pytest.mark.parametrize("wrong", [{"exchange": ""}, {"routing_key": "batch.a.b"}, {"headers": {"CC": ["x"]}}])
async def test_an_invalid_redelivery_from_a_queue_without_a_counter_is_refused(
    bench: Bench, wrong: dict[str, Any]
) -> None:
    delivery = bench.delivery(**wrong)
    delivery.redelivered, delivery.times_delivered = True, None
    assert code(await handle(bench, bench.job(delivery=delivery))) == "invalid_request"


async def test_past_its_deadline_a_request_is_not_sent_to_the_provider(bench: Bench) -> None:
    provider = FakeProvider()
    job = bench.job(headers={n.SENT_MS: NOW_MS - 6000, n.DEADLINE_MS: 5000})
    outcome = await handle(bench, job, provider)
    assert isinstance(outcome, Refused)
    assert code(outcome) == "deadline_exceeded"
    assert outcome.problem.detail == "not answered within 5000 ms: 6000 ms waiting"
    assert provider.asked == []


async def test_a_request_that_is_not_due_is_delayed_again(bench: Bench) -> None:
    provider = FakeProvider()
    outcome = await handle(bench, bench.job(headers={n.DELAY_MS: 3000}), provider)
    assert outcome == Deferred(delay_ms=3000, reason="scheduled", due_ms=NOW_MS + 3000)
    assert provider.asked == []
    came_back = bench.job(exchange="lane.due", headers={n.DELAY_MS: 3000, n.DUE_MS: NOW_MS - 1, n.FIRST_SEEN_MS: 5})
    assert isinstance(await handle(bench, came_back, provider), Answered)
    assert came_back.wait_ms == 1


async def test_an_attempt_ends_at_the_deadline(bench: Bench) -> None:
    provider = FakeProvider(takes_s=30)
    job = bench.job(headers={n.DEADLINE_MS: 30})
    outcome = await handle(bench, job, provider)
    assert isinstance(outcome, Refused)
    assert code(outcome) == "deadline_exceeded"
    assert "ms in attempt 1" in outcome.problem.detail
    assert provider.asked[0][1] == pytest.approx(0.03 + SLACK_S)


@pytest.mark.parametrize(
    ("error", "kind"), [(TransientError("x"), Retried), (OverloadedError("x"), Retried), (RejectedError("x"), Buried)]
)
async def test_after_a_failed_attempt_retry_is_decided(bench: Bench, error: Exception, kind: type[Outcome]) -> None:
    assert isinstance(await handle(bench, bench.job(), FakeProvider(error)), kind)


class Down(Breakers):
    """Breakers that allow every call, and are all open after it failed."""

    @override
    def least_wait_s(self, routes: Iterable[Route]) -> float:
        return 2.0


class Shut(Down):
    """Breakers that allow no call."""

    @override
    async def enter(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(
    "error", [TransientError("x", type=UNREACHABLE), TransientError("500", status=500), OverloadedError("529")]
)
async def test_a_failure_while_the_provider_is_down_counts_no_attempt(bench: Bench, error: Exception) -> None:
    job = bench.job(exchange="lane.due", headers={n.ATTEMPT: CRITICAL.max_attempts - 1, n.FIRST_SEEN_MS: NOW_MS})

    outcome = await handle(bench, job, FakeProvider(error), breakers=Down())

    assert isinstance(outcome, Deferred)
    assert outcome.reason == "breaker"
    assert 2000 <= outcome.delay_ms <= 3000
    assert job.attempts == CRITICAL.max_attempts - 1


async def test_an_attempt_that_sent_parts_counts_so_that_the_next_sends_a_restart(bench: Bench) -> None:
    job = bench.job(headers={n.STREAM: True})

    outcome = await handle(bench, job, FakeProvider(OverloadedError("529")), breakers=Down())

    assert isinstance(outcome, Retried)
    assert job.attempts == 1


async def test_a_request_without_a_call_has_no_started_event(bench: Bench) -> None:
    job = bench.job()
    outcome = await handle(bench, job, breakers=Shut())

    assert isinstance(outcome, Deferred)
    assert (job.attempts, bench.log) == (0, [])


@pytest.mark.parametrize("error", [TransientError("cut", type="cut"), TransientError("hangs", type="timeout")])
async def test_a_failure_that_may_have_been_paid_counts_although_the_provider_is_down(
    bench: Bench, error: Exception
) -> None:
    job = bench.job(exchange="lane.due", headers={n.ATTEMPT: CRITICAL.max_attempts - 1, n.FIRST_SEEN_MS: NOW_MS})

    assert code(await handle(bench, job, FakeProvider(error), breakers=Down())) == "attempts_exhausted"


async def test_attempts_are_counted_over_all_deliveries(bench: Bench) -> None:
    job = bench.job(exchange="lane.due", headers={n.ATTEMPT: CRITICAL.max_attempts - 1, n.FIRST_SEEN_MS: NOW_MS})
    assert code(await handle(bench, job, FakeProvider(TransientError("x")))) == "attempts_exhausted"


async def test_a_timeout_error_that_is_not_the_deadlines_is_an_internal_error(bench: Bench) -> None:
    with pytest.raises(TimeoutError):
        await handle(bench, bench.job(), FakeProvider(TimeoutError()))


async def test_a_cancelled_attempt_raises_cancelled_error(bench: Bench) -> None:
    log: list[str] = []
    working = asyncio.create_task(
        handle(bench, bench.job(), FakeProvider(takes_s=30), gates=(FakeGate(log, "a"), FakeGate(log, "b")))
    )
    await asyncio.sleep(0.01)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert log == ["a enter", "b enter", "b leave NoneType", "a leave NoneType"]


async def test_gates_that_were_entered_are_left_in_reverse_order(bench: Bench) -> None:
    log: list[str] = []
    end = Deferred(delay_ms=5, reason="x")
    gates = (FakeGate(log, "a"), FakeGate(log, "b"), FakeGate(log, "c", end), FakeGate(log, "d"))
    assert await handle(bench, bench.job(), gates=gates) == end
    assert log == ["a enter", "b enter", "c enter", "b leave Deferred", "a leave Deferred"]


async def test_all_gates_are_left_although_one_is_cancelled_while_it_gives_back(bench: Bench) -> None:
    log: list[str] = []

    class Slow(FakeGate):
        @override
        async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
            await super().leave(job, decoded, outcome)
            await asyncio.sleep(30)

    working = asyncio.create_task(handle(bench, bench.job(), gates=(FakeGate(log, "a"), Slow(log, "b"))))
    await until(lambda: "b leave Answered" in log)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert log[-1] == "a leave Answered"


async def test_no_delivery_is_held_longer_than_the_brokers_consumer_timeout(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.attempt.ATTEMPT_WITHIN_S", 0.02)
    outcome = await handle(bench, bench.job(), FakeProvider(takes_s=30))
    assert isinstance(outcome, Retried)
    held_s = CLAIM_WITHIN_S + ATTEMPT_WITHIN_S + STORE_WITHIN_S + 2 * SURELY_WITHIN_S
    assert held_s < 1800


async def test_a_request_that_waits_during_a_pause_counts_no_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.attempt.ATTEMPT_WITHIN_S", 0.02)
    paused = Pausing({"store": lambda: "locked"})
    job, provider = bench.job(), FakeProvider()
    outcome = await handle(bench, job, provider, pausing=paused)
    assert outcome == Deferred(delay_ms=1000, reason="paused")
    assert (job.attempts, provider.asked) == (0, [])


# claims


async def test_a_request_that_runs_elsewhere_waits(bench: Bench) -> None:
    await bench.claiming.claim(bench.job())
    provider = FakeProvider()
    outcome = await handle(bench, bench.job(), provider, gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),))
    assert isinstance(outcome, Deferred)
    assert (outcome.reason, provider.asked) == ("running elsewhere", [])


async def test_a_request_that_has_ended_is_answered_from_the_store(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), Answered(body=b"{}", model="m", provider="p"))
    provider = FakeProvider()
    outcome = await handle(bench, bench.job(), provider, gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),))
    assert isinstance(outcome, Replayed)
    assert (outcome.completion.body, outcome.buries, provider.asked) == (b"{}", False, [])


async def test_the_same_id_with_another_body_is_a_conflict(bench: Bench) -> None:
    await bench.claiming.claim(bench.job())
    outcome = await handle(
        bench, bench.job(body=BODY.replace(b"hi", b"ho")), gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),)
    )
    assert code(outcome) == "idempotency_conflict"


@pytest.mark.parametrize(("provider", "is_kept"), [(FakeProvider(), True), (FakeProvider(OverloadedError("x")), False)])
async def test_only_an_outcome_that_ends_the_request_keeps_its_claim(
    bench: Bench, provider: FakeProvider, is_kept: bool
) -> None:
    job = bench.job()
    await handle(bench, job, provider, gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),))
    assert (job.claim is not None) == is_kept


async def test_a_cancellation_ends_a_running_attempt(bench: Bench) -> None:
    job = bench.job()
    working = asyncio.create_task(
        handle(bench, job, FakeProvider(takes_s=30), gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),))
    )
    await until(lambda: job.waiting is not None)
    assert await bench.claiming.cancel(job.identity, CANCELLED) == "told"
    outcome = await working
    assert isinstance(outcome, Dropped)
    assert outcome.problem.code == "cancelled"


async def test_a_cancellation_after_the_attempt_has_no_effect(bench: Bench) -> None:
    job = bench.job()
    assert isinstance(await handle(bench, job, gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),)), Answered)
    assert await bench.claiming.cancel(job.identity, CANCELLED) == "told"
    assert job.stopped == "cancelled"


async def test_a_worker_that_lost_its_claim_stops_and_sends_nothing(bench: Bench) -> None:
    job = bench.job()
    working = asyncio.create_task(
        handle(bench, job, FakeProvider(takes_s=30), gates=(ClaimGate(bench.claiming, now_ms=lambda: NOW_MS),))
    )
    await until(lambda: job.waiting is not None)
    heir = bench.job(delivery=bench.delivery())
    heir.delivery.redelivered = True
    await bench.claiming.claim(heir)
    await bench.claiming.renew()
    outcome = await working
    assert isinstance(outcome, Deferred)
    assert heir.stopped is None


# streaming


def parts_of(bench: Bench) -> list[tuple[str, int]]:
    return [(each.message.headers[n.PART], each.message.headers[n.SEQ]) for each in bench.publisher.sent]


async def test_parts_are_counted_from_zero_and_are_not_persistent(bench: Bench) -> None:
    assert isinstance(await handle(bench, bench.job(headers={n.STREAM: True})), Answered)
    assert parts_of(bench) == [("event", 0), ("event", 1)]
    part: Message = bench.publisher.sent[0].message
    assert (part.body, part.persistent, part.correlation_id) == (b'{"type":"a"}', False, "c-1")


@pytest.mark.parametrize("again", [{"exchange": "lane.due", "headers": {n.STREAM: True, n.ATTEMPT: 1}}, {}])
async def test_the_parts_of_a_further_attempt_begin_with_a_restart(bench: Bench, again: dict[str, Any]) -> None:
    delivery = bench.delivery(**{"headers": {n.STREAM: True}, **again})
    delivery.redelivered = not again
    delivery.times_delivered = 2 if delivery.redelivered else 1
    await handle(bench, bench.job(delivery=delivery))
    assert parts_of(bench) == [("restart", 0), ("event", 1), ("event", 2)]


async def test_a_second_call_within_an_attempt_sends_a_restart_if_parts_were_sent(bench: Bench) -> None:
    parts = Parts(bench.replies, bench.job())

    assert not parts.restart()
    await parts(b"{}")
    assert parts.restart()
    await parts(b"{}")
    await parts(b"{}")

    assert parts_of(bench) == [("event", 0), ("restart", 0), ("event", 1), ("event", 2)]


async def test_without_the_stream_header_or_a_reply_address_no_part_is_sent(bench: Bench) -> None:
    await handle(bench, bench.job())
    await handle(bench, bench.job(headers={n.STREAM: True}, reply_to=None))
    assert bench.publisher.sent == []


async def test_a_part_that_cannot_be_sent_does_not_fail_the_attempt(bench: Bench) -> None:
    bench.publisher.failing = {"": ConfirmUnknown("…")}
    assert isinstance(await handle(bench, bench.job(headers={n.STREAM: True})), Answered)


async def test_a_streamed_attempt_ends_when_its_parts_are_confirmed(bench: Bench) -> None:
    """So the final reply is sent after them, whatever channel it takes."""
    unconfirmed: list[asyncio.Future[Confirm]] = []
    bench.publisher.unconfirmed = unconfirmed
    handling = asyncio.create_task(handle(bench, bench.job(headers={n.STREAM: True})))
    await until(lambda: len(unconfirmed) == 2)
    unconfirmed[0].set_result(None)
    await asyncio.sleep(0.01)
    assert not handling.done()
    unconfirmed[1].set_result(None)
    assert isinstance(await handling, Answered)


async def test_a_model_that_the_lane_does_not_allow_is_refused(bench: Bench) -> None:
    lane = replace(CRITICAL, models=frozenset({"other"}))
    assert code(await handle(bench, bench.job(lane=lane))) == "forbidden_model"
