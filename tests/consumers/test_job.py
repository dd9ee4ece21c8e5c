"""What a job knows of its delivery: how long it has waited, whose it is, when it ended before."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from consumers.job import (
    Job,
    Source,
    content_hash,
    tenant_of,
)
from consumers.outcomes import DeadLettered, Deferred, Refused
from consumers.settle import set_aside
from consumers.state.base import Stop
from consumers.strays import Strays
from lanekeeper.contract import names as n
from tests.support.jobs import NAMES, NOW_MS, Bench
from topology.codec.headers import FlowHop, HopHeaders, hop_headers
from topology.lanes import DEFAULT_LANES


def test_a_deadline_is_known_before_the_body_is_read() -> None:
    sent, bench = {n.DEADLINE_MS: 5000, n.SENT_MS: NOW_MS - 700}, Bench()
    assert bench.job(headers=sent, body=b"?").deadline_ms == NOW_MS + 4300
    forged = {**sent, **hop_headers(HopHeaders(flow=FlowHop(step="a", deadline_ms=7)))}
    assert bench.job(headers=forged).deadline_ms == NOW_MS + 4300
    assert bench.job(headers=forged, exchange="lane.due").deadline_ms == 7, "a worker wrote it"
    assert bench.job(headers=sent, lane=None).deadline_ms is None
    assert bench.job(headers={n.DEADLINE_MS: "soon"}).deadline_ms is None


@pytest.mark.parametrize(
    ("user", "stated", "tenant"),
    [("crm", "other", "crm"), ("gateway", "other", "other"), ("gateway", 7, "gateway"), (None, "other", "")],
)
def test_only_who_may_speak_for_others_names_another_tenant(user: str | None, stated: object, tenant: str) -> None:
    assert tenant_of(user, stated, {"gateway"}) == tenant


@pytest.mark.parametrize(("dead_at", "tenant"), [({}, "gateway"), ({n.DEAD_AT: "2026-09-21T14:13:20.000Z"}, "shop")])
def test_only_a_dead_letter_that_is_published_again_names_its_tenant_by_the_user_who_published_it_first(
    dead_at: dict[str, str], tenant: str
) -> None:
    delivery = Bench().delivery(user_id="gateway", headers={n.USER_ID: "shop", **dead_at})

    job = Job(delivery, lane=None, source=Source.REQUESTER, taken_ms=NOW_MS, speakers={"gateway"})

    assert job.identity.tenant == tenant


def test_a_body_has_the_hash_that_earlier_versions_have_stored() -> None:
    """Another one would make a conflict of every request that a worker of the next version sees again."""
    assert Bench().job().fingerprint.mark.hex() == "7172fc64538f48fe17004197eceaf20a"
    assert content_hash(b'{"a":1}').hex() == "2c6b113b8dd15ffbded9860b43eb0c6c"
    sha256 = "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    assert content_hash(sha256).hex() == content_hash(sha256.upper()).hex() == "3fe3283ebc8678e8117e8042d3422810"


async def test_a_job_that_was_stopped_before_a_wait_does_not_wait() -> None:
    job = Bench().job()
    job.stop(Stop.CANCELLED)
    async with asyncio.timeout(1):
        async with job.interruptible(None):
            await asyncio.Event().wait()


async def test_a_wait_that_has_ended_cannot_be_stopped_later() -> None:
    job = Bench().job()
    async with job.interruptible(60):
        pass
    job.stop(Stop.CANCELLED)
    await asyncio.sleep(0)  # a cancellation by the limit that is over would arrive here
    assert job.waiting is None


def test_a_request_and_its_copy_in_a_side_queue_are_one_request_but_not_one_message() -> None:
    bench = Bench()
    delivery = bench.delivery()
    delivery.redelivered = True
    original = bench.job(delivery=delivery)
    copy_delivery = bench.delivery()
    copy = set_aside(original, now_ms=NOW_MS, names=NAMES)
    copy_delivery.message = replace(copy, exchange=NAMES.side_exchange(1), routing_key=original.routing_key)
    moved = bench.job(delivery=copy_delivery)

    ours, theirs = original.fingerprint, moved.fingerprint
    assert (ours.body_hash, ours.mark) == (theirs.body_hash, theirs.mark)
    assert (ours.nonce[:1], theirs.nonce[:1]) == (b"q", b"s")
    assert ours.redelivered
    assert not theirs.redelivered, "the copy is delivered for the first time"
    assert moved.redelivered, "so its outcome may be stored already"


def test_the_steps_of_a_pipeline_are_one_request_but_not_one_message() -> None:
    def step(name: str) -> Job:
        flow = FlowHop(step=name, deadline_ms=NOW_MS, input_bytes=2, body_hash="ab")
        return Bench().job(headers={n.FLOW: hop_headers(HopHeaders(flow=flow))[n.FLOW]}, exchange="lane.due")

    first, again, second = (step(name).fingerprint for name in ("a", "a", "b"))
    assert first.body_hash == second.body_hash == b"\xab"
    assert first.mark == again.mark != second.mark


@pytest.mark.parametrize(("item_of", "is_item"), [(None, False), ("", False), ("m-0", True)])
def test_only_what_a_fan_out_published_is_an_item(item_of: str | None, is_item: bool) -> None:
    flow = None if item_of is None else FlowHop(step="a", deadline_ms=NOW_MS, item_of=item_of)
    job = Bench().job(exchange="lane.due", headers=hop_headers(HopHeaders(flow=flow)))
    assert job.is_item is is_item


FALLEN = Strays(DEFAULT_LANES, names=NAMES, now_ms=lambda: NOW_MS)


def death(queue: str, reason: str, **more: Any) -> dict[str, Any]:
    return {"x-death": [{"queue": queue, "reason": reason, "exchange": "lane.requests", "count": 1, **more}]}


@pytest.mark.parametrize(
    ("exchange", "key", "headers", "kind", "code", "named"),
    [
        (
            "lane.fallen",
            "critical.a.b",
            death("lane.critical", "expired"),
            Refused,
            "deadline_exceeded",
            "lane.critical",
        ),
        (
            "lane.fallen",
            "critical.a.b",
            death("lane.critical", "expired", **{"original-expiration": "500"}),
            Refused,
            "deadline_exceeded",
            "after its expiration of 500 ms",
        ),
        (
            "lane.fallen",
            "batch.a.b",
            {**death("lane.batch.due", "delivery_limit"), n.DEATHS: 1},
            DeadLettered,
            "poison",
            "lane.batch.due",
        ),
        (
            "lane.requests",
            "urgent.a.b",
            {},
            DeadLettered,
            "unroutable",
            "'urgent.a.b': it begins with one of batch, critical",
        ),
        (
            "lane.requests",
            "urgent.a.b",
            death("lane.critical", "expired"),
            DeadLettered,
            "unroutable",
            "urgent",
        ),  # forged
        ("lane.fallen", "critical.a.b", death("lane.critical", "rejected"), DeadLettered, "internal", "rejected"),
        ("lane.fallen", "critical.a.b", {}, DeadLettered, "internal", "None"),
        ("", "lane.fallen", death("lane.critical", "expired"), DeadLettered, "internal", "does not belong"),  # forged
        ("lane.due", "urgent.a.b", {}, DeadLettered, "unroutable", "urgent"),  # of a lane that was removed
        ("lane.delay.03", "urgent.a.b", {}, DeadLettered, "unroutable", "urgent"),
        ("lane.due", "critical.a.b", {}, DeadLettered, "internal", "lane.due"),
        ("lane.fallen", "vip.a.b", death("lane.vip.due", "delivery_limit"), DeadLettered, "poison", "lane.vip.due"),
        ("lane.delay.03", "critical.a.b", {}, DeadLettered, "internal", "lane.delay.03"),
        ("lane.delay.03", "critical.a.b", death("lane.critical", "expired"), DeadLettered, "internal", "lane.delay.03"),
        ("lane.fallen", "critical.a.b", {"x-death": "rubbish"}, DeadLettered, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": ["rubbish"]}, DeadLettered, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": []}, DeadLettered, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": 7}, DeadLettered, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": [{"queue": 5, "reason": []}]}, DeadLettered, "internal", "5"),
    ],
)
async def test_the_outcome_of_a_fallen_request_follows_from_its_last_death(
    exchange: str, key: str, headers: dict[str, Any], kind: type[DeadLettered | Refused], code: str, named: str
) -> None:
    delivery = Bench().delivery(exchange=exchange, routing_key=key, headers=headers, queue="lane.fallen")
    outcome = await FALLEN.handle(FALLEN.job_of(delivery))
    assert isinstance(outcome, kind)
    assert outcome.problem.code == code
    assert named in outcome.problem.detail


async def test_a_request_that_exceeds_the_delivery_limit_for_the_first_time_goes_back_to_its_lane() -> None:
    """It may only have waited in workers that another request killed."""
    delivery = Bench().delivery(
        exchange="lane.fallen", routing_key="batch.a.b", headers=death("lane.batch", "delivery_limit")
    )
    job = FALLEN.job_of(delivery)
    assert isinstance(await FALLEN.handle(job), Deferred)
    assert job.deaths == 1


@pytest.mark.parametrize(
    ("exchange", "headers", "lane", "trusted"),
    [
        ("lane.fallen", death("lane.normal", "expired"), "normal", False),
        ("lane.fallen", death("lane.normal.due", "delivery_limit"), "normal", True),
        ("lane.fallen", death("lane.unknown", "expired"), None, False),
        ("lane.fallen", {}, None, False),
        ("lane.requests", death("lane.normal.due", "delivery_limit"), None, False),  # forged
        ("lane.due", {}, "normal", True),
        ("lane.delay.05", {}, "normal", True),
    ],
)
def test_internal_headers_are_believed_if_the_request_fell_from_a_delay_or_a_due_queue(
    exchange: str, headers: dict[str, Any], lane: str | None, trusted: bool
) -> None:
    told = {n.ATTEMPT: 3, n.USER_ID: "shop", **headers}
    delivery = Bench().delivery(exchange=exchange, routing_key="normal.a.b", headers=told, queue="lane.fallen")
    job = FALLEN.job_of(delivery)
    assert (job.lane.name if job.lane else None) == lane
    assert job.trusted is trusted
    assert job.attempts == (3 if trusted else 0)


@pytest.mark.parametrize(("reason", "expected"), [("delivery_limit", True), ("expired", False)])
def test_a_request_that_exceeded_the_delivery_limit_counts_as_redelivered(reason: str, expected: bool) -> None:
    delivery = Bench().delivery(exchange="lane.fallen", headers=death("lane.critical", reason), queue="lane.fallen")
    assert FALLEN.job_of(delivery).redelivered is expected
