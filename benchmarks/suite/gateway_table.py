"""Writes the results of benchmarks/gateway.py as tables."""

from collections.abc import Callable

from suite.medians import Median
from suite.report import ROOT, between
from suite.results import Results

COMMAND = "./dev bench gateway"

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("whole answer, one client: p50 ms", "one client", "p50_ms"),
    ("p99 ms", "one client", "p99_ms"),
    ("first token: p50 ms", "first token", "p50_ms"),
    ("p99 ms", "first token", "p99_ms"),
    ("calls/s, 50 clients", "many clients", "per_s"),
    ("CPU-ms a call", "many clients", "cpu_ms"),
)
OURS, DIRECT, PEER = "lanekeeper", "direct", "litellm"
NOT_MEASURED = "not measured"


def text(found: Results) -> str:
    """The results as Markdown: the conditions, the aims, and each contestant's medians with ranges."""
    lines = [*_head(found), "", "| | " + " | ".join(title for title, _, _ in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for name in found.contestants("one client"):
        cells = [_cell(found.median(scenario, name, figure)) for _, scenario, figure in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"No figure: {run.scenario}, {run.contestant}: {run.error}" for run in found.errors())]
    return "\n".join(lines).rstrip()


def write(found: Results) -> None:
    """Put the tables between the marks of README.md (the aims alone) and docs/performance.md."""
    between(ROOT / "README.md", "\n".join(_head(found)), command=COMMAND)
    between(ROOT / "docs/performance.md", text(found), command=COMMAND)


def _head(found: Results) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    small = " Two rounds of 100 calls (`--quick`)." if found.quick else ""
    told = (
        f"Measured by `{COMMAND}` on {found.at[:10]}: {found.machine}; {versions}. Medians of rounds, least and most in"
        f" brackets.{small}"
    )
    left_out = [f"Left out: {each}" for each in found.left_out]
    return [told, *left_out, "", "| the gateway | aim | measured | reached |", "|---|---|---|---|", *_aims(found)]


def _aims(found: Results) -> list[str]:
    rows = []
    for scenario in ("one client", "first token"):
        for figure, most in (("p50_ms", 5.0), ("p99_ms", 15.0)):
            what = f"{scenario}: added {figure.removesuffix('_ms')}"
            rows.append(_row(what, f"< {most:g} ms", _added(found, scenario, figure), lambda value, m=most: value < m))
    ratio = found.ratio("many clients", "per_s", of=OURS, to=PEER)
    rows.append(_row("calls/s at 50 clients, to LiteLLM's", "≥ 3 ×", ratio, lambda value: value >= 3))
    memory = found.median("streams", OURS, "mib")
    rows.append(_row("memory of `serve` with 500 streams", "< 300 MiB", memory, lambda value: value < 300))
    return rows


def _added(found: Results, scenario: str, figure: str) -> Median | None:
    """The median difference to the direct call, computed within each round."""
    ours, direct = found.of(scenario, OURS, figure), found.of(scenario, DIRECT, figure)
    shared = sorted(ours.keys() & direct.keys())
    return Median.of([ours[each] - direct[each] for each in shared]) if shared else None


def _row(what: str, aim: str, median: Median | None, reaches: Callable[[float], bool]) -> str:
    reached = "" if median is None else "yes" if reaches(median.value) else "**no**"
    return f"| {what} | {aim} | {_cell(median)} | {reached} |"


def _cell(median: Median | None) -> str:
    if median is None:
        return NOT_MEASURED
    alone = f"{median.value:.3g}"
    return alone if median.rounds == 1 else f"{alone} ({median.least:.3g} to {median.most:.3g})"
