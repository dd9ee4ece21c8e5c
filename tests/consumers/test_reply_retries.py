"""A reply that a full queue refused is sent again, without another call to the provider and for a limited time."""

import json
from itertools import pairwise

import pytest

from consumers.job import Job
from consumers.outcomes import Answered, Buried, Outcome, Refused, Replayed
from consumers.replies.reply_retries import PAUSES_S, ReplyRetries
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import BrokerUnreachable, PublishRefused, RequestProblem
from tests.support.jobs import BODY, NOW_MS, Bench

ANSWERED = Answered(body=b'{"id":"msg"}', model="claude-x", provider="anthropic")
REJECTED = Buried(RequestProblem("provider_rejected", "402 …", status=402))
UNREADABLE = Buried(RequestProblem("invalid_request", "body: empty"))
CONFLICT = Refused(RequestProblem("idempotency_conflict", "another body"))
FULL: dict[str, Exception] = {"": PublishRefused("full")}


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def never(job: Job) -> Outcome:
    raise AssertionError("handled again")


async def come_back(bench: Bench) -> Outcome:
    """Deliver the last delayed copy, and settle it."""
    sent = [each for each in bench.publisher.sent if each.exchange.startswith("lane.delay.")][-1]
    bench.publisher.sent.clear()
    message = sent.message
    back = bench.job(exchange="lane.due", body=message.body, headers=message.headers, message_id=message.message_id)
    outcome = await bench.reply_retries.wrap(never)(back)
    assert await bench.settler.settle(back, outcome)
    return outcome


@pytest.mark.parametrize("outcome", [ANSWERED, REJECTED, UNREADABLE, CONFLICT])
async def test_a_refused_reply_is_sent_again_with_the_same_content(bench: Bench, outcome: Outcome) -> None:
    bench.publisher.failing = {}
    await bench.settler.settle(bench.job(message_id="m-0"), outcome)
    told = bench.to("")
    bench.publisher.sent.clear()
    bench.publisher.failing = FULL
    assert await bench.settler.settle(bench.job(), outcome) is outcome
    assert bench.log[-4 if outcome in (REJECTED, UNREADABLE) else -3 :][:2] == ["confirmed: lane.delay.03", "ack"]
    bench.publisher.failing = {}
    assert isinstance(await come_back(bench), Replayed)
    again = bench.to("")
    assert again.body == told.body.replace(b"m-0", b"m-1")
    same = {n.STATUS, n.ATTEMPT, n.LANE_NAME, n.RUN_MS}
    assert {key: again.headers[key] for key in same} == {key: told.headers[key] for key in same}
    assert [each.exchange for each in bench.publisher.sent] == [""], "and is not parked again"


async def test_a_refused_reply_does_not_hold_the_slot_of_its_request(bench: Bench) -> None:
    bench.publisher.failing = FULL
    await bench.settler.settle(bench.job(), ANSWERED)
    assert bench.publisher.refused_within_s == [0], "it is repeated by way of a delay alone"


async def test_a_refused_reply_is_retried_for_a_minute_and_then_stays_available_under_its_id(bench: Bench) -> None:
    bench.publisher.failing = FULL
    job = bench.job()
    await bench.settler.settle(job, ANSWERED)
    for _ in PAUSES_S[1:]:
        await come_back(bench)
    assert bench.reply_retries.given_up == 0
    await come_back(bench)
    assert (bench.reply_retries.given_up, bench.publisher.sent) == (1, [])
    assert bench.log[-2:] == ["event: undelivered", "ack"]
    found = await bench.claiming.find(job.identity)
    assert found is not None
    assert found.completion is not None
    assert found.completion.body == ANSWERED.body


@pytest.mark.slow
async def test_if_the_delayed_copy_cannot_be_published_the_delivery_is_not_acknowledged(bench: Bench) -> None:
    bench.publisher.failing = {**FULL, "lane.delay.03": BrokerUnreachable("down")}
    assert await bench.settler.settle(bench.job(), ANSWERED) is None
    assert bench.log[-1] == "nack"


async def test_if_the_store_has_lost_the_result_the_request_runs_again(bench: Bench) -> None:
    async def handle(job: Job) -> Outcome:
        return ANSWERED

    job = bench.job(exchange="lane.due", headers={n.REPLY_TRY: 2})
    assert await bench.reply_retries.wrap(handle)(job) is ANSWERED


async def test_a_requesters_forged_retry_header_is_ignored(bench: Bench) -> None:
    async def handle(job: Job) -> Outcome:
        return ANSWERED

    forged = {n.REPLY_TRY: 1, n.REPLY_ERROR: json.dumps({"code": "internal"})}
    assert await bench.reply_retries.wrap(handle)(bench.job(headers=forged)) is ANSWERED


def test_the_number_of_waiting_replies_is_limited_for_one_tenant_and_in_total(bench: Bench) -> None:
    reply_retries = ReplyRetries(bench.claiming, max_waiting=30)

    def sent(address: str, count: int, now_ms: int = NOW_MS, user: str | None = None) -> int:
        jobs = [bench.job(reply_to=address, user_id=user) for _ in range(count)]
        return sum(reply_retries.pause_ms(job, now_ms=now_ms) is not None for job in jobs)

    assert sum(sent(f"shop.{n}", 50, user="shop") for n in range(10)) == 3, "however many queues a tenant has"
    assert sent("shop.full", 50) == 3, "of a queue, where nobody knows the tenant"
    assert sum(sent(f"shop.{n}", 50) for n in range(50)) == 24
    assert sent("another", 1) == sent("another", 1, user="another") == 0
    assert sent("shop.full", 50, NOW_MS + 1000) == 3, "what has come back waits no more"
    assert sent("shop.1", 50, NOW_MS + 1000, user="shop") == 3


def test_a_reply_is_tried_again_after_ever_longer_pauses_for_a_minute_in_all(bench: Bench) -> None:
    reply_retries, pauses = ReplyRetries(bench.claiming), []
    for tries in range(10):
        job = bench.job(exchange="lane.due", headers={n.REPLY_TRY: tries} if tries else {})
        if (pause_ms := reply_retries.pause_ms(job, now_ms=NOW_MS)) is None:
            break
        pauses.append(pause_ms)

    assert pauses == sorted(pauses)
    assert pauses[0] == 1_000
    assert all(later <= 2 * earlier for earlier, later in pairwise(pauses))
    assert 60_000 <= sum(pauses) < 62_000


def test_one_tenant_may_have_a_tenth_of_the_replies_that_wait(bench: Bench) -> None:
    reply_retries = ReplyRetries(bench.claiming, max_waiting=30)

    def taken(user: str, times: int, *, now_ms: int = NOW_MS) -> int:
        jobs = [bench.job(user_id=user) for _ in range(times)]
        return sum(reply_retries.pause_ms(each, now_ms=now_ms) is not None for each in jobs)

    assert [taken("a", 9), taken("b", 9)] == [3, 3]
    assert [taken("a", 9, now_ms=NOW_MS + 999), taken("a", 9, now_ms=NOW_MS + 1000)] == [0, 3]


def test_no_more_replies_wait_than_the_limit_for_all_tenants_together(bench: Bench) -> None:
    reply_retries = ReplyRetries(bench.claiming, max_waiting=4)
    found = [reply_retries.pause_ms(bench.job(user_id=f"u-{each}"), now_ms=NOW_MS) is not None for each in range(6)]
    assert found == [True] * 4 + [False] * 2


def test_a_refused_reply_is_sent_again_after_1_2_4_8_16_and_30_seconds(bench: Bench) -> None:
    def pause_ms(tries: int) -> int | None:
        job = bench.job(exchange="lane.due", headers={n.REPLY_TRY: tries})
        return bench.reply_retries.pause_ms(job, now_ms=NOW_MS)

    assert [pause_ms(tries) for tries in range(7)] == [1000, 2000, 4000, 8000, 16_000, 30_000, None]


@pytest.mark.parametrize(("outcome", "body"), [(ANSWERED, BODY), (REJECTED, BODY), (UNREADABLE, b""), (CONFLICT, b"")])
async def test_a_request_whose_reply_is_sent_again_keeps_its_body_unless_its_error_is_in_a_header(
    bench: Bench, outcome: Outcome, body: bytes
) -> None:
    bench.publisher.failing = FULL
    await bench.settler.settle(bench.job(), outcome)
    (copy,) = (each.message for each in bench.publisher.sent if each.exchange.startswith("lane.delay."))
    assert copy.body == body
    assert (n.REPLY_ERROR in copy.headers) == (body == b"")
