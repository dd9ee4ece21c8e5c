"""The results of the runs as one table, for people and for docs/reliability.md."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.faults.checker import Recovery, Verdict
from tests.faults.workers import Ending

BEGIN = "<!-- faults: begin (written by `./dev faults --write`) -->"
END = "<!-- faults: end -->"
HEAD = (
    "catalogue",
    "fault",
    "injected",
    "hit work",
    "confirmed",
    "lost",
    "answered twice",
    "calls repeated",
    "longest stall",
    "recovery, median",
    "longest",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its kind of broker, seed, duration and result."""

    on: str
    seed: int
    minutes: float
    verdict: Verdict
    crashes: tuple[Ending, ...]
    provider_calls: int

    @property
    def failures(self) -> list[str]:
        """Everything that is wrong with the run."""
        crashed = [f"crashed: worker {each.worker} ended by itself with {each.code}" for each in self.crashes]
        return [*(str(each) for each in self.verdict.violations), *crashed]


def table(runs: Sequence[Run]) -> str:
    """One line for each fault, separately for single broker and cluster, and one for the total; in Markdown."""
    lines = [_row(HEAD), _row("-" * 3 if n < 2 else "--:" for n in range(len(HEAD)))]
    for on in dict.fromkeys(run.on for run in runs):
        found = [each for run in runs if run.on == on for each in run.verdict.recoveries]
        for code, title in sorted({(each.fault.code, each.fault.title) for each in found}, key=_in_order):
            of_it = [each for each in found if each.fault.title == title]
            lines.append(_row((code, title + (" (cluster)" if on == "cluster" else ""), *_figures(of_it))))
    every = [each for run in runs for each in run.verdict.recoveries]
    stall_s = max((each.lasted_s for run in runs for each in run.verdict.stalls.values()), default=0.0)
    lines.append(
        _row(
            (
                "",
                "**all, calm included**",
                len(every),
                sum(each.fault.in_flight > 0 for each in every),
                sum(run.verdict.confirmed for run in runs),
                sum(run.verdict.lost for run in runs),
                sum(run.verdict.answered_twice for run in runs),
                sum(run.verdict.repeated_calls for run in runs),
                f"{stall_s:.1f} s",
                *_recovery(every),
            )
        )
    )
    return "\n".join(lines)


def text(runs: Sequence[Run], *, broken: Run | None) -> str:
    """The table, how it was made, and how the deliberately broken worker did."""
    seeds = ", ".join(dict.fromkeys(str(run.seed) for run in runs))
    where = " and ".join(dict.fromkeys(run.on for run in runs))
    minutes = sum(run.minutes for run in runs)
    violations = sum(len(run.failures) for run in runs)
    calls = sum(run.provider_calls for run in runs)
    said = [
        f"{minutes:.0f} minutes under load, seeds {seeds}, {where}: {violations} violations, {calls} provider calls.",
        "",
        table(runs),
    ]
    if broken is not None:
        lost, confirmed = broken.verdict.lost, broken.verdict.confirmed
        said += [
            "",
            f"The broken worker, which acknowledges first, on the schedule of seed {broken.seed} "
            f"({broken.minutes:.0f} minutes): {lost} of {confirmed} confirmed requests lost, and found.",
        ]
    return "\n".join(said)


def write(path: Path, found: str) -> None:
    """Write it between the markers in a document. Raises ValueError if there are none."""
    document = path.read_text()
    before, begins, rest = document.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise ValueError(f"{path} has no lines {BEGIN} and {END} to write between")
    path.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{after}")


def _figures(found: Sequence[Recovery]) -> tuple[object, ...]:
    stall_s = max((each.stall_s for each in found), default=0.0)
    return (
        len(found),
        sum(each.fault.in_flight > 0 for each in found),
        sum(each.confirmed for each in found),
        sum(each.lost for each in found),
        sum(each.answered_twice for each in found),
        sum(each.repeated_calls for each in found),
        f"{stall_s:.1f} s",
        *_recovery(found),
    )


def _recovery(found: Sequence[Recovery]) -> tuple[str, str]:
    took = [each.recovered_s for each in found] or [0.0]
    return f"{median(took):.1f} s", f"{max(took):.1f} s"


def _in_order(fault: tuple[str, str]) -> tuple[str, int, str]:
    code, title = fault
    return code[0], int(code[1:]), title


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
