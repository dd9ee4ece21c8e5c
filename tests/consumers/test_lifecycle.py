"""What a trace shows of a request, such as where it waited, and what events and the log tell of its end."""

import json
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from consumers.clock import moment_text
from consumers.job import Attempted, Job
from consumers.lifecycle import record, waits
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
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry.tracing import Tracing
from tests.support.completions import CANCELLED, answered, failed
from tests.support.jobs import NOW_MS, Bench, read
from topology.codec.headers import FlowHop

MS = 1_000_000
TAKEN_NS = NOW_MS * MS


def found(taken_ns: int = TAKEN_NS, **given: Any) -> list[tuple[str, int, int]]:
    """The name of each wait, and when it began and ended, in ms from now."""
    return [
        (each.name, each.start_ns // MS - NOW_MS, each.end_ns // MS - NOW_MS)
        for each in waits(Bench().job(**given), taken_ns)
    ]


def test_a_dead_letter_that_is_published_again_waited_among_the_others_before() -> None:
    headers = {n.SENT_MS: NOW_MS - 10, n.DEAD_AT: moment_text(NOW_MS - 3000)}
    assert found(headers=headers) == [("wait (dead letter)", -3000, -10), ("wait lane.critical", -10, 0)]


PROBLEM = RequestProblem("too_large", "")


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Answered(body=b"{}", model="m", provider="p"), {"lane.outcome": "answered"}),
        (Batched(params=b""), {"lane.outcome": "batched"}),
        (Deferred(delay_ms=7, reason="rpm"), {"lane.outcome": "deferred", "lane.delay_ms": 7}),
        (
            PipelineAdvanced(flow=FlowHop(step="b", deadline_ms=1), state=b"", lane="critical", step="a", delay_ms=7),
            {"lane.outcome": "stepped", "lane.delay_ms": 7},
        ),
        (
            Retried(delay_ms=7, error="529"),
            {"lane.outcome": "retried", "lane.delay_ms": 7, "error.type": "attempt_failed"},
        ),
        (Refused(PROBLEM), {"lane.outcome": "refused", "error.type": "too_large"}),
        (DeadLettered(PROBLEM), {"lane.outcome": "buried", "error.type": "too_large"}),
        (Superseded(PROBLEM), {"lane.outcome": "dropped", "error.type": "too_large"}),
        (Replayed(completion=answered()), {"lane.outcome": "replayed"}),
        (Replayed(completion=failed("poison")), {"lane.outcome": "replayed", "error.type": "poison"}),
    ],
)
def test_the_span_of_a_delivery_says_what_its_request_is_and_how_it_ended_and_each_wait_has_its_own(
    outcome: Outcome, told: dict[str, object]
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    headers = {n.SENT_MS: NOW_MS - 700, n.TRACEPARENT: f"00-{'a' * 32}-{'b' * 16}-01"}
    delivery = Bench().delivery(headers=headers)
    delivery.redelivered = True
    job = read(Bench().job(delivery=delivery))
    job.attempted = Attempted(started_ms=NOW_MS + 50)
    with tracing.process(Message(body=b""), queue="lane.critical") as job.span:
        record(tracing, job, outcome, taken_ns=TAKEN_NS)

    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"process lane.critical", "wait lane.critical", "wait (turn)"}
    process = spans["process lane.critical"]
    said = {key: value for key, value in (process.attributes or {}).items() if key.split(".")[0] in ("lane", "error")}
    request = {"name": "critical", "app": "shop", "attempt": 1, "wait_ms": 750, "redelivered": True}
    assert said == {**{f"lane.{key}": value for key, value in request.items()}, **told}
    queue, turn = spans["wait lane.critical"], spans["wait (turn)"]
    assert queue.parent is not None
    assert queue.parent.span_id == int("b" * 16, 16), "it began before the delivery, and follows its publishing"
    assert turn.parent == process.context
    assert (queue.start_time, queue.end_time) == (TAKEN_NS - 700 * MS, TAKEN_NS)
    assert (turn.start_time, turn.end_time) == (TAKEN_NS, TAKEN_NS + 50 * MS)


def events(bench: Bench) -> list[str]:
    return [json.loads(body)["event"] for body in bench.notices.bodies]


def marked(job: Job, whose: str) -> Replayed:
    """The outcome of a request that was cancelled: before any message of it came, by this one, or by another."""
    mark = {"none": None, "its own": job.fingerprint.mark, "another": b"another"}[whose]
    return Replayed(completion=replace(CANCELLED, mark=mark))


@pytest.mark.parametrize(
    ("whose", "redelivered", "event"),
    [
        ("none", False, "cancelled"),
        ("its own", True, "cancelled"),
        ("its own", False, "replayed"),
        ("another", True, "replayed"),
    ],
)
def test_a_cancellation_is_told_unless_the_event_was_published_before(
    whose: str, redelivered: bool, event: str
) -> None:
    bench = Bench()
    delivery = bench.delivery()
    delivery.redelivered = redelivered
    job = bench.job(delivery=delivery)
    bench.lifecycle.publish_outcome(job, marked(job, whose))
    assert events(bench) == [event]


def test_an_outcome_that_is_sent_again_is_no_cancellation() -> None:
    bench = Bench()
    bench.lifecycle.publish_outcome(bench.job(), Replayed(completion=failed("poison")))
    assert events(bench) == ["replayed"]


@pytest.mark.parametrize(
    ("outcome", "logged", "published"),
    [
        (Refused(PROBLEM), "request.refused", ["failed"]),
        (Refused(PROBLEM, is_repeat=True), "request.refused", []),
        (DeadLettered(PROBLEM), "request.buried", ["failed", "dead"]),
    ],
)
def test_an_error_is_logged_and_only_what_is_kept_as_a_dead_letter_is_told_to_be_dead(
    outcome: Outcome, logged: str, published: list[str]
) -> None:
    bench = Bench()
    with capture_logs() as logs:
        bench.lifecycle.publish_outcome(bench.job(), outcome)
    assert [each["event"] for each in logs] == [logged]
    assert events(bench) == published
    assert len(bench.lifecycle.failures) == min(len(published), 1)


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({}, {"attempt": 0, "code": ""}),
        ({n.ATTEMPT: 3, n.DEAD_CODE: "x" * 65}, {"attempt": 3, "code": "x" * 64}),
    ],
)
def test_the_event_of_a_dead_letter_names_its_request(headers: dict[str, object], told: dict[str, object]) -> None:
    bench = Bench()
    letter = Message(body=b"", routing_key="critical.shop.chat", message_id="m-1", headers=headers)
    bench.lifecycle.publish_for_letter(letter, "discarded", by="ann")
    (event,) = map(json.loads, bench.notices.bodies)
    named = {"event": "discarded", "id": "m-1", "lane": "critical", "app": "shop", "at_ms": NOW_MS, "by": "ann"}
    assert event == {**named, **told}


def test_what_requesters_choose_is_cut_in_events_and_among_the_failures() -> None:
    bench = Bench()
    job = bench.job(message_id="i" * 129, routing_key=f"critical.{'a' * 65}.chat")
    bench.lifecycle.publish_outcome(job, Refused(PROBLEM))
    (event,) = map(json.loads, bench.notices.bodies)
    (failure,) = bench.lifecycle.failures
    for told in (event, failure):
        assert (told["id"], told["app"]) == ("i" * 128, "a" * 64)
