"""Requests that the broker took out of a queue or could not route get the outcome that the contract defines."""

from typing import Any

import pytest

from consumers.fallen import Fallen
from consumers.outcomes import Buried, Refused
from lanekeeper.contract import names as n
from tests.support.jobs import NAMES, NOW_MS, Bench
from topology.lanes import DEFAULT_LANES

FALLEN = Fallen(DEFAULT_LANES, names=NAMES, now_ms=lambda: NOW_MS)


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
        ("lane.fallen", "batch.a.b", death("lane.batch.due", "delivery_limit"), Buried, "poison", "lane.batch.due"),
        (
            "lane.requests",
            "urgent.a.b",
            {},
            Buried,
            "unroutable",
            "'urgent.a.b': it begins with one of batch, critical",
        ),
        ("lane.requests", "urgent.a.b", death("lane.critical", "expired"), Buried, "unroutable", "urgent"),  # forged
        ("lane.fallen", "critical.a.b", death("lane.critical", "rejected"), Buried, "internal", "rejected"),
        ("lane.fallen", "critical.a.b", {}, Buried, "internal", "None"),
        ("lane.due", "urgent.a.b", {}, Buried, "internal", "lane.due"),
        ("lane.delay.03", "critical.a.b", {}, Buried, "internal", "lane.delay.03"),
        ("lane.delay.03", "critical.a.b", death("lane.critical", "expired"), Buried, "internal", "lane.delay.03"),
        ("lane.fallen", "critical.a.b", {"x-death": "rubbish"}, Buried, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": ["rubbish"]}, Buried, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": []}, Buried, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": 7}, Buried, "internal", "None"),
        ("lane.fallen", "critical.a.b", {"x-death": [{"queue": 5, "reason": []}]}, Buried, "internal", "5"),
    ],
)
async def test_the_outcome_of_a_fallen_request_follows_from_its_last_death(
    exchange: str, key: str, headers: dict[str, Any], kind: type[Buried | Refused], code: str, named: str
) -> None:
    delivery = Bench().delivery(exchange=exchange, routing_key=key, headers=headers, queue="lane.fallen")
    outcome = await FALLEN.handle(FALLEN.job_of(delivery))
    assert isinstance(outcome, kind)
    assert outcome.problem.code == code
    assert named in outcome.problem.detail


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
