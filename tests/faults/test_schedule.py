"""A schedule follows from its seed and contains every fault; the report shows the results."""

from pathlib import Path

from tests.faults import report
from tests.faults.checker import check
from tests.faults.faults import FAULTS
from tests.faults.history import Asked, Disturbed, Published
from tests.faults.report import Run
from tests.faults.schedule import plan
from tests.faults.workers import Ending


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert plan(FAULTS, seed=1, seconds=300) == plan(FAULTS, seed=1, seconds=300)
    assert plan(FAULTS, seed=1, seconds=300) != plan(FAULTS, seed=2, seconds=300)


def test_several_runs_together_cause_every_fault_before_repeating_one() -> None:
    begun = [
        each.fault
        for at in range(3)
        for each in plan(FAULTS, seed=at, seconds=60, part=(at, 3))[: len(FAULTS) // 3 + 1]
    ]
    assert set(begun) == set(FAULTS)


def a_run() -> Run:
    events = (
        Asked(at_s=0, question="q", identity="q", lane="batch", words="q"),
        Published(at_s=0.1, question="q", sent_s=0, told="confirmed"),
        Disturbed(at_s=0.05, healed_s=0.2, code="A1", title="worker killed", against="worker 1", in_flight=2),
    )
    return Run("single", 1, 2.0, check(events), (Ending(1.0, 0, -11, frozenset()),), 0)


def test_a_run_fails_if_a_request_was_lost_or_a_worker_crashed() -> None:
    lost, crashed = a_run().failures
    assert lost.startswith("lost: q: batch")
    assert crashed == "crashed: worker 0 ended by itself with -11"


def test_the_table_is_written_between_its_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(document, report.text([a_run()], broken=None))
    written = document.read_text()
    assert written.startswith(f"before\n{report.BEGIN}\n")
    assert written.endswith(f"{report.END}\nafter\n")
    assert "| A1 | worker killed | 1 | 1 | 1 | 1 |" in written
    assert "old" not in written
