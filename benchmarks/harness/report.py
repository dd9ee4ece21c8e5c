"""Makes Markdown tables of results, and writes those that compare contestants into a document. Aims, and runs that
failed, are for whoever runs the benchmark."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness.processes import ROOT
from benchmarks.harness.results import Median, Results

OURS: Final = "lanekeeper"
PAGE: Final = ROOT / "docs/performance.md"
Measured = Callable[[Results], Median | None]


@dataclass(frozen=True)
class Aim:
    """One aim: a figure or a ratio, and the limit that it must reach."""

    text: str
    limit: float
    at_most: bool
    measured: Measured
    unit: str = " ×"

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def row(self, found: Results) -> str:
        sign = "≤" if self.at_most else "≥"
        median = self.measured(found)
        measured = "not measured" if median is None else text(median, self.unit)
        verdict = "" if median is None else ("yes" if self.holds(median.value) else "**no**")
        return f"| {self.text} | {sign} {self.limit:g}{self.unit} | {measured} | {verdict} |"


def ratio(scenario: str, figure: str, *, to: str, of: str = OURS) -> Measured:
    """The measured value of an aim: a ratio, within each round, of two contestants' figures."""
    return lambda found: found.ratio(scenario, figure, of=of, to=to)


def value(scenario: str, figure: str) -> Measured:
    """The measured value of an aim: a figure of Lanekeeper's."""
    return lambda found: found.median(scenario, OURS, figure)


def head(found: Results, command: str, further: str = "") -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    small = " Small sizes, few rounds (`--quick`)." if found.quick else ""
    return (
        f"Measured by `{command}` on {found.at[:10]} in {found.took_s / 60:.0f} minutes: {found.machine}; {versions}."
        f" Figures are medians of the rounds, with their range in brackets.{further}{small}"
    )


def aims(found: Results, aims: Iterable[Aim]) -> str:
    return "\n".join(["| | aim | measured | reached |", "|---|---|---|---|", *(aim.row(found) for aim in aims)])


def side_by_side(found: Results, rows: Iterable[str], columns: Mapping[str, tuple[str, str]]) -> str:
    """A table with a row for each contestant that has a figure; empty without any. `columns`: scenario and figure by
    the column's head."""
    told = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in rows:
        cells = [found.median(scenario, name, figure) for scenario, figure in columns.values()]
        if any(cells):
            told.append(f"| {name} | {' | '.join(map(cell, cells))} |")
    return "\n".join(told) if len(told) > 2 else ""


def missing(found: Results) -> str:
    """What was left out, and which runs failed."""
    told = [f"- left out: {each}" for each in found.left_out]
    told += [f"- no figure: {run.scenario}, {run.contestant}: {(run.error or '')[:200]}" for run in found.errors()]
    return "\n".join(told)


def page(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as an aligned Markdown table; the first is its head."""
    widths = [max(len(row[each]) for row in rows) for each in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def cell(median: Median | None) -> str:
    """A median without its range."""
    return "–" if median is None else number(median.value)


def text(median: Median, unit: str) -> str:
    """A median with its range."""
    ranged = f" ({number(median.least)} to {number(median.most)})" if median.rounds > 1 else ""
    return f"{number(median.value)}{unit}{ranged}"


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def between(path: Path, text: str, *, command: str) -> None:
    """Replace the text between the marks of a command in a file. Raises ValueError if it has no marks."""
    first, last = marks(command)
    before, begin, rest = path.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} has no marks between which tables are written")
    path.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}")


def marks(command: str) -> tuple[str, str]:
    return f"<!-- {command} --write: from here -->", f"<!-- {command} --write: to here -->"
