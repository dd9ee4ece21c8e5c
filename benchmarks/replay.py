"""Replays recorded traffic against the budget gate, in virtual time. The recording is half an hour of chat and of code
completion.

    ./dev bench replay [--quick] [--scenario full-104,1s-104] [--json FILE] [--plot FILE.svg [--before FILE]]
    ./dev bench replay --real [--minutes 4] [--processes 1]

A quarter of the recorded chat requests is sent as critical, a quarter of the code completion requests as normal, and
batch jobs of the size of chats always wait. The provider's limits have the ratio 180 requests : 240,000 input tokens :
40,000 output tokens a minute. The number in a scenario's name says how high they are: in `full-104`, critical and
normal together ask for 104 % of them.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.replaying import plot, table, traces
from benchmarks.replaying.replay import run
from benchmarks.replaying.scenarios import LARGEST, QUICK, SCENARIOS


def main(options: argparse.Namespace) -> None:
    """Run scenarios in virtual time, or one in real time (`--real`)."""
    if options.real:
        from benchmarks.replaying import real  # the contest's provider and workers, which take a while to import

        scenario = SCENARIOS[options.scenario[0] if options.scenario else "full-104"]
        measured = uvloop.run(real.run(scenario, seconds=60 * options.minutes, processes=options.processes))
        print(real.table(measured))
        _keep(options, [measured.as_json()])
        return
    began_s = time.monotonic()
    names = options.scenario or (QUICK if options.quick else [name for name in SCENARIOS if name != LARGEST])
    scenarios = [SCENARIOS[name] for name in names]
    if options.traces is not None:
        recorded = traces.read(options.traces, options.quarter)
        scenarios = [replace(each, traces=recorded) for each in scenarios]
    results = [run(each) for each in scenarios]
    print(table.waits(results), table.bounds(results), table.predictions(results), sep="\n\n")
    _keep(options, [each.as_json() for each in results])
    print(f"\n{len(results)} scenarios in {time.monotonic() - began_s:.1f} s")


def _keep(options: argparse.Namespace, figures: list[dict[str, Any]]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(figures))
    if options.plot is not None:
        options.plot.write_text(plot.svg(figures[0], _earlier(options.before, figures[0]["scenario"])))


def _earlier(file: Path | None, scenario: str) -> dict[str, Any] | None:
    """The figures of an earlier run of the same scenario."""
    if file is None:
        return None
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return next((each for each in found if each["scenario"] == scenario), None)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; known are {', '.join(SCENARIOS)}")
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=", ".join(QUICK))
    parser.add_argument("--scenario", type=_names, help=", ".join(SCENARIOS))
    parser.add_argument("--real", action="store_true", help="in real time: broker, worker, simulated API")
    parser.add_argument("--minutes", type=float, default=4, help="of --real; more than one")
    parser.add_argument("--processes", type=int, default=1, help="workers of --real; several need a redis-server")
    parser.add_argument("--json", type=Path, help="the raw figures go there")
    parser.add_argument("--plot", type=Path, help="the waits of critical in the first scenario, as SVG")
    parser.add_argument("--before", type=Path, help="the --json of an earlier run, to be drawn beside it")
    parser.add_argument("--traces", type=Path, help="the whole recordings, instead of the quarter in benchmarks/traces")
    parser.add_argument("--quarter", type=int, choices=range(4), default=0, help="which of the whole recordings")
    main(parser.parse_args())
