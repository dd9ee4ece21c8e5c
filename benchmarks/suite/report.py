"""Makes tables of the results (aims, all contestants side by side, floods, details), and writes them into the
documents."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from suite.contestants import PEERS, PEERS_PYTHON
from suite.medians import Median
from suite.processes import HERE, ROOT
from suite.results import Results

OURS: Final = "lanekeeper"
FLOOR: Final = "floor"
COMMAND: Final = "./dev bench"
PICTURE: Final = "docs/pictures/bench"
Measured = Callable[[Results], Median | None]


@dataclass(frozen=True, kw_only=True)
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
        measured = "not measured" if median is None else f"{_text(median, self.unit)}"
        verdict = "" if median is None else ("yes" if self.holds(median.value) else "**no**")
        return f"| {self.text} | {sign} {self.limit:g}{self.unit} | {measured} | {verdict} |"


def _ratio(scenario: str, figure: str, *, of: str = OURS, to: str = FLOOR) -> Measured:
    return lambda found: found.ratio(scenario, figure, of=of, to=to)


def _value(scenario: str, figure: str, *, of: str = OURS) -> Measured:
    return lambda found: found.median(scenario, of, figure)


def _closest_peer(found: Results) -> Median | None:
    """The lowest of the ratios to the peers, so that to the fastest peer."""
    ratios = [found.ratio("drain", "per_core_s", of=OURS, to=peer.name) for peer in PEERS]
    return min((each for each in ratios if each is not None), key=lambda each: each.value, default=None)


def _deepest_to_shallowest(found: Results) -> Median | None:
    shallow, deep = (found.median(f"flood {depth}", OURS, "critical_p99_ms") for depth in (1000, 100_000))
    return Median.of([deep.value / shallow.value]) if shallow and deep else None


AIMS: Final = (
    Aim(
        text="CPU a request, everything on, to the floor's", limit=1.4, at_most=True, measured=_ratio("drain", "cpu_ms")
    ),
    Aim(text="drain, to the floor's", limit=0.7, at_most=False, measured=_ratio("drain", "per_s")),
    Aim(text="50 callers, to the floor's", limit=0.85, at_most=False, measured=_ratio("rpc", "callers_per_s")),
    Aim(text="RPC p50, to the floor's", limit=1.25, at_most=True, measured=_ratio("rpc", "rpc_p50_ms")),
    Aim(text="wake-up when idle, to the floor's", limit=1.25, at_most=True, measured=_ratio("rpc", "idle_p50_ms")),
    Aim(text="requests/s a core, to the closest of the peers'", limit=1.0, at_most=False, measured=_closest_peer),
    *(
        aim
        for jobs in (2000, 100_000)
        for aim in (
            Aim(
                text=f"critical wait p99 under {jobs:,} batch jobs, to the floor's",
                limit=1.0,
                at_most=True,
                measured=_ratio(f"flood {jobs}", "critical_p99_ms"),
            ),
            Aim(
                text=f"slots used under {jobs:,} batch jobs",
                limit=95,
                at_most=False,
                measured=_value(f"flood {jobs}", "slots_used"),
                unit=" %",
            ),
        )
    ),
    Aim(
        text="critical wait p99 under 100,000 batch jobs, to that under 1,000",
        limit=1.25,
        at_most=True,
        measured=_deepest_to_shallowest,
    ),
    Aim(
        text="drain with the store, to that without",
        limit=0.9,
        at_most=False,
        measured=_ratio("drain", "per_s", to="no store"),
    ),
    Aim(
        text="our client's confirmed publishing, to aio-pika's",
        limit=0.9,
        at_most=False,
        measured=_ratio("publish", "per_s"),
    ),
    Aim(text="memory, idle", limit=120, at_most=True, measured=_value("memory", "idle_mib"), unit=" MiB"),
    Aim(text="memory, 200 in flight", limit=160, at_most=True, measured=_value("memory", "in_flight_mib"), unit=" MiB"),
    Aim(
        text="growth of memory, from 10,000 to 100,000 requests",
        limit=5,
        at_most=True,
        measured=_value("memory", "growth_percent"),
        unit=" %",
    ),
    Aim(
        text="drain with traces at 10 %, to that without",
        limit=0.9,
        at_most=False,
        measured=_ratio("drain", "per_s", of="traces at 10 %", to=OURS),
    ),
)

COLUMNS: Final = (
    ("drain/s", "drain", "per_s"),
    ("CPU-ms a request", "drain", "cpu_ms"),
    ("requests/s a core", "drain", "per_core_s"),
    ("confirmed publishes/s", "publish", "per_s"),
    ("RPC p50 ms", "rpc", "rpc_p50_ms"),
    ("idle wake-up ms", "rpc", "idle_p50_ms"),
    ("50 callers/s", "rpc", "callers_per_s"),
    ("critical wait p50 ms", "flood 2000", "critical_p50_ms"),
    ("p99 ms", "flood 2000", "critical_p99_ms"),
    ("slots used %", "flood 2000", "slots_used"),
)
"""The columns of the table of all contestants: head, scenario, figure."""
_DETAILS: Final = {
    "drain": ("per_s", "cpu_ms"),
    "rpc": ("rpc_p99_ms", "callers_p50_ms", "callers_cpu_ms"),
    "mixed": ("critical_p50_ms", "critical_p99_ms", "normal_p50_ms", "slots_used"),
    "first part": ("first_part_p50_ms", "first_part_p99_ms", "stream_cpu_ms"),
    "memory": ("idle_mib", "in_flight_mib", "after_mib", "growth_percent", "deep_per_s", "deep_cpu_ms"),
}


def whole(found: Results) -> str:
    """All tables."""
    parts = (_head(found), aims(found), everybody(found), _flood(found), _details(found), _missing(found))
    return "\n\n".join(part for part in parts if part)


def against_floor(found: Results) -> str:
    """A line for each contestant but the floor: its ratios to the floor, as median and range of the rounds."""
    lines = []
    for name in found.contestants("drain"):
        cpu, rate = (found.ratio("drain", figure, of=name, to=FLOOR) for figure in ("cpu_ms", "per_s"))
        if name != FLOOR and cpu and rate:
            lines.append(f"{name} to the floor: CPU a request {_text(cpu, ' ×')}, drain {_text(rate, ' ×')}")
    return "\n".join(lines)


def aims(found: Results) -> str:
    return "\n".join(["| | aim | measured | reached |", "|---|---|---|---|", *(aim.row(found) for aim in AIMS)])


def everybody(found: Results) -> str:
    heads = [head for head, *_ in COLUMNS]
    rows = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in (FLOOR, OURS, *(peer.name for peer in PEERS)):
        cells = [found.median(scenario, name, figure) for _, scenario, figure in COLUMNS]
        if any(cells):
            rows.append(f"| {name} | {' | '.join('–' if cell is None else _number(cell.value) for cell in cells)} |")
    return "\n".join(rows)


def write(found: Results) -> None:
    """Put the tables between the marks of README.md and docs/performance.md, and draw the plots."""
    is_drawn = _draw(found)
    picture = _picture() if is_drawn else ""
    between(ROOT / "README.md", "\n\n".join(each for each in (_head(found), everybody(found), picture) if each))
    between(ROOT / "docs/performance.md", whole(found))


def _head(found: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    small = " Small sizes, one round (`--quick`)." if found.quick else ""
    return (
        f"Measured by `./dev bench` on {found.at[:10]} in {found.took_s / 60:.0f} minutes: {found.machine}; {versions}."
        " Figures are medians of the rounds. The frameworks take turns in one run, and every handler calls the same"
        " provider through the same SDK; Lanekeeper's worker uses it to build the first call, and sends later calls"
        f" itself with that call's URL and headers.{small}"
    )


def _flood(found: Results) -> str:
    rows = []
    for scenario in (run.scenario for run in found.runs if run.scenario.startswith("flood ")):
        row = f"| {int(scenario.split()[1]):,} |"
        for name in (FLOOR, OURS):
            figures = ("critical_p50_ms", "critical_p99_ms", "slots_used")
            medians = [found.median(scenario, name, figure) for figure in figures]
            row += " | ".join([""] + ["–" if each is None else _number(each.value) for each in medians])[2:] + " |"
        if row not in rows:
            rows.append(row)
    if not rows:
        return ""
    head = "| batch jobs | floor: critical wait p50 ms | p99 ms | slots used % | Lanekeeper: p50 ms | p99 ms | used % |"
    return "\n".join([head, "|---" * 7 + "|", *rows])


def _details(found: Results) -> str:
    rows = []
    for scenario in dict.fromkeys(run.scenario for run in found.runs):
        if scenario == "publish" or scenario.startswith("flood "):
            continue
        for name in found.contestants(scenario):
            medians = {
                figure: found.median(scenario, name, figure) for figure in _DETAILS.get(scenario, ("per_s", "cpu_ms"))
            }
            told = ", ".join(
                f"{figure.replace('_', ' ')} {_text(median, '')}" for figure, median in medians.items() if median
            )
            if told:
                rows.append(f"| {scenario} | {name} | {told} |")
    return "\n".join(["| scenario | | median (range) |", "|---|---|---|", *rows]) if rows else ""


def _missing(found: Results) -> str:
    told = [f"- left out: {each}" for each in found.left_out]
    told += [f"- no figure: {run.scenario}, {run.contestant}: {(run.error or '')[:200]}" for run in found.errors()]
    return "\n".join(told)


def _text(median: Median, unit: str) -> str:
    ranged = f" ({_number(median.least)} to {_number(median.most)})" if median.rounds > 1 else ""
    return f"{_number(median.value)}{unit}{ranged}"


def _number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _draw(found: Results) -> bool:
    if not PEERS_PYTHON.exists():
        return False
    path = found.save(HERE / "results")
    command = [str(PEERS_PYTHON), str(HERE / "suite" / "plots.py"), str(path), str(ROOT / PICTURE)]
    return subprocess.run(command, check=False).returncode == 0


def _picture() -> str:
    return "\n".join(
        (
            "<picture>",
            f'  <source media="(prefers-color-scheme: dark)" srcset="{PICTURE}-dark.png">',
            f'  <img alt="Requests a second and core; wait of critical requests" src="{PICTURE}-light.png">',
            "</picture>",
        )
    )


def between(path: Path, text: str, *, command: str = COMMAND) -> None:
    """Replace the text between the marks of a command in a file. Raises ValueError if it has no marks."""
    first, last = marks(command)
    before, begin, rest = path.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} has no marks between which tables are written")
    path.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}")


def marks(command: str) -> tuple[str, str]:
    return f"<!-- {command} --write: from here -->", f"<!-- {command} --write: to here -->"
