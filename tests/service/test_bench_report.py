import re
from pathlib import Path

from benchmarks import bench, gateway, scale
from benchmarks.harness import report
from benchmarks.harness.provider import CallLog
from benchmarks.harness.report import marks
from benchmarks.harness.results import Median, Results, Run, ratio

BEGIN, END = marks(bench.COMMAND)


def results(*runs: Run) -> Results:
    return Results(at="2026-01-01T00:00:00Z", machine="2 cores", versions={"RabbitMQ": "4.3.6"}, runs=list(runs))


def drained(contestant: str, number: int, cpu_ms: float) -> Run:
    return Run(
        scenario="drain", contestant=contestant, round=number, figures={"cpu_ms": cpu_ms, "per_s": 1000 / cpu_ms}
    )


def test_the_ratio_is_the_median_of_each_rounds_ratio() -> None:
    assert ratio({0: 2.0, 1: 30.0, 2: 4.0}, {0: 1.0, 1: 10.0, 2: 4.0}) == Median(2.0, 1.0, 3.0, 3)


def test_a_round_that_only_one_contestant_completed_does_not_count() -> None:
    assert ratio({0: 2.0, 1: 9.0}, {0: 1.0, 2: 1.0}) == Median(2.0, 2.0, 2.0, 1)
    assert ratio({0: 2.0}, {1: 1.0}) is None


def test_an_aim_shows_the_ratio_to_the_floor_and_its_range() -> None:
    found = results(
        *(drained("floor", number, 1.0) for number in range(3)),
        *(drained("lanekeeper", number, cpu_ms) for number, cpu_ms in enumerate((1.2, 1.3, 1.6))),
    )

    assert "| ≤ 1.4 × | 1.3 × (1.2 to 1.6) | yes |" in report.aims(found, bench.AIMS)


def test_a_run_that_lost_a_message_has_no_figure_and_is_reported() -> None:
    lost = Run(scenario="drain", contestant="celery", round=0, error="Spoiled: celery: 1 of 800 requests are lost")

    told = bench.tables(results(drained("floor", 0, 1.0), lost))

    assert "no figure: drain, celery: Spoiled: celery: 1 of 800 requests are lost" in told
    assert "| celery |" not in told


def test_a_report_is_written_only_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    report.between(page, "new", command=bench.COMMAND)

    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_what_the_gateway_adds_is_the_difference_to_the_direct_call_of_the_same_round() -> None:
    def took(contestant: str, number: int, p50_ms: float) -> Run:
        return Run(scenario="first token", contestant=contestant, round=number, figures={"p50_ms": p50_ms})

    found = results(took("direct", 0, 1), took("lanekeeper", 0, 6), took("direct", 1, 10), took("lanekeeper", 1, 16))

    assert "| first token: added p50 | ≤ 5 ms | 5.5 ms (5 to 6) | **no** |" in gateway.tables(found)


def test_limits_and_sizes_follow_from_the_measured_costs() -> None:
    def ran(scenario: str, contestant: str, **figures: float) -> Run:
        return Run(scenario=scenario, contestant=contestant, round=0, figures=figures)

    cost = {"worker_ms": 0.8, "redis_ms": 0.1, "node_ms": 0.3, "nodes_ms": 0.9, "kept_bytes": 2000.0, "scripts": 2.0}
    found = results(
        *(ran("costs", name, per_s=900, **cost) for name in (scale.ONE, scale.THREE)),
        ran("bare held", "queue", queue_us=25),
        *(ran("held", name, share=0.05, per_s=490) for name in ("queue", "Redis", "two cells")),
        ran("gateway", "gateway", gateway_ms=1.0),
        ran("memory", "worker", idle_mib=120, flight_mib=0.05),
    )

    told = re.sub(" +", " ", scale.tables(found))

    assert "| queue | 0.050 | 2,000 | 490 | 40,000 |" in told
    assert "| Redis | 0.050 | 500 | 490 | 10,000 |" in told
    assert "| cells | 1 | 1 | 17 |" in told
    assert "| cores of all broker nodes | 0.009 | 0.9 | 90 |" in told


def test_the_books_count_requests_that_were_called_twice(tmp_path: Path) -> None:
    writing, reading = CallLog(tmp_path / "call_log", most=10), CallLog(tmp_path / "call_log", most=10)

    for number in (1, 2, 1):
        writing.begin(number, 5.0)

    assert (reading.calls, reading.repeated, reading.began[2], reading.began[3]) == (3, 1, 5.0, 0.0)
