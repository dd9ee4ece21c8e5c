"""The results of benchmarks: figures of runs that took turns, their medians with ranges, and ratios. They are saved as
JSON in `benchmarks/results/`."""

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from lanekeeper.contract.problems import BrokerUnreachable


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that the part `share` of all values does not exceed. Raises ValueError if there are no
    values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Median:
    """The median of several rounds, with its range."""

    value: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        if not values:
            raise ValueError("no values")
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Median | None:
    """The median of the ratios within each round in which both were measured; None if there is no such round. Keys are
    the numbers of rounds."""
    shared = sorted(mine.keys() & theirs.keys())
    return Median.of([mine[each] / theirs[each] for each in shared]) if shared else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one contestant: its figures, or the error because of which it has none."""

    scenario: str
    contestant: str
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(kw_only=True)
class Results:
    """All runs of one start of the suite."""

    at: str
    machine: str
    versions: dict[str, str]
    quick: bool = False
    took_s: float = 0.0
    left_out: list[str] = field(default_factory=list)
    """Descriptions of what could not be measured, with the reasons."""
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def none_yet(cls, packages: Sequence[str], *, quick: bool = False) -> "Results":
        """Results without runs, with the machine and the versions of `packages`."""
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(at=at, machine=machine(), versions={name: version(name) for name in packages}, quick=quick)

    async def add(self, scenario: str, contestant: str, number: int, figures: Awaitable[dict[str, float]]) -> None:
        """Await the figures of a run and append them, or the error if the run failed. A lost broker is raised."""
        run = Run(scenario=scenario, contestant=contestant, round=number)
        try:
            run = replace(run, figures=await figures)
        except BrokerUnreachable:
            raise
        except Exception as caught:  # one run without a figure must not cost those of the others
            while isinstance(caught, ExceptionGroup):
                caught = caught.exceptions[0]
            run = replace(run, error=f"{type(caught).__name__}: {caught}"[:2000])
        self.runs.append(run)
        told = run.error or "  ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
        print(f"{scenario:<16} {contestant:<15} {told}", file=sys.stderr, flush=True)

    def of(self, scenario: str, contestant: str, figure: str) -> dict[int, float]:
        """A figure of one contestant in each round; keys are the numbers of the rounds."""
        return {
            run.round: run.figures[figure]
            for run in self.runs
            if (run.scenario, run.contestant) == (scenario, contestant) and figure in run.figures
        }

    def median(self, scenario: str, contestant: str, figure: str) -> Median | None:
        found = self.of(scenario, contestant, figure)
        return Median.of(list(found.values())) if found else None

    def ratio(self, scenario: str, figure: str, *, of: str, to: str) -> Median | None:
        return ratio(self.of(scenario, of, figure), self.of(scenario, to, figure))

    def errors(self) -> Iterable[Run]:
        return (run for run in self.runs if run.error)

    def save(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.at.replace(':', '')}{'-quick' if self.quick else ''}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def load(path: Path) -> Results:
    fields = json.loads(path.read_text())
    return Results(**{**fields, "runs": [Run(**run) for run in fields["runs"]]})


def machine() -> str:
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU"
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    kernel = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores ({model}), {memory / 2**20:.0f} GiB, {kernel}, Python {platform.python_version()}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
