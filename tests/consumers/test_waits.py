"""The spans of a request's waits, computed from its message and its job."""

from typing import Any

import pytest

from consumers import waits
from consumers.job import Attempted, Job, moment_text
from lanekeeper.contract import names as n
from tests.support import jobs
from tests.support.jobs import NOW_MS, Bench

MS = 1_000_000
TAKEN_NS = NOW_MS * MS + 400_000


def job_of(headers: dict[str, Any], *, read: bool = True, **properties: Any) -> Job:
    job = Bench().job(headers=headers, **properties)
    if read:
        jobs.read(job, now_ms=job.taken_ms)
    return job


def told(job: Job) -> list[tuple[str, float, float]]:
    """For each wait: its name, and how many ms before the delivery it began and ended."""
    return [
        (each.name, (TAKEN_NS - each.start_ns) / MS, (TAKEN_NS - each.end_ns) / MS)
        for each in waits.before_delivery(job, TAKEN_NS)
    ]


def test_a_fresh_request_waited_since_it_was_published() -> None:
    assert told(job_of({n.SENT_MS: NOW_MS - 70})) == [("wait lane.critical", 70.4, 0)]


@pytest.mark.parametrize("headers", [{}, {n.SENT_MS: NOW_MS + 5000}], ids=["not said", "a clock ahead of ours"])
def test_a_wait_of_unknown_start_has_no_span(headers: dict[str, Any]) -> None:
    assert told(job_of(headers)) == []


def test_an_expired_request_waited_although_it_was_never_read() -> None:
    job = job_of({n.SENT_MS: NOW_MS - 70}, read=False, queue="lane.fallen", exchange="lane.fallen")
    assert told(job) == [("wait lane.fallen", 70.4, 0)]


def test_a_retry_was_delayed_and_then_waited_for_a_slot() -> None:
    headers = {n.SENT_MS: NOW_MS - 999, n.HOP_MS: NOW_MS - 330, n.BACK_MS: NOW_MS - 30, n.FIRST_SEEN_MS: NOW_MS - 900}
    job = job_of(headers, exchange="lane.due", queue="lane.critical.due")
    assert told(job) == [("delay lane.critical.due", 330.4, 30.4), ("wait lane.critical.due", 30.4, 0)]


def test_a_delay_that_our_clock_sees_end_early_ends_at_the_delivery() -> None:
    headers = {n.HOP_MS: NOW_MS - 330, n.BACK_MS: NOW_MS + 20}
    job = job_of(headers, exchange="lane.due", queue="lane.critical.due")
    assert told(job) == [("delay lane.critical.due", 330.4, 0)]


def test_a_requesters_forged_delay_headers_make_no_span() -> None:
    assert told(job_of({n.HOP_MS: NOW_MS - 330, n.BACK_MS: NOW_MS - 30})) == []


def test_a_dead_letter_that_was_published_again_waited_in_lane_dead() -> None:
    headers = {n.SENT_MS: NOW_MS - 9000, n.DEAD_AT: moment_text(NOW_MS - 5000)}
    assert told(job_of(headers)) == [("wait (dead letter)", 5000.4, 0)]


def test_a_wait_for_the_budget_has_a_span_only_if_it_took_time() -> None:
    job = job_of({})
    job.attempted = Attempted(started_ms=NOW_MS + 4)
    assert not list(waits.before_call(job, TAKEN_NS))
    job.attempted = Attempted(started_ms=NOW_MS + 3000)
    assert list(waits.before_call(job, TAKEN_NS)) == [waits.Wait("wait (turn)", TAKEN_NS, (NOW_MS + 3000) * MS)]


@pytest.mark.parametrize(("waited_ms", "spans"), [(0, 0), (1, 1)])
def test_a_wait_has_a_span_from_a_millisecond_on(waited_ms: int, spans: int) -> None:
    job = job_of({n.SENT_MS: NOW_MS - waited_ms})
    assert len(list(waits.before_delivery(job, NOW_MS * MS))) == spans


@pytest.mark.parametrize(("waited_ms", "spans"), [(4, 0), (5, 1)])
def test_a_wait_for_the_budget_has_a_span_from_five_milliseconds_on(waited_ms: int, spans: int) -> None:
    job = job_of({})
    job.attempted = Attempted(started_ms=NOW_MS + waited_ms)
    assert len(list(waits.before_call(job, NOW_MS * MS))) == spans


@pytest.mark.parametrize("said", [True, 0, -1, "7"])
def test_an_expired_request_with_a_wrong_time_has_no_span(said: object) -> None:
    assert told(job_of({n.SENT_MS: said}, read=False, queue="lane.fallen", exchange="lane.fallen")) == []
