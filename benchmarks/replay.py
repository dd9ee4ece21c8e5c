"""Replays recorded traffic against the budget gate, in virtual time. The recording is half an hour of chat and of code
completion.

    ./dev bench replay [--quick] [--scenario full-104,1s-104]

A quarter of the recorded chat requests is sent as critical, a quarter of the code completion requests as normal, and
batch jobs of the size of chats always wait. The provider's limits have the ratio 180 requests : 240,000 input tokens :
40,000 output tokens a minute. The number in a scenario's name says how high they are: in `full-104`, critical and
normal together ask for 104 % of them.

In the scenarios `weather-12` and `narrow-4` the load is steady and the provider has no limits per minute, but answers
529 (overloaded): to 12 % of the calls at random, or to each call beyond four at a time.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

from benchmarks.harness.report import aligned
from benchmarks.replaying import guarantees
from benchmarks.replaying.replay import run
from benchmarks.replaying.result import Result, Spread
from benchmarks.replaying.scenarios import LANES, LARGEST, QUICK, SCENARIOS
from consumers.limits.base import REASONS


def waits(results: Sequence[Result]) -> str:
    """A table of all scenarios: waits, used budget, and the longest times without a grant."""
    head = ["", *(f"{lane} p50 / p95 / p99, s" for lane in LANES), "429s", "used: rpm / itpm / otpm, %", "lost, %"]
    rows = [
        [
            each.scenario.name,
            *(_short(each.waits(lane)) for lane in LANES),
            str(each.refused),
            " / ".join(f"{100 * used:.1f}" for used in each.use),
            f"{100 * each.lost[REASONS.index(each.binding)]:.1f} {each.binding}",
            " / ".join(f"{each.longest_nothing_s(lane):.1f}" for lane in LANES),
        ]
        for each in results
    ]
    return aligned([[*head, "longest nothing: critical / normal / batch, s"], *rows])


def overloads(results: Sequence[Result]) -> str:
    """A table of the scenarios whose provider answers 529: what is answered, how long requests wait, and how many calls
    are refused."""
    head = ["", "asked, 1/s", "answered, 1/s", "calls at a time", *(f"{lane} p50 / p95 / p99, s" for lane in LANES)]
    rows = [
        [
            each.scenario.name,
            f"{len(each.asks) / each.load.ends_s:.1f}",
            f"{each.answers_per_s:.1f}",
            f"{each.busy_calls:.1f}",
            *(_short(each.waits(lane)) for lane in LANES),
            f"{100 * each.overloaded:.1f}",
        ]
        for each in results
    ]
    return aligned([[*head, "529s, %"], *rows])


def bounds(results: Sequence[Result]) -> str:
    """A table of each lane's waits, and of the comparison, request by request, with an account of the lane's own."""
    head = ["", "lane", "waits p50 / p95 / p99, s", "own account"]
    more = ["later than in its own (at most, s)", "least of its reserve in 4 min, %"]
    return aligned([[*head, *more], *(row for each in results for row in _beside(each))])


def _beside(result: Result) -> Iterator[list[str]]:
    for lane in LANES:
        reserve, beside = guarantees.reserve(result, lane), ["-", "-"]
        if lane != LANES[-1]:
            own = guarantees.beside_own(result, lane)
            beside = [f"{_short(own.waits)} ({own.own})", f"{own.late} of {own.count} ({own.latest_s:.2f})"]
        least = "-" if reserve.least is None else f"{100 * reserve.least:.0f} of {reserve.windows} windows"
        yield [result.scenario.name, lane, _short(result.waits(lane)), *beside, least]


def _short(found: Spread) -> str:
    return " / ".join(f"{value:.2f}" for value in (found.p50, found.p95, found.p99))


def main(names: Sequence[str]) -> None:
    began_s = time.monotonic()
    results = [run(SCENARIOS[name]) for name in names]
    if recorded := [each for each in results if each.scenario.steady is None]:
        print(waits(recorded), bounds(recorded), "", sep="\n\n")
    if steady := [each for each in results if each.scenario.steady is not None]:
        print(overloads(steady))
    print(f"\n{len(results)} scenarios in {time.monotonic() - began_s:.1f} s")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; known are {', '.join(SCENARIOS)}")
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=", ".join(QUICK))
    parser.add_argument("--scenario", type=_names, help=", ".join(SCENARIOS))
    given = parser.parse_args()
    every = [name for name in SCENARIOS if name != LARGEST]
    main(given.scenario or (QUICK if given.quick else every))
