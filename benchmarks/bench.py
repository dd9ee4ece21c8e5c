"""The suite: measures Lanekeeper's cost and speed, and for comparison those of the shortest possible worker and of
other frameworks.

    ./dev bench [--quick] [--only WORD] [--write]     everything; under twenty minutes, with --quick under four
    ./dev bench --only drain --contestants "lanekeeper,no store" --rounds 6       what the store costs; three minutes
    ./dev bench --report [FILE]                       prints the tables of earlier results (default: the newest)

The contestants take turns in one run. Every contestant's handler makes the same SDK call to the same provider. The plan
is run in rounds, as many as fit into the time. A run that lost or repeated a message yields no figure. The raw figures
are written to benchmarks/results/. --write also puts the tables into docs/performance.md.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.harness import report, results
from benchmarks.harness.contestants import FLOOR, ONCE, PEERS, PEERS_PYTHON, Contestant, floor_with_lanes, lanekeeper
from benchmarks.harness.report import OURS, PAGE, Aim, ratio, value
from benchmarks.harness.results import Median, Results
from benchmarks.harness.stage import Stage, stage
from benchmarks.scenarios import Figures, drain, flood, memory, publish, rpc
from lanekeeper.contract.problems import BrokerUnreachable

COMMAND = "./dev bench"
FOLDER = Path(__file__).parent / "results"
WITHIN_S = 19 * 60
PACKAGES = ("aio-pika", "anthropic", "uvloop")
THEIRS = ("celery", "dramatiq", "faststream", "taskiq", "taskiq-aio-pika")
TRACED = "traces at 10 %"
STORELESS = "no store"
DEPTHS = (1000, 2000, 10_000, 100_000)
ABOUT = " The frameworks take turns in one run, and every handler calls the same provider through the same SDK."


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario of the plan."""

    name: str
    run: Callable[[Stage, Contestant], Awaitable[Figures]]
    contestants: Sequence[Contestant]
    rounds: int


def plan(*, quick: bool) -> list[Scenario]:
    ours = lanekeeper()
    # spans of every tenth request are sent to the provider's process, which drops them
    traced = lanekeeper(
        TRACED,
        OTEL_EXPORTER_OTLP_ENDPOINT="BASE_URL",
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.1",
    )
    variants = (
        lanekeeper(STORELESS, module="benchmarks.storeless"),
        traced,
    )
    # the same number of slots as the floor: lanes lend their idle slots, but critical never lends its last one
    lanes = lanekeeper(
        lanes=("critical", "batch"),
        LANEKEEPER_LANES__CRITICAL__SLOTS="1",
        LANEKEEPER_LANES__BATCH__SLOTS="7",
        LANEKEEPER_LANES__CRITICAL__SLOTS_MIN="1",
        LANEKEEPER_LANES__BATCH__SLOTS_MIN="0",
    )

    def scenario(
        name: str, run: Callable[..., Awaitable[Figures]], contestants: Sequence[Contestant], rounds: int, **how: int
    ) -> Scenario:
        rounds = 1 if quick else rounds
        return Scenario(name=name, run=lambda on, who: run(on, who, **how), contestants=contestants, rounds=rounds)

    asking = {"alone": 100, "callers": 400, "idle": 3} if quick else {"alone": 300, "callers": 1500, "idle": 7}
    return [
        scenario("drain", drain, (FLOOR, ours, *variants, *PEERS), 3, requests=800 if quick else 3000),
        scenario("publish", publish, (FLOOR, ours, *PEERS), 3, requests=1000 if quick else 5000),
        scenario("rpc", rpc, (FLOOR, ours, *PEERS), 3, **asking),
        *(
            scenario(
                f"flood {jobs}",
                flood,
                (floor_with_lanes(critical=1, batch=7), lanes, *(PEERS if jobs == 2000 else ())),
                2,
                jobs=jobs,
                asks=30 if quick else 100,
            )
            for jobs in (DEPTHS[:1] if quick else DEPTHS)
        ),
        scenario("memory", memory, (ours,), 2, requests=3000 if quick else 100_000),
    ]


def _closest_peer(found: Results) -> Median | None:
    """The lowest of the ratios to the peers, so that to the fastest peer."""
    ratios = [found.ratio("drain", "per_core_s", of=OURS, to=peer.name) for peer in PEERS]
    return min((each for each in ratios if each is not None), key=lambda each: each.value, default=None)


def _deepest_to_shallowest(found: Results) -> Median | None:
    shallow, deep = (found.median(f"flood {depth}", OURS, "critical_p99_ms") for depth in (DEPTHS[0], DEPTHS[-1]))
    return Median.of([deep.value / shallow.value]) if shallow and deep else None


def _floods(jobs: int) -> tuple[Aim, Aim]:
    waits, used = (f"{what} under {jobs:,} batch jobs" for what in ("critical wait p99", "slots used"))
    return (
        Aim(f"{waits}, to the floor's", 1.3, True, ratio(f"flood {jobs}", "critical_p99_ms", to="floor")),
        Aim(used, 95, False, value(f"flood {jobs}", "slots_used"), " %"),
    )


AIMS = (
    Aim("CPU a request, everything on, to the floor's", 1.6, True, ratio("drain", "cpu_ms", to="floor")),
    Aim("CPU a request, to FastStream's with claim and outcome", 1.1, True, ratio("drain", "cpu_ms", to=ONCE)),
    Aim("drain, to the floor's", 0.65, False, ratio("drain", "per_s", to="floor")),
    Aim("50 callers, to the floor's", 0.85, False, ratio("rpc", "callers_per_s", to="floor")),
    Aim("RPC p50, to the floor's", 1.6, True, ratio("rpc", "rpc_p50_ms", to="floor")),
    Aim("wake-up when idle, to the floor's", 1.25, True, ratio("rpc", "idle_p50_ms", to="floor")),
    Aim("requests/s a core, to the closest of the peers'", 1.0, False, _closest_peer),
    *_floods(2000),
    *_floods(100_000),
    Aim("critical wait p99 under 100,000 batch jobs, to that under 1,000", 1.25, True, _deepest_to_shallowest),
    Aim("drain with the store, to that without", 0.9, False, ratio("drain", "per_s", to=STORELESS)),
    Aim("our client's confirmed publishing, to aio-pika's", 0.9, False, ratio("publish", "per_s", to="floor")),
    Aim("memory, idle", 120, True, value("memory", "idle_mib"), " MiB"),
    Aim("memory, 200 in flight", 160, True, value("memory", "in_flight_mib"), " MiB"),
    Aim("growth of memory, from 10,000 to 100,000 requests", 5, True, value("memory", "growth_percent"), " %"),
    Aim("drain with traces at 10 %, to that without", 0.9, False, ratio("drain", "per_s", of=TRACED, to=OURS)),
)
COLUMNS = {
    "drain/s": ("drain", "per_s"),
    "CPU-ms a request": ("drain", "cpu_ms"),
    "requests/s a core": ("drain", "per_core_s"),
    "confirmed publishes/s": ("publish", "per_s"),
    "RPC p50 ms": ("rpc", "rpc_p50_ms"),
    "idle wake-up ms": ("rpc", "idle_p50_ms"),
    "50 callers/s": ("rpc", "callers_per_s"),
    "critical wait p50 ms": ("flood 2000", "critical_p50_ms"),
    "p99 ms": ("flood 2000", "critical_p99_ms"),
    "slots used %": ("flood 2000", "slots_used"),
}


def tables(found: Results) -> str:
    rows = ("floor", OURS, STORELESS, TRACED, *(peer.name for peer in PEERS))
    return report.page(report.head(found, COMMAND, ABOUT), report.side_by_side(found, rows, COLUMNS))


async def measure(plan: Sequence[Scenario], found: Results, *, within_s: float = math.inf) -> None:
    """Run each scenario of `plan` once, then repeat it up to its number of rounds while `within_s` lasts. Appends the
    results to `found`, with what had to be left out."""
    end_s, took_s = time.monotonic() + within_s, dict[str, float]()
    async with stage() as on:
        found.versions["RabbitMQ"] = on.version
        for number in range(max(scenario.rounds for scenario in plan)):
            for scenario in (each for each in plan if number < each.rounds):
                began_s = time.monotonic()
                if began_s + took_s.get(scenario.name, 0.0) > end_s:
                    found.left_out.append(f"round {number + 1} of {scenario.name}: no time was left")
                    continue
                for who in scenario.contestants:
                    if _can_run(who, on):
                        await found.add(scenario.name, who.name, number, scenario.run(on, who))
                took_s[scenario.name] = time.monotonic() - began_s


def _can_run(who: Contestant, on: Stage) -> bool:
    return who not in PEERS or (PEERS_PYTHON.exists() and (on.redis_url is not None or not who.uses_redis))


def _peers(found: Results) -> None:
    """Add the other frameworks' versions."""
    if not PEERS_PYTHON.exists():
        found.left_out.append("Celery, Dramatiq, FastStream and taskiq: their environment could not be set up")
        return
    code = "import sys, importlib.metadata as m; print(*(m.version(name) for name in sys.argv[1:]))"
    printed = subprocess.run([PEERS_PYTHON, "-c", code, *THEIRS], capture_output=True, text=True, check=False)
    found.versions |= dict(zip(THEIRS, printed.stdout.split(), strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--only", action="append", metavar="WORD", help="scenarios with this word in their name")
    parser.add_argument("--contestants", metavar="NAME,…", help="these alone; by default all")
    parser.add_argument("--rounds", type=int, help="how often each scenario runs, instead of the plan's number")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    parser.add_argument("--report", nargs="?", const="", metavar="FILE", help="measure nothing: show these results")
    options = parser.parse_args()
    if options.report is None:
        found = Results.none_yet(PACKAGES, quick=options.quick)
        _peers(found)
        scenarios = plan(quick=options.quick)
        if options.only:
            scenarios = [each for each in scenarios if any(word in each.name for word in options.only)]
        if options.contestants:
            names = options.contestants.split(",")
            scenarios = [
                replace(each, contestants=[who for who in each.contestants if who.name in names]) for each in scenarios
            ]
        if options.rounds:
            scenarios = [replace(each, rounds=options.rounds) for each in scenarios]
        began = time.monotonic()
        try:
            uvloop.run(measure(scenarios, found, within_s=WITHIN_S))
        except BrokerUnreachable as lost:
            found.left_out.append(f"everything after the broker was lost: {lost}")
        found.took_s = time.monotonic() - began
        print(f"written to {found.save(FOLDER)}", file=sys.stderr)
    else:
        found = results.load(Path(options.report) if options.report else max(FOLDER.glob("*.json")))
    print(report.page(tables(found), report.aims(found, AIMS), report.missing(found)))
    if options.write:
        report.between(PAGE, tables(found), command=COMMAND)


if __name__ == "__main__":
    main()
