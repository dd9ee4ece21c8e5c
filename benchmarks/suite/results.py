"""The results of the suite. They are saved as JSON in `benchmarks/results/`."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from suite.medians import Median, ratio


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

    def contestants(self, scenario: str) -> Sequence[str]:
        """The contestants of a scenario, in the order of measuring."""
        return list(dict.fromkeys(run.contestant for run in self.runs if run.scenario == scenario))

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
    """The machine, in one line."""
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
