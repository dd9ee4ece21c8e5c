"""Settling: the outcome is stored, published and confirmed, and only then is the delivery acknowledged."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from consumers import claiming, settle
from consumers.clock import moment_text
from consumers.job import SETTLE_WITHIN_S, Attempted, Job, PipelinePosition, Source
from consumers.large_bodies import Fetching, LargeAnswers
from consumers.outcomes import (
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    Replayed,
    Retried,
    Superseded,
)
from consumers.settle import delayed
from consumers.state.base import Ended, Granted, Running, StoreUnavailable
from consumers.strays import Strays
from lanekeeper.bodies import BodyStore
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import (
    BrokerUnreachable,
    ConfirmUnknown,
    MessageTooLarge,
    RequestProblem,
)
from tests.support.jobs import BODY, NAMES, NOW_MS, Bench, FakeDelivery
from tests.support.virtual_time import virtually
from tests.support.waiting import until
from topology.codec.headers import BatchHop, FlowHop, HopHeaders, hop_headers, read_hop, split_tail
from topology.delays import MAX_DELAY_MS, hop
from topology.lanes import CRITICAL

ANSWERED = Answered(body=b'{"id":"msg"}', model="claude-x", provider="anthropic")
DEFERRED = Deferred(delay_ms=300, reason="scheduled", due_ms=NOW_MS + 300)
RETRIED = Retried(delay_ms=700, error="529 overloaded_error: …")
REFUSED = Refused(RequestProblem("deadline_exceeded", "too late"))
BURIED = DeadLettered(RequestProblem("provider_rejected", "402 …", status=402))
DROPPED = Superseded(RequestProblem("cancelled", "by its owner"))
CONFLICT = Refused(RequestProblem("idempotency_conflict", "another body"))
UNREADABLE = DeadLettered(RequestProblem("invalid_request", "body: empty"))
BATCHED = Batched(params=b'{"for":"the provider"}')
STEPPED = PipelineAdvanced(
    flow=FlowHop(step="second", deadline_ms=NOW_MS), state=b"state", lane="critical", step="first"
)
OUTCOMES = [BATCHED, ANSWERED, DEFERRED, RETRIED, REFUSED, BURIED, DROPPED]


pytestmark = pytest.mark.usefixtures("returned_at_once")


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("outcome", "log"),
    [
        (ANSWERED, ["stored", "confirmed: reply", "ack", "event: completed"]),
        (DEFERRED, ["confirmed: lane.delay.01", "ack", "event: deferred"]),
        (RETRIED, ["confirmed: lane.delay.02", "ack", "event: retrying"]),
        (BATCHED, ["confirmed: reply", "ack", "event: deferred"]),
        (REFUSED, ["stored", "confirmed: reply", "ack", "event: failed"]),
        (BURIED, ["stored", "confirmed: lane.dead", "confirmed: reply", "ack", "event: failed", "event: dead"]),
        (DROPPED, ["stored", "confirmed: reply", "ack", "event: cancelled"]),
        (CONFLICT, ["confirmed: reply", "ack", "event: failed"]),
        (UNREADABLE, ["noted", "confirmed: lane.dead", "confirmed: reply", "ack", "event: failed", "event: dead"]),
    ],
)
async def test_an_outcome_is_stored_then_published_then_confirmed_then_acknowledged(
    bench: Bench, outcome: Outcome, log: list[str]
) -> None:
    assert await bench.settler.settle(bench.job(), outcome)
    assert bench.log == log


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("error", [ConfirmUnknown("…"), BrokerUnreachable("…")])
async def test_if_a_publish_fails_nothing_is_acknowledged_and_no_event_is_sent(
    bench: Bench, outcome: Outcome, error: Exception
) -> None:
    bench.publisher.failing = dict.fromkeys(("", "lane.delay.01", "lane.delay.02", "lane.dead"), error)
    assert not await bench.settler.settle(bench.job(), outcome)
    assert [step for step in bench.log if not step.startswith("failed")] in (["nack"], ["stored", "nack"])


async def test_a_claim_is_released_with_its_delivery(bench: Bench) -> None:
    job = bench.job()
    await bench.claiming.claim(job)
    bench.publisher.failing = {"lane.delay.01": BrokerUnreachable("…")}
    assert not await bench.settler.settle(job, DEFERRED)
    assert bench.log == ["claim", "failed: lane.delay.01", "release", "nack"]


async def test_no_event_is_sent_if_the_channel_is_lost_before_the_acknowledgement(bench: Bench) -> None:
    delivery = bench.delivery()
    delivery.is_lost = True
    assert not await bench.settler.settle(bench.job(delivery=delivery), ANSWERED)
    assert bench.log == ["stored", "confirmed: reply"]


async def test_a_dead_letter_whose_reply_may_not_be_sent_is_parked_once(bench: Bench) -> None:
    bench.publisher.failing = {"": RequestProblem("forbidden_reply_to", "forged")}
    assert await bench.settler.settle(bench.job(), BURIED)
    assert bench.log[:4] == ["stored", "confirmed: lane.dead", "failed: reply", "ack"]


@pytest.mark.parametrize(
    ("outcome", "has_ended"),
    [(each, isinstance(each, Answered | Refused | Superseded)) for each in (*OUTCOMES, STEPPED)],
)
async def test_a_stored_body_is_removed_when_nobody_will_need_it(
    outcome: Outcome, has_ended: bool, tmp_path: Path
) -> None:
    store, bench = BodyStore(f"file://{tmp_path}/bodies"), Bench()
    bench.settler.bodies = Fetching(store, most_bytes=10)
    for _ in range(2):  # the second one is a message of a request that has ended, if the first one was
        kept = await store.keep([b"{}"])
        await bench.settler.settle(bench.job(headers=dict(kept.headers)), outcome)
    await bench.settler.bodies.aclose(within_s=10)
    assert len(list((tmp_path / "bodies").iterdir())) == (0 if has_ended else 2)


async def test_after_an_internal_error_the_claim_is_not_renewed_so_that_another_worker_can_have_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    job = bench.job()
    await bench.claiming.claim(job)
    monkeypatch.setattr(LargeAnswers, "sendable", fails)
    with pytest.raises(ZeroDivisionError):
        await bench.settler.settle(job, ANSWERED)
    assert job.claim is None


async def test_a_stored_answer_that_the_broker_no_longer_accepts_is_answered_as_too_large(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    bench.publisher.sent.clear()
    bench.publisher.too_large = {ANSWERED.body}
    await bench.settler.settle(bench.job(), ANSWERED)
    assert json.loads(bench.to("").body)["code"] == "answer_too_large"
    assert bench.to("").headers[n.STATUS] == "error"


async def test_a_dead_letter_too_large_for_the_broker_is_parked_without_its_body(bench: Bench) -> None:
    bench.publisher.too_large = {BODY}
    await bench.settler.settle(bench.job(), BURIED)
    assert bench.to("lane.dead").body == b""


@pytest.mark.parametrize("outcome", [Deferred(delay_ms=1, reason="tpm"), Retried(delay_ms=1, error="529")])
async def test_a_request_that_the_broker_does_not_take_for_another_try_ends(bench: Bench, outcome: Outcome) -> None:
    """Else it would come back, and be called and paid, every second."""
    bench.publisher.too_large = {BODY}
    await bench.settler.settle(bench.job(), outcome)
    assert json.loads(bench.to("").body)["code"] == bench.to("lane.dead").headers[n.DEAD_CODE] == "too_large"
    assert bench.to("lane.dead").body == b""
    assert "ack" in bench.log


async def test_a_request_that_is_too_large_with_what_a_batch_needs_runs_live(bench: Bench) -> None:
    bench.publisher.too_large = {BODY + b"params"}
    job = bench.job()
    job.batch = BatchHop(provider="anthropic")
    await bench.settler.settle(job, Batched(params=b"params"))
    (sent,) = bench.publisher.sent
    assert sent.exchange.startswith(NAMES.delay_prefix)
    assert (sent.message.body, read_hop(sent.message.headers).batch) == (
        BODY,
        BatchHop(provider="anthropic", live=True),
    )


@pytest.mark.parametrize("is_ours", [True, False])
async def test_what_is_not_in_its_lane_and_too_large_to_be_published_is_answered_and_kept_without_its_body(
    bench: Bench, is_ours: bool
) -> None:
    bench.publisher.too_large = {BODY}
    if is_ours:
        message = delayed(bench.job(message_id="m", user_id="shop"), hop(0, NAMES), HopHeaders(), now_ms=0, names=NAMES)
        await bench.settler.end_too_large(message, MessageTooLarge(9, 8), routing_key="critical.shop.chat")
    else:
        stray = bench.delivery(message_id="m", routing_key="critical.shop.chat", user_id="shop").message
        await bench.settler.publish_stray(stray)
    moved = bench.publisher.sent.pop()
    assert (moved.exchange, moved.routing_key) == ("", NAMES.strays)

    strays = Strays([CRITICAL], names=NAMES)
    message = replace(moved.message, exchange="", routing_key=NAMES.strays)
    job = strays.job_of(FakeDelivery(message, bench.log, queue=NAMES.strays))
    await bench.settler.settle(job, await strays.handle(job))

    assert (job.identity.tenant, job.id) == ("shop", "m")
    assert json.loads(bench.to("").body)["code"] == "too_large"
    letter = bench.to("lane.dead")
    assert (letter.headers[n.DEAD_CODE], letter.headers[n.ROUTING_KEY]) == ("too_large", "critical.shop.chat")


# the stored outcome is the one that is sent


async def test_a_large_answer_kept_beside_the_broker_is_deleted_if_the_request_had_ended(
    bench: Bench, tmp_path: Path
) -> None:
    store = BodyStore(f"file://{tmp_path}/bodies", in_all_bytes=10_000)
    bench.settler.large_answers = LargeAnswers(bench.publisher, bodies=store, over_bytes=100)
    kept = tmp_path / "bodies"

    def large(text: bytes) -> Answered:
        return Answered(body=b'{"text":"%b"}' % (text * 200), model="m", provider="p")

    await bench.settler.settle(bench.job(), large(b"a"))
    first = list(kept.iterdir())
    assert len(first) == 1
    assert isinstance(await bench.settler.settle(bench.job(), large(b"b")), Replayed)
    await until(lambda: list(kept.iterdir()) == first)
    store.close()


async def test_a_worker_whose_paid_answer_cannot_be_stored_is_not_counted_as_dead(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "STORE_WITHIN_S", 0)
    monkeypatch.setattr(LargeAnswers, "is_slow", lambda *_: True)
    job = bench.job()
    await bench.claiming.claim(job)

    async def fails(*_: object, **__: object) -> None:
        raise StoreUnavailable("full")

    monkeypatch.setattr(bench.store, "complete", fails)
    assert await bench.settler.settle(job, ANSWERED) is None
    await bench.claiming.finish(within_s=30)
    assert bench.log == ["claim", "shelter", "release", "nack"]


def test_a_delivery_that_cannot_be_settled_for_long_is_returned(bench: Bench) -> None:
    async def story() -> None:
        async def hangs(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        bench.publisher.publish_surely = hangs  # type: ignore[method-assign]
        began_s = asyncio.get_running_loop().time()
        with capture_logs() as logs:
            assert await bench.settler.settle(bench.job(), ANSWERED) is None
        assert logs[-1]["error"] == "not settled within 200 s"
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(SETTLE_WITHIN_S)
        assert bench.log == ["stored", "nack"]
        bench.log.clear()
        job = bench.job(message_id="m-2")
        await bench.claiming.claim(job)
        assert await bench.settler.settle(job, DEFERRED) is None
        assert bench.log == ["claim", "nack"], "its outcome may be on its way"

    virtually(story())


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_repeat_that_may_not_wait_ends_itself_and_not_the_first_copy(bench: Bench, is_silent: bool) -> None:
    job = bench.job()
    await bench.store.defer(job.identity, due_ms=NOW_MS + 90_000, keep_until_ms=2 * NOW_MS)
    refused = Refused(RequestProblem("too_many_waiting", "as many as may"), is_silent=is_silent)

    assert await bench.settler.settle(bench.job(), refused) == refused

    found = await bench.store.find(job.identity)
    assert found is not None
    assert (found.completion, found.due_ms) == (None, NOW_MS + 90_000)
    replied = [] if is_silent else ["noted", "confirmed: reply"]  # the reply to the first copy is the reply to both
    assert bench.log == ["defer", *replied, "ack", *([] if is_silent else ["event: failed"])]
    bench.store.now_ms += 100_000
    assert isinstance(await bench.claiming.claim(job), Granted)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_the_stored_body_stays_for_the_first_copy_if_a_repeat_may_not_wait(
    is_silent: bool, tmp_path: Path
) -> None:
    store, bench = BodyStore(f"file://{tmp_path}/bodies"), Bench()
    kept = await store.keep([b"{}"])
    bench.settler.bodies = Fetching(store, most_bytes=10)
    refused = Refused(RequestProblem("too_many_waiting", "as many as may"), is_silent=is_silent)

    await bench.settler.settle(bench.job(headers=dict(kept.headers)), refused)

    await bench.settler.bodies.aclose(within_s=10)
    assert len(list((tmp_path / "bodies").iterdir())) == is_silent


async def test_while_another_delivery_is_worked_on_no_outcome_is_sent(bench: Bench) -> None:
    running, late = bench.job(), bench.job()
    await bench.claiming.claim(running)
    settled = await bench.settler.settle(late, REFUSED)
    assert isinstance(settled, Deferred)
    assert [each.exchange for each in bench.publisher.sent] == ["lane.delay.03"]


async def test_an_answer_is_stored_although_its_delivery_is_lost_meanwhile(bench: Bench) -> None:
    bench.store.failing = StoreUnavailable("locked")
    job = bench.job()
    settling = asyncio.create_task(bench.settler.settle(job, ANSWERED))
    await asyncio.sleep(0.01)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    bench.store.failing = None
    await bench.claiming.finish(within_s=30)
    assert bench.log == ["stored"]


@pytest.mark.parametrize(
    ("outcome", "exchange", "redelivered", "buries"),
    [
        (REFUSED, "lane.requests", False, False),
        (REFUSED, "lane.requests", True, True),
        (REFUSED, "lane.fallen", False, True),
        (BURIED, "lane.requests", False, True),
    ],
)
async def test_what_had_ended_may_still_have_to_be_parked_if_its_message_was_worked_on_before(
    bench: Bench, outcome: Outcome, exchange: str, redelivered: bool, buries: bool
) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    delivery = bench.delivery(exchange=exchange)
    delivery.redelivered = redelivered
    found = await bench.settler.settle(bench.job(delivery=delivery), outcome)
    assert isinstance(found, Replayed)
    assert found.buries is buries


@pytest.mark.parametrize("outcome", [UNREADABLE, BURIED])
async def test_a_redelivered_request_that_had_ended_is_replayed_whatever_its_new_outcome(
    bench: Bench, outcome: Outcome
) -> None:
    """For example, because the next worker has other settings and would refuse it."""
    await bench.settler.settle(bench.job(), ANSWERED)
    delivery = bench.delivery()
    delivery.redelivered = True
    assert isinstance(await bench.settler.settle(bench.job(delivery=delivery), outcome), Replayed)
    assert {each.message.headers[n.STATUS] for each in bench.publisher.sent} == {"ok"}


async def test_an_invalid_message_that_is_redelivered_is_parked_again_with_the_error_stored_first(bench: Bench) -> None:
    await bench.settler.settle(
        bench.job(body=b"?"), DeadLettered(RequestProblem("invalid_request", "the first reason"))
    )
    bench.publisher.sent.clear()
    delivery = bench.delivery(body=b"?")
    delivery.redelivered = True

    outcome = await bench.settler.settle(
        bench.job(delivery=delivery), DeadLettered(RequestProblem("invalid_request", "another reason"))
    )

    assert isinstance(outcome, Replayed)
    assert outcome.buries, "the worker before may have died before it parked the message"
    assert json.loads(bench.to("").body)["detail"] == "the first reason"
    assert bench.to("lane.dead").headers[n.DEAD_CODE] == "invalid_request"


TOO_MANY = Refused(RequestProblem("too_many_waiting", "as many as may"))


@pytest.mark.parametrize(
    ("outcome", "exchange", "step"),
    [
        (UNREADABLE, "lane.requests", "noted"),
        (TOO_MANY, "lane.requests", "noted"),
        (UNREADABLE, "lane.due", "stored"),  # a worker took it for a request before
        (TOO_MANY, "lane.due", "noted"),
    ],
)
async def test_an_error_of_one_message_is_noted_and_leaves_its_id_to_another(
    bench: Bench, outcome: Outcome, exchange: str, step: str
) -> None:
    await bench.settler.settle(bench.job(exchange=exchange), outcome)
    assert bench.log[0] == step


# a dead letter, published again


@pytest.mark.parametrize(
    ("properties", "past", "more"),
    [
        ({}, {}, {}),
        ({"user_id": "shop", "expiration": "60000"}, {}, {n.USER_ID: "shop", n.EXPIRATION: "60000"}),
        ({"user_id": "shop", "headers": {n.TENANT: "bank"}}, {}, {n.USER_ID: "shop", n.TENANT: "shop"}),
        ({}, {"replays": 2, "replayed_at": "then"}, {n.REPLAYS: 2, n.REPLAYED_AT: "then"}),
        ({}, {"replays": 1}, {n.REPLAYS: 1, n.REPLAYED_AT: moment_text(NOW_MS)}),
        ({}, {"flow": FlowHop(step="s", deadline_ms=1)}, {}),
        ({}, {"flow": FlowHop(step="s", deadline_ms=1, routing_key="batch.a.b")}, {n.ROUTING_KEY: "batch.a.b"}),
    ],
)
async def test_a_dead_letter_tells_why_it_is_one_and_what_its_requester_published(
    bench: Bench, properties: dict[str, Any], past: dict[str, Any], more: dict[str, Any]
) -> None:
    job = bench.job(**properties)
    job.hop = replace(job.hop, **past)
    await bench.settler.settle(job, BURIED)
    assert bench.to("lane.dead").headers == {
        n.DEAD_CODE: "provider_rejected",
        n.DEAD_DETAIL: "402 …",
        n.DEAD_AT: moment_text(NOW_MS),
        n.ATTEMPT: 0,
        n.ROUTING_KEY: "critical.shop.chat",
        n.ERRORS: ["provider_rejected: 402 …"],
        **more,
    }


# what is published


async def test_a_retry_carries_its_history_to_the_next_worker_in_headers(bench: Bench) -> None:
    job = bench.job(headers={"x-mine": 1, n.ATTEMPT: 9, n.USER_ID: "bank"}, user_id="shop", expiration="60000")
    job.attempted = Attempted(started_ms=NOW_MS)
    await bench.settler.settle(job, RETRIED)
    copy = bench.to("lane.delay.02")
    assert read_hop(copy.headers) == HopHeaders(
        attempts=1,
        errors=(f"attempt 1: {RETRIED.error}",),
        first_seen_ms=NOW_MS,
        user_id="shop",
        expiration="60000",
        hop_ms=NOW_MS,
        back_ms=NOW_MS + 700,
    )
    assert {key: value for key, value in copy.headers.items() if key.startswith("lane-d")} == {
        "lane-d02": True,
        "lane-d01": True,
        "lane-d00": True,
    }
    assert (copy.headers["x-mine"], n.TENANT in copy.headers) == (1, False)
    assert (copy.user_id, copy.expiration, copy.message_id, copy.persistent) == (None, None, "m-1", True)
    assert bench.publisher.sent[0].routing_key == "critical.shop.chat"


async def test_a_request_goes_to_be_gathered_with_what_the_provider_gets_behind_its_body(bench: Bench) -> None:
    job = bench.job(user_id="shop", expiration="60000", headers={"x-mine": 1})
    job.batch = BatchHop(account="a")
    await bench.settler.settle(job, BATCHED)

    (sent,) = bench.publisher.sent
    assert (sent.exchange, sent.routing_key) == ("", "lane.batches")
    hop = read_hop(sent.message.headers)
    assert hop.batch == BatchHop(account="a", params_bytes=len(BATCHED.params))
    assert split_tail(sent.message.body, hop.batch.params_bytes) == (BODY, BATCHED.params)
    assert (hop.attempts, hop.user_id, hop.expiration, sent.message.user_id) == (0, "shop", "60000", None)
    assert sent.message.headers[n.ROUTING_KEY] == "critical.shop.chat"
    assert (sent.message.headers["x-mine"], sent.message.expiration) == (1, None)


RESULT = b'{"custom_id":"t-1"}'


def from_batch(bench: Bench) -> Job:
    headers = hop_headers(HopHeaders(batch=BatchHop(ticket="t", result_bytes=len(RESULT)), first_seen_ms=NOW_MS))
    return bench.job(exchange="lane.due", body=BODY + RESULT, headers=headers)


async def test_a_batchs_result_that_was_not_read_yet_waits_with_its_request(bench: Bench) -> None:
    await bench.settler.settle(from_batch(bench), DEFERRED)
    copy = bench.to("lane.delay.01")
    assert copy.body == BODY + RESULT
    assert read_hop(copy.headers).batch == BatchHop(ticket="t", result_bytes=len(RESULT))


def test_a_batchs_result_moves_to_a_side_queue_with_its_request(bench: Bench) -> None:
    copy = settle.set_aside(from_batch(bench), now_ms=NOW_MS, names=NAMES)
    assert copy.body == BODY + RESULT
    assert read_hop(copy.headers).batch == BatchHop(ticket="t", result_bytes=len(RESULT))


@pytest.mark.parametrize(
    ("outcome", "exchange"), [(DEFERRED, "lane.delay.01"), (RETRIED, "lane.delay.02"), (BURIED, "lane.dead")]
)
async def test_a_batchs_result_that_was_an_attempt_is_not_kept(bench: Bench, outcome: Outcome, exchange: str) -> None:
    job = from_batch(bench)
    job.attempted = Attempted(started_ms=NOW_MS)
    await bench.settler.settle(job, outcome)
    copy = bench.to(exchange)
    assert copy.body == BODY
    assert read_hop(copy.headers).batch in (None, BatchHop(ticket="t"))


async def test_a_pipelines_next_step_tells_in_which_ticket_the_step_before_was(bench: Bench) -> None:
    job = from_batch(bench)
    flow = FlowHop(step="second", deadline_ms=NOW_MS + 60_000)
    await bench.settler.settle(job, PipelineAdvanced(flow=flow, state=b"state", lane="critical", step="first"))
    copy = bench.to("lane.delay.00")
    assert (read_hop(copy.headers).batch, copy.body) == (BatchHop(ticket="t"), b"state")


@pytest.mark.parametrize(("of", "attempts"), [(0, 0), (3, 1)])  # what a fan-out's items answer is the first attempt
async def test_a_pipelines_next_step_begins_anew_in_its_lane(bench: Bench, of: int, attempts: int) -> None:
    past = HopHeaders(attempts=2, ran_ms=70, deaths=1, batch=BatchHop(account="a"), first_seen_ms=NOW_MS)
    job = bench.job(exchange="lane.due", headers=hop_headers(past))
    step = replace(STEPPED, lane="batch", delay_ms=700, of=of)
    await bench.settler.settle(job, step)
    (sent,) = bench.publisher.sent
    assert sent.routing_key == "batch.shop.chat"
    assert read_hop(sent.message.headers) == HopHeaders(
        attempts=attempts,
        due_ms=NOW_MS,
        first_seen_ms=NOW_MS,
        hop_ms=NOW_MS,
        back_ms=NOW_MS + 700,
        flow=STEPPED.flow,
    )


async def test_a_pipeline_goes_on_with_the_outcome_of_its_step_that_was_stored_first(bench: Bench) -> None:
    standing = PipelinePosition(
        step="first", following="second", flow=FlowHop(step="first", deadline_ms=NOW_MS), state=b""
    )
    first, second = bench.job(), bench.job()
    first.standing = second.standing = standing
    step = replace(STEPPED, answer=ANSWERED)
    assert await bench.settler.settle(first, step) == step
    assert bench.log[0] == "stored"
    bench.settler.now_ms = lambda: NOW_MS + 1
    assert await bench.settler.settle(second, step) == Deferred(delay_ms=0, reason="running elsewhere")


async def test_a_pipeline_whose_delivery_is_lost_while_its_step_is_stored_can_be_claimed_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers, complete = asyncio.Event(), asyncio.Event(), bench.store.complete

    async def slow(*given: Any, **named: Any) -> Any:
        asked.set()
        await answers.wait()
        return await complete(*given, **named)

    monkeypatch.setattr(bench.store, "complete", slow)
    job = bench.job()
    job.standing = PipelinePosition(
        step="first", following="second", flow=FlowHop(step="first", deadline_ms=NOW_MS), state=b""
    )
    await bench.claiming.claim(job)
    settling = asyncio.create_task(bench.settler.settle(job, replace(STEPPED, answer=ANSWERED)))
    await asked.wait()
    assert isinstance(await bench.claiming.claim(bench.job()), Running)
    settling.cancel()
    await asyncio.wait([settling])
    answers.set()

    async def is_free() -> bool:
        return isinstance(await bench.claiming.claim(bench.job()), Granted)

    await until(is_free, within_s=5)


async def test_a_delay_beyond_the_longest_that_the_broker_can_hold_is_shortened(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), Deferred(delay_ms=10**12, reason="scheduled"))
    (sent,) = bench.publisher.sent
    hop = read_hop(sent.message.headers)
    assert (hop.hop_ms, hop.back_ms) == (NOW_MS, NOW_MS + MAX_DELAY_MS)


async def test_a_request_without_an_id_gets_one_that_stays(bench: Bench) -> None:
    job = bench.job(message_id=None)
    await bench.settler.settle(job, RETRIED)
    assert bench.to("lane.delay.02").message_id == job.id


# giving back


class SlowBodies(BodyStore):
    """A store for large answers that waits until `may_go` is set."""

    may_go: asyncio.Event

    @override
    async def keep_answer(self, body: bytes, *, for_s: float, tenant: str = "") -> BodyAddress:
        await self.may_go.wait()
        return await super().keep_answer(body, for_s=for_s, tenant=tenant)


async def test_a_paid_answer_is_kept_although_the_channel_is_lost_while_it_is_made_sendable(
    bench: Bench, tmp_path: Path
) -> None:
    """The redelivery waits meanwhile, and is answered from the store."""
    store = SlowBodies(f"file://{tmp_path}/bodies", in_all_bytes=10_000)
    store.may_go = asyncio.Event()
    bench.settler.large_answers = LargeAnswers(bench.publisher, bodies=store, over_bytes=100)
    job, again = bench.job(), bench.job()
    again.delivery.redelivered = True
    await bench.claiming.claim(job)
    settling = asyncio.create_task(bench.settler.settle(job, Answered(body=b"x" * 200, model="m", provider="p")))
    await until(lambda: "shelter" in bench.log)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling

    assert isinstance(await bench.claiming.claim(again), Running)
    await bench.claiming.renew()
    assert again.stopped is job.stopped is None
    store.may_go.set()
    await bench.claiming.finish(within_s=30)
    again = bench.job()
    again.delivery.redelivered = True
    found = await bench.claiming.claim(again)
    assert isinstance(found, Ended)
    assert "urn:lanekeeper:body" in found.completion.body.decode()
    assert bench.log == ["claim", "shelter", "claim", "stored", "claim"]
    store.close()


async def test_a_dead_letter_that_a_speaker_publishes_again_keeps_its_tenant_on_a_hop(bench: Bench) -> None:
    headers = {n.DEAD_AT: "2026-09-21T13:00:00.000Z", n.USER_ID: "shop"}
    delivery = bench.delivery(user_id="gateway", headers=headers)
    job = Job(delivery, lane=CRITICAL, source=Source.REQUESTER, taken_ms=NOW_MS, speakers={"gateway"})
    await bench.settler.settle(job, DEFERRED)
    copy = bench.to("lane.delay.01")
    assert (copy.headers[n.USER_ID], copy.headers[n.TENANT]) == ("gateway", "shop")


@pytest.mark.parametrize(
    "where",
    [
        {"queue": "lane.critical.due", "exchange": "lane.due", "routing_key": "critical.shop.chat"},
        {
            "queue": "lane.batches",
            "exchange": "",
            "routing_key": "lane.batches",
            "headers": {n.ROUTING_KEY: "critical.shop.chat"},
        },
    ],
)
async def test_what_only_causes_errors_is_kept_with_the_routing_key_under_which_it_can_be_published_again(
    bench: Bench, where: dict[str, Any]
) -> None:
    delivery = bench.delivery(**where)
    delivery.times_delivered = settle.FAULTS_AT_MOST
    await bench.settler.reject_later(delivery)
    (sent,) = bench.publisher.sent
    assert (sent.exchange, sent.routing_key) == ("", "lane.fallen")
    assert sent.message.headers[n.ROUTING_KEY] == "critical.shop.chat"
    assert bench.log[-1] == "ack"


@pytest.mark.parametrize(
    ("exchange", "user_id", "stated", "tenant"),
    [("", "shop", "bank", "shop"), ("", None, "bank", ""), ("lane.due", None, "bank", "bank")],
)
async def test_what_is_moved_to_lane_fallen_keeps_its_user_and_nobody_names_another_one(
    bench: Bench, exchange: str, user_id: str | None, stated: str, tenant: str
) -> None:
    headers = {n.USER_ID: stated, n.ROUTING_KEY: "normal.shop.chat", "x-death": [{"reason": "expired"}]}
    delivery = bench.delivery(exchange=exchange, routing_key="lane.batches", headers=headers, user_id=user_id)
    await bench.settler.publish_stray(delivery.message)
    (sent,) = bench.publisher.sent
    moved = replace(sent.message, exchange=sent.exchange, routing_key=sent.routing_key)
    job = Strays([CRITICAL], names=NAMES).job_of(FakeDelivery(moved, [], queue="lane.fallen"))
    assert (job.identity.tenant, job.routing_key) == (tenant, "normal.shop.chat")


async def test_a_routing_key_in_a_header_that_is_none_is_not_published(bench: Bench) -> None:
    headers = {n.ROUTING_KEY: "7" * 300}
    await bench.settler.publish_stray(bench.delivery(exchange="", routing_key="lane.batches", headers=headers).message)
    (sent,) = bench.publisher.sent
    assert sent.message.headers[n.ROUTING_KEY] == ""
