"""Settling: the outcome is stored, published and confirmed, and only then is the delivery acknowledged."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from consumers import claiming, settle
from consumers.job import Attempted
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.parking import Parking
from consumers.replies.sendable import Sendable
from consumers.state.base import StoreUnavailable
from lanekeeper.bodies import BodyStore
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerUnreachable,
    ConfirmUnknown,
    PublishRefused,
    RequestProblem,
    Unroutable,
)
from tests.support.completions import CANCELLED
from tests.support.jobs import BODY, NOW_MS, Bench, decoded, read
from tests.support.waiting import until
from topology.codec import decoding
from topology.codec.headers import HopHeaders, read_hop
from topology.lanes import CRITICAL

ANSWERED = Answered(body=b'{"id":"msg"}', model="claude-x", provider="anthropic")
DEFERRED = Deferred(delay_ms=300, reason="scheduled", due_ms=NOW_MS + 300)
RETRIED = Retried(delay_ms=700, error="529 overloaded_error: …")
REFUSED = Refused(RequestProblem("deadline_exceeded", "too late"))
BURIED = Buried(RequestProblem("provider_rejected", "402 …", status=402))
DROPPED = Dropped(RequestProblem("cancelled", "by its owner"))
CONFLICT = Refused(RequestProblem("idempotency_conflict", "another body"))
UNREADABLE = Buried(RequestProblem("invalid_request", "body: empty"))
OUTCOMES = [ANSWERED, DEFERRED, RETRIED, REFUSED, BURIED, DROPPED]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "RETURN_AFTER_S", 0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("outcome", "log"),
    [
        (ANSWERED, ["stored", "confirmed: reply", "ack", "event: completed"]),
        (DEFERRED, ["confirmed: lane.delay.01", "ack", "event: deferred"]),
        (RETRIED, ["confirmed: lane.delay.02", "ack", "event: retrying"]),
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


async def test_a_request_is_parked_before_it_is_answered(bench: Bench) -> None:
    bench.publisher.failing = {"lane.dead": PublishRefused("full")}
    assert not await bench.settler.settle(bench.job(), BURIED)
    assert bench.log == ["stored", "failed: lane.dead", "nack"]


async def test_a_reply_whose_queue_is_gone_counts_as_sent(bench: Bench) -> None:
    bench.publisher.failing = {"": Unroutable("gone")}
    assert await bench.settler.settle(bench.job(), ANSWERED)
    assert bench.log == ["stored", "failed: reply", "ack", "event: completed"]


async def test_a_reply_that_the_worker_has_no_right_to_send_is_parked_as_internal(bench: Bench) -> None:
    bench.publisher.failing = {"": AccessRefused("403")}
    assert await bench.settler.settle(bench.job(), ANSWERED)
    assert bench.log == ["stored", "failed: reply", "confirmed: lane.dead", "ack", "event: failed", "event: dead"]


async def test_a_cancelled_publish_settles_nothing(bench: Bench) -> None:
    bench.publisher.failing = {"": asyncio.CancelledError()}  # type: ignore[dict-item]
    with pytest.raises(asyncio.CancelledError):
        await bench.settler.settle(bench.job(), ANSWERED)
    assert bench.log == ["stored", "failed: reply"]


async def test_no_event_is_sent_if_the_channel_is_lost_before_the_acknowledgement(bench: Bench) -> None:
    delivery = bench.delivery()
    delivery.is_lost = True
    assert not await bench.settler.settle(bench.job(delivery=delivery), ANSWERED)
    assert bench.log == ["stored", "confirmed: reply"]


async def test_a_reply_address_that_closes_the_connection_is_parked_and_acknowledged(bench: Bench) -> None:
    bench.publisher.failing = {"": RequestProblem("forbidden_reply_to", "forged")}
    assert await bench.settler.settle(bench.job(), ANSWERED)
    assert bench.log == ["stored", "failed: reply", "confirmed: lane.dead", "ack", "event: failed", "event: dead"]
    assert bench.to("lane.dead").headers[n.DEAD_CODE] == "forbidden_reply_to"


async def test_if_such_a_request_cannot_be_parked_either_it_is_requeued(bench: Bench) -> None:
    bench.publisher.failing = {
        "": RequestProblem("forbidden_reply_to", "forged"),
        "lane.dead": BrokerUnreachable("down"),
    }
    assert not await bench.settler.settle(bench.job(), ANSWERED)
    assert bench.log[-1] == "nack"


async def test_a_dead_lettered_request_with_a_forbidden_reply_address_is_parked_once(bench: Bench) -> None:
    bench.publisher.failing = {"": RequestProblem("forbidden_reply_to", "forged")}
    assert await bench.settler.settle(bench.job(), BURIED)
    assert bench.to("lane.dead").headers[n.DEAD_CODE] == "provider_rejected"


@pytest.mark.parametrize("told", [Buried, Refused])
async def test_a_tenants_invalid_messages_beyond_its_share_are_answered_but_neither_parked_nor_stored(
    told: type[Buried | Refused],
) -> None:
    """If they were stored under their ids, they would evict other tenants' results."""
    bench = Bench(parking=Parking(invalid_per_hour=1))
    rubbish = told(RequestProblem("invalid_request", "body: empty"))
    for number in range(3):
        await bench.settler.settle(bench.job(message_id=f"m-{number}", user_id="flood"), rubbish)
    assert (bench.log.count("noted"), bench.log.count("confirmed: reply")) == (1, 3)
    assert bench.log.count("confirmed: lane.dead") == (told is Buried)
    await bench.settler.settle(bench.job(message_id="m-9", user_id="shop"), rubbish)
    assert bench.log.count("noted") == 2, "another tenant has a share of its own"


async def test_an_answer_too_large_for_the_broker_ends_the_request_before_it_is_stored(bench: Bench) -> None:
    bench.publisher.largest = 10
    assert isinstance(await bench.settler.settle(bench.job(), ANSWERED), Buried)
    assert bench.log == ["stored", "confirmed: lane.dead", "confirmed: reply", "ack", "event: failed", "event: dead"]
    assert bench.to("lane.dead").headers[n.DEAD_CODE] == "answer_too_large"
    assert json.loads(bench.to("").body)["code"] == "answer_too_large"


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


async def test_a_request_without_reply_to_is_acknowledged_without_a_reply(bench: Bench) -> None:
    assert await bench.settler.settle(bench.job(reply_to=None), ANSWERED)
    assert bench.log == ["stored", "ack", "event: completed"]


# the stored outcome is the one that is sent


async def test_a_request_that_had_ended_is_answered_with_the_stored_reply(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    later = Answered(body=b'{"id":"another"}', model="claude-y", provider="anthropic")
    assert isinstance(await bench.settler.settle(bench.job(), later), Replayed)
    first, second = (each.message for each in bench.publisher.sent)
    assert first.body == second.body == ANSWERED.body
    assert n.REPLAYED not in first.headers
    assert second.headers == {**first.headers, n.REPLAYED: True}
    assert bench.log[-2:] == ["ack", "event: replayed"]


async def test_a_large_answer_kept_beside_the_broker_is_deleted_if_the_request_had_ended(
    bench: Bench, tmp_path: Path
) -> None:
    store = BodyStore(f"file://{tmp_path}/bodies", in_all_bytes=10_000)
    bench.settler.sendable = Sendable(bench.publisher, bodies=store, over_bytes=100)
    kept = tmp_path / "bodies"

    def large(text: bytes) -> Answered:
        return Answered(body=b'{"text":"%b"}' % (text * 200), model="m", provider="p")

    await bench.settler.settle(bench.job(), large(b"a"))
    first = list(kept.iterdir())
    assert len(first) == 1
    assert isinstance(await bench.settler.settle(bench.job(), large(b"b")), Replayed)
    await until(lambda: list(kept.iterdir()) == first)
    store.close()


async def test_a_model_name_in_an_unusual_form_is_shown_only_to_the_requester(bench: Bench) -> None:
    odd = "a model\nwith a prompt in it"
    with structlog.testing.capture_logs() as logged:
        await bench.settler.settle(bench.job(), Answered(body=b"{}", model=odd, provider="anthropic"))
    assert bench.to("").headers[n.MODEL] == odd
    (event,) = bench.notices.bodies
    assert {json.loads(event)["model"], *(each["model"] for each in logged if "model" in each)} == {"?"}


async def test_a_stored_error_is_not_replaced_by_a_later_answer(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), REFUSED)
    await bench.settler.settle(bench.job(), ANSWERED)
    assert [each.message.headers[n.STATUS] for each in bench.publisher.sent] == ["error", "error"]


async def test_while_another_delivery_is_worked_on_no_outcome_is_sent(bench: Bench) -> None:
    running, late = bench.job(), bench.job()
    await bench.claiming.claim(running)
    settled = await bench.settler.settle(late, REFUSED)
    assert isinstance(settled, Deferred)
    assert [each.exchange for each in bench.publisher.sent] == ["lane.delay.03"]


async def test_the_outcome_of_a_worker_that_lost_its_claim_is_discarded(bench: Bench) -> None:
    zombie, heir = bench.job(), bench.job(delivery=bench.delivery())
    await bench.claiming.claim(zombie)
    heir.delivery.redelivered = True
    await bench.claiming.claim(heir)
    assert isinstance(await bench.settler.settle(zombie, ANSWERED), Deferred)
    assert isinstance(await bench.settler.settle(heir, ANSWERED), Answered)


async def test_while_the_store_is_unavailable_the_settler_waits_and_keeps_the_delivery(bench: Bench) -> None:
    bench.store.failing = StoreUnavailable("locked")
    settling = asyncio.create_task(bench.settler.settle(bench.job(), ANSWERED))
    await asyncio.sleep(0.02)
    assert bench.log == []
    bench.store.failing = None
    assert await settling == ANSWERED


async def test_if_the_store_stays_unavailable_the_delivery_is_requeued(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "STORE_WITHIN_S", 0)
    bench.store.failing = StoreUnavailable("locked")
    assert await bench.settler.settle(bench.job(), ANSWERED) is None
    assert bench.log == ["nack"]


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
    await bench.settler.settle(bench.job(body=b"?"), Buried(RequestProblem("invalid_request", "the first reason")))
    bench.publisher.sent.clear()
    delivery = bench.delivery(body=b"?")
    delivery.redelivered = True

    outcome = await bench.settler.settle(
        bench.job(delivery=delivery), Buried(RequestProblem("invalid_request", "another reason"))
    )

    assert isinstance(outcome, Replayed)
    assert outcome.buries, "the worker before may have died before it parked the message"
    assert json.loads(bench.to("").body)["detail"] == "the first reason"
    assert bench.to("lane.dead").headers[n.DEAD_CODE] == "invalid_request"


# a dead letter, published again


async def test_a_dead_letter_that_is_published_again_has_a_new_start_and_keeps_its_ending_on_a_hop(
    bench: Bench,
) -> None:
    headers = {n.DEAD_AT: "2026-09-21T13:00:00.000Z", n.SENT_MS: NOW_MS - 5_000_000}
    job = bench.job(headers=headers, timestamp_s=5.0)
    assert decoded(read(job)).request.published.ms == NOW_MS
    await bench.settler.settle(job, DEFERRED)
    copy = bench.to("lane.delay.01")
    back = bench.job(exchange="lane.due", headers=copy.headers, timestamp_s=5.0)
    assert back.fingerprint.dead_at_ms == job.fingerprint.dead_at_ms is not None
    request = decoding.decode(back.message, lane=CRITICAL, request_id=back.id, hop=back.hop, now_ms=NOW_MS + 900)
    assert request.published.ms == NOW_MS


# what is published


async def test_a_reply_has_the_providers_bytes_and_names_model_and_provider(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    reply = bench.to("")
    assert (reply.body, reply.content_type, reply.correlation_id, reply.persistent) == (
        ANSWERED.body,
        "application/json",
        "c-1",
        True,
    )
    assert reply.message_id not in (None, "m-1")
    told = {n.STATUS: "ok", n.REQUEST_ID: "m-1", n.LANE_NAME: "critical", n.MODEL: "claude-x", n.PROVIDER: "anthropic"}
    assert told.items() <= reply.headers.items()
    assert bench.publisher.sent[0].routing_key == "amq.gen-abcdefghijklmnopqrstuv"


async def test_an_error_reply_is_a_problem_document(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), BURIED)
    reply = bench.to("")
    assert reply.content_type == "application/problem+json"
    assert reply.headers[n.STATUS] == "error"
    assert json.loads(reply.body)["status"] == 402


async def test_a_dead_letter_is_the_request_as_published_with_the_cause(bench: Bench) -> None:
    job = bench.job(
        headers={"x-mine": 1, "x-lane-stream": True, "x-death": [{}], "x-delivery-count": 2, "x-lane-attempt": 77},
        user_id="shop",
        expiration="60000",
        priority=3,
        timestamp_s=5.0,
        app_id="a",
    )
    await bench.settler.settle(job, BURIED)
    dead = bench.to("lane.dead")
    assert dead.headers == {
        "x-mine": 1,
        "x-lane-stream": True,
        n.DEAD_CODE: "provider_rejected",
        n.DEAD_DETAIL: "402 …",
        n.DEAD_AT: "2026-09-21T14:13:20.000Z",
        n.ATTEMPT: 0,
        n.ROUTING_KEY: "critical.shop.chat",
        n.ERRORS: ["provider_rejected: 402 …"],
        n.USER_ID: "shop",
        n.EXPIRATION: "60000",
    }
    # another user's user_id would close the channel; an expiration would remove it from lane.dead
    assert (dead.user_id, dead.expiration) == (None, None)
    kept = (dead.body, dead.message_id, dead.correlation_id, dead.priority, dead.timestamp_s, dead.app_id)
    assert kept == (BODY, "m-1", "c-1", 3, 5.0, "a")
    assert dead.persistent
    assert bench.publisher.sent[0].routing_key == "critical.shop.chat"


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
    assert copy.headers["x-mine"] == 1
    assert (copy.user_id, copy.expiration, copy.message_id, copy.persistent) == (None, None, "m-1", True)
    assert bench.publisher.sent[0].routing_key == "critical.shop.chat"


async def test_a_message_from_a_worker_keeps_its_history_and_the_last_five_errors(bench: Bench) -> None:
    past = HopHeaders(
        attempts=6, errors=("e", "d", "c", "b", "a"), first_seen_ms=NOW_MS - 9, due_ms=NOW_MS - 5, user_id="shop"
    )
    headers = {
        n.ATTEMPT: 6,
        n.ERRORS: list(past.errors),
        n.FIRST_SEEN_MS: NOW_MS - 9,
        n.DUE_MS: NOW_MS - 5,
        n.USER_ID: "shop",
    }
    job = bench.job(exchange="lane.due", headers={**headers, "lane-d00": True, "lane-d07": True}, user_id="the-workers")
    job.attempted = Attempted(started_ms=NOW_MS)
    await bench.settler.settle(job, RETRIED)
    copy = bench.to("lane.delay.02")
    hop = read_hop(copy.headers)
    assert hop.attempts == 7
    assert hop.errors == (f"attempt 7: {RETRIED.error}", "e", "d", "c", "b")
    assert (hop.first_seen_ms, hop.due_ms, hop.user_id) == (NOW_MS - 9, NOW_MS - 5, "shop")
    assert "lane-d07" not in copy.headers


async def test_a_deferral_does_not_count_an_attempt(bench: Bench) -> None:
    job = bench.job(exchange="lane.delay.03", headers={n.ATTEMPT: 2, n.ERRORS: ["b", "a"], n.FIRST_SEEN_MS: 5})
    await bench.settler.settle(job, DEFERRED)
    hop = read_hop(bench.to("lane.delay.01").headers)
    assert (hop.attempts, hop.errors, hop.due_ms) == (2, ("b", "a"), DEFERRED.due_ms)


async def test_a_request_without_an_id_gets_one_that_stays(bench: Bench) -> None:
    job = bench.job(message_id=None)
    await bench.settler.settle(job, RETRIED)
    assert bench.to("lane.delay.02").message_id == job.id


# giving back


async def test_a_delivery_that_a_stopping_worker_returns_is_nacked_unless_its_channel_is_lost(bench: Bench) -> None:
    delivery = bench.delivery()
    await bench.settler.nack(delivery)
    delivery.is_lost = True
    await bench.settler.nack(delivery)
    assert bench.log == ["nack"]


async def test_a_requeued_delivery_is_returned_after_a_moment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "RETURN_AFTER_S", 60)
    putting = asyncio.create_task(bench.settler.reject_later(bench.delivery()))
    await asyncio.sleep(0.01)
    assert bench.log == []
    putting.cancel()


@pytest.mark.parametrize(
    ("outcome", "publishes"),
    [(ANSWERED, []), (DEFERRED, ["after_publish"]), (RETRIED, ["after_publish"]), (BURIED, ["after_publish"])],
)
async def test_the_fault_suite_can_kill_a_worker_after_each_step(
    bench: Bench, outcome: Outcome, publishes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    monkeypatch.setattr(bench.settler.failpoints, "reach", reached.append)
    monkeypatch.setattr(bench.settler.failpoints, "reach_soon", reached.append)
    await bench.settler.settle(bench.job(), outcome)
    assert reached == ["after_keep", "after_store", *publishes, "after_confirm", "after_ack"]


@pytest.mark.parametrize(
    ("mark", "redelivered", "event"),
    [
        (None, False, "cancelled"),  # cancelled before any message of it arrived
        ("its own", True, "cancelled"),  # cancelled under a worker that died before it published the event
        ("its own", False, "replayed"),
        ("another's", True, "replayed"),
    ],
)
async def test_the_event_of_a_cancellation_is_published_once(
    bench: Bench, mark: str | None, redelivered: bool, event: str
) -> None:
    delivery = bench.delivery()
    delivery.redelivered = redelivered
    job = bench.job(delivery=delivery)
    found = {None: None, "its own": job.fingerprint.mark, "another's": b"x"}[mark]
    bench.lifecycle.publish_outcome(job, Replayed(completion=replace(CANCELLED, mark=found)))
    assert bench.log == [f"event: {event}"]
