"""The suite: measures Lanekeeper's cost and speed, and for comparison those of the shortest possible worker and of
other frameworks.

    ./dev bench [--quick] [--only WORD] [--write]     everything; under twenty minutes, with --quick under four
    ./dev bench --only drain --contestants "lanekeeper,no store" --rounds 6       what the store costs; three minutes
    ./dev bench --report [FILE]                       prints the tables of earlier results (default: the newest)

The contestants take turns in one run. Every contestant's handler makes the same SDK call to the same provider. The plan
is run in rounds, as many as fit into the time. A run that lost or repeated a message yields no figure. The raw figures
are written to benchmarks/results/. --write also puts the tables into README.md and docs/performance.md, and draws the
plots.
"""

import argparse
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import uvloop
from suite import planned, report, results
from suite.contestants import FLOOR, PEERS, PEERS_PYTHON, Contestant, lanekeeper
from suite.planned import Scenario
from suite.results import Results, Run
from suite.scenarios import Figures, drain
from suite.stage import Stage, stage

from lanekeeper.contract.problems import BrokerUnreachable

FOLDER = Path(__file__).parent / "results"
WITHIN_S = 19 * 60
OURS = ("aio-pika", "anthropic", "uvloop")
THEIRS = ("celery", "dramatiq", "faststream", "taskiq", "taskiq-aio-pika")


async def measure(plan: Sequence[Scenario], found: Results, *, within_s: float = math.inf) -> None:
    """Run each scenario of `plan` once, then repeat it up to its number of rounds while `within_s` lasts. Appends the
    results to `found`, with what had to be left out."""
    end_s, took_s = time.monotonic() + within_s, dict[str, float]()
    async with stage() as on:
        found.versions["RabbitMQ"] = on.version
        if on.redis_url is None:
            found.left_out.append("dramatiq and taskiq, which answer through Redis: no redis-server is installed")
        left_out = {who.name for who in PEERS if not _can_run(who, on)}
        for number in range(max(scenario.rounds for scenario in plan)):
            for scenario in plan:
                began_s = time.monotonic()
                if number >= scenario.rounds:
                    continue
                if began_s + took_s.get(scenario.name, 0.0) > end_s:
                    found.left_out.append(f"round {number + 1} of {scenario.name}: no time was left")
                    continue
                for who in scenario.contestants:
                    if who.name not in left_out:
                        found.runs.append(await _run(on, scenario, who, number))
                        _report(found.runs[-1])
                took_s[scenario.name] = time.monotonic() - began_s


def _can_run(who: Contestant, on: Stage) -> bool:
    """Whether a framework is installed, and has the Redis that it needs."""
    return PEERS_PYTHON.exists() and (on.redis_url is not None or not who.in_redis)


async def _run(on: Stage, scenario: Scenario, who: Contestant, number: int) -> Run:
    figures: Figures = {}
    error = None
    try:
        figures = await scenario.run(on, who)
    except BrokerUnreachable:
        raise
    except Exception as caught:  # one run without a figure must not cost those of the others
        error = f"{type(caught).__name__}: {caught}"
    return Run(scenario=scenario.name, contestant=who.name, round=number, figures=figures, error=error)


def _report(run: Run) -> None:
    result = run.error or "  ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
    print(f"{run.scenario:<16} {run.contestant:<15} {result}", file=sys.stderr, flush=True)


def no_runs_yet(*, quick: bool = False) -> Results:
    """Results without runs, with the machine, the versions, and what cannot be measured here."""
    found = Results(
        at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=results.machine(),
        versions={name: version(name) for name in OURS},
        quick=quick,
    )
    if PEERS_PYTHON.exists():
        code = "import sys, importlib.metadata as m; print(*(m.version(name) for name in sys.argv[1:]))"
        printed = subprocess.run([PEERS_PYTHON, "-c", code, *THEIRS], capture_output=True, text=True, check=False)
        found.versions |= dict(zip(THEIRS, printed.stdout.split(), strict=False))
    else:
        found.left_out.append("Celery, Dramatiq, FastStream and taskiq: their environment could not be set up")
    if shutil.which("docker") is None:
        found.left_out.append("a broker in Docker: the installed one is used")
    return found


def floor_and_ours(about: str | None) -> None:
    """`./dev bench floor`: runs the scenario `drain` for the floor, Lanekeeper and the checkouts of `--against` in
    turns, and prints their ratios to the floor. `about`: the help text of the command."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--against", type=Path, action="append", default=[], help="another checkout, set up; repeatable"
    )
    options = parser.parse_args()
    trees = [lanekeeper(path.name, code=path.resolve()) for path in options.against]
    contestants = (FLOOR, *trees, lanekeeper())

    async def run(on: Stage, who: Contestant) -> Figures:
        return await drain(on, who, requests=options.requests)

    found = no_runs_yet()
    plan = [Scenario(name="drain", run=run, contestants=contestants, rounds=options.rounds)]
    uvloop.run(measure(plan, found))
    print(report.against_floor(found))
    if list(found.errors()):
        sys.exit("some runs lost or repeated a message: they have no figure")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--only", action="append", metavar="WORD", help="scenarios with this word in their name")
    parser.add_argument("--contestants", metavar="NAME,…", help="these alone; by default all")
    parser.add_argument("--rounds", type=int, help="how often each scenario runs, instead of the plan's number")
    parser.add_argument("--write", action="store_true", help="put tables and plots into README.md and docs/")
    parser.add_argument("--report", nargs="?", const="", metavar="FILE", help="measure nothing: show these results")
    options = parser.parse_args()
    if options.report is None:
        found = no_runs_yet(quick=options.quick)
        plan = planned.plan(quick=options.quick)
        if options.only:
            plan = [each for each in plan if any(word in each.name for word in options.only)]
        if options.contestants:
            plan = [each.only(options.contestants.split(",")) for each in plan]
        if options.rounds:
            plan = [replace(each, rounds=options.rounds) for each in plan]
        began = time.monotonic()
        try:
            uvloop.run(measure(plan, found, within_s=WITHIN_S))
        except BrokerUnreachable as lost:
            found.left_out.append(f"everything after the broker was lost: {lost}")
        found.took_s = time.monotonic() - began
        print(f"written to {found.save(FOLDER)}", file=sys.stderr)
    else:
        found = results.load(Path(options.report) if options.report else max(FOLDER.glob("*.json")))
    print(report.whole(found))
    if options.write:
        report.write(found)


if __name__ == "__main__":
    main()
