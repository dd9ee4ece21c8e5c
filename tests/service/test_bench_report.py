from pathlib import Path

from benchmarks import bench
from benchmarks.harness import report
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


def test_a_run_that_lost_a_message_has_no_figure_and_is_reported() -> None:
    lost = Run(scenario="drain", contestant="celery", round=0, error="Spoiled: celery: 1 of 800 requests are lost")

    found = results(drained("floor", 0, 1.0), lost)

    assert "no figure: drain, celery: Spoiled: celery: 1 of 800 requests are lost" in report.missing(found)
    assert "celery" not in bench.tables(found)


def test_a_report_is_written_only_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    report.between(page, "new", command=bench.COMMAND)

    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
