"""Where a request waited, as its trace shows it."""

from typing import Any

import pytest

from consumers.clock import moment_text
from consumers.job import Attempted
from consumers.lifecycle import MS, Wait, waits
from lanekeeper.contract import names as n
from tests.support.jobs import NOW_MS, Bench, read

TAKEN_NS = NOW_MS * MS


def found(taken_ns: int = TAKEN_NS, **given: Any) -> list[tuple[str, int, int]]:
    """The name of each wait, and when it began and ended, in ms from now."""
    return [
        (each.name, each.start_ns // MS - NOW_MS, each.end_ns // MS - NOW_MS)
        for each in waits(Bench().job(**given), taken_ns)
    ]


@pytest.mark.parametrize(("header", "is_shown"), [(NOW_MS - 1, True), (NOW_MS, False), (0, False), (True, False)])
def test_a_request_waits_in_its_queue_since_it_was_sent(header: object, is_shown: bool) -> None:
    expected = [("wait lane.critical", -1, 0)] if is_shown else []
    assert found(headers={n.SENT_MS: header}) == expected


def test_a_request_that_was_read_waits_since_it_was_published_and_not_if_that_is_unknown() -> None:
    known, unknown = (read(Bench().job(headers=headers)) for headers in ({n.SENT_MS: NOW_MS - 700}, {}))
    assert waits(known, TAKEN_NS) == [Wait("wait lane.critical", (NOW_MS - 700) * MS, TAKEN_NS)]
    assert waits(unknown, TAKEN_NS + 5 * MS) == []


def test_a_dead_letter_that_is_published_again_waited_among_the_others_before() -> None:
    headers = {n.SENT_MS: NOW_MS - 10, n.DEAD_AT: moment_text(NOW_MS - 3000)}
    assert found(headers=headers) == [("wait (dead letter)", -3000, -10), ("wait lane.critical", -10, 0)]


@pytest.mark.parametrize("back_ms", [-200, 300])
def test_a_request_that_was_delayed_waits_in_the_delay_and_then_in_the_due_queue(back_ms: int) -> None:
    queue, back = "lane.critical.due", min(back_ms, 0)  # no clock's error makes a wait end after the delivery
    headers = {n.HOP_MS: NOW_MS - 5000, n.BACK_MS: NOW_MS + back_ms}
    due = [(f"wait {queue}", back, 0)] if back else []
    assert found(headers=headers, exchange="lane.due", queue=queue) == [(f"delay {queue}", -5000, back), *due]


@pytest.mark.parametrize(("waited_ms", "is_shown"), [(4, False), (5, True)])
def test_the_wait_for_its_turn_in_the_worker_is_shown_from_five_ms(waited_ms: int, is_shown: bool) -> None:
    job = Bench().job()
    job.attempted = Attempted(started_ms=NOW_MS + waited_ms)
    expected = [(TAKEN_NS, TAKEN_NS + waited_ms * MS, True)] if is_shown else []
    assert [(each.start_ns, each.end_ns, each.is_in_worker) for each in waits(job, TAKEN_NS)] == expected
