"""A lane's figures: counts, and a limited number of the latest waits and run times."""

import pytest

from consumers.capacity.activity import SAMPLES, LaneActivity, quantile
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Retried
from lanekeeper.contract.problems import RequestProblem

PROBLEM = RequestProblem("internal", "…")
ANSWERED = Answered(body=b"{}", model="m", provider="p")
FIGURES = ("answered", "failed", "retried", "deferred", "dropped", "throughput_per_min")


@pytest.mark.parametrize(
    ("outcome", "figures"),
    [
        (ANSWERED, (1, 0, 0, 0, 0, 1)),
        (Refused(PROBLEM), (0, 1, 0, 0, 0, 1)),
        (Buried(PROBLEM), (0, 1, 0, 0, 0, 1)),
        (Dropped(PROBLEM), (0, 0, 0, 0, 1, 1)),
        (Retried(delay_ms=0, error="x"), (0, 0, 1, 0, 0, 0)),
        (Deferred(delay_ms=0, reason="x"), (0, 0, 0, 1, 0, 0)),
    ],
)
def test_each_outcome_is_counted_once(outcome: Outcome, figures: tuple[int, ...]) -> None:
    activity = LaneActivity("critical", slots=16, due_slots=4)
    activity.record(outcome, wait_ms=5, run_ms=None)
    told = activity.snapshot()
    assert tuple(told[name] for name in FIGURES) == figures
    assert (told["waits_ms"], told["runs_ms"]) == ([], [])
    assert told["deferred_for"] == ({"x": 1} if isinstance(outcome, Deferred) else {})


def test_waits_and_run_times_are_recorded_for_attempts_only() -> None:
    activity = LaneActivity("critical", slots=16, due_slots=4)
    activity.record(ANSWERED, wait_ms=5, run_ms=300)
    activity.record(Retried(delay_ms=0, error="x"), wait_ms=6, run_ms=0)
    activity.record(Deferred(delay_ms=0, reason="x"), wait_ms=7, run_ms=None)
    told = activity.snapshot()
    assert (told["waits_ms"], told["runs_ms"]) == ([5, 6], [300, 0])


def test_only_the_latest_waits_and_run_times_are_kept() -> None:
    activity = LaneActivity("critical", slots=16, due_slots=4)
    for at in range(10_000):
        activity.record(ANSWERED, wait_ms=at, run_ms=1)
    told = activity.snapshot()
    assert told["waits_ms"] == list(range(10_000 - SAMPLES, 10_000))
    assert told["answered"] == told["throughput_per_min"] == 10_000


@pytest.mark.parametrize(("later_s", "told"), [(59, 1), (60, 0)])
def test_the_throughput_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch, later_s: float, told: int) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    activity = LaneActivity("critical", slots=16, due_slots=4)
    activity.record(ANSWERED, wait_ms=5, run_ms=1)
    now_s += later_s
    assert activity.snapshot()["throughput_per_min"] == told


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7], 0.5, 7),
        ([7], 0, 7),
        ([1, 2, 3, 4], 0.5, 2),
        ([1, 2, 3, 4], 0.95, 4),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 1, 100),
    ],
)
def test_quantiles_are_values_that_were_measured(values: list[int], share: float, expected: int | None) -> None:
    assert quantile(values, share) == expected


def test_waits_of_unknown_start_are_counted_as_long_as_they_are_kept() -> None:
    activity = LaneActivity("critical", slots=16, due_slots=4)
    for _ in range(3):
        activity.record(ANSWERED, wait_ms=5, run_ms=300, since_delivery=True)
    assert activity.snapshot()["waits_since_delivery"] == 3
    for _ in range(SAMPLES):
        activity.record(ANSWERED, wait_ms=5, run_ms=300)
    assert activity.snapshot()["waits_since_delivery"] == 0
