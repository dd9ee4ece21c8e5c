"""A request may run until its deadline and not at it; its problem says where the time was spent."""

from dataclasses import replace

import pytest

from consumers.gates.deadline import DeadlineGate
from consumers.job import Attempted, Job
from consumers.outcomes import Refused
from lanekeeper.contract import names as n
from tests.support.jobs import NOW_MS, Bench, decoded, read


def job() -> Job:
    return read(Bench().job(headers={n.DEADLINE_MS: 5_000, n.SENT_MS: NOW_MS - 700}))


@pytest.mark.parametrize(("left_ms", "is_over"), [(1, False), (0, True), (-1, True)])
async def test_at_its_deadline_a_request_is_over(left_ms: int, is_over: bool) -> None:
    some = job()
    gate = DeadlineGate(now_ms=lambda: decoded(some).request.deadline_ms - left_ms)
    found = await gate.enter(some, decoded(some))

    assert isinstance(found, Refused) == is_over


@pytest.mark.parametrize(
    ("attempted", "spent"),
    [
        (None, "700 ms waiting"),
        (Attempted(started_ms=NOW_MS + 200, run_ms=4_100), "900 ms waiting, 4100 ms in attempt 1"),
        (Attempted(started_ms=NOW_MS + 200), "900 ms waiting, 1 attempts made"),
    ],
)
async def test_the_problem_says_where_the_time_was_spent(attempted: Attempted | None, spent: str) -> None:
    some = job()
    some.attempted = None if attempted is None else replace(attempted)
    found = await DeadlineGate(now_ms=lambda: NOW_MS + 60_000).enter(some, decoded(some))

    assert isinstance(found, Refused)
    assert found.problem.code == "deadline_exceeded"
    assert str(found.problem.detail) == f"not answered within 5000 ms: {spent}"
