"""The long run: a load, one fault after the other, and a verdict as a table for docs/reliability.md. `./dev faults`, or

    python -m tests.faults.run --minutes 18 --seeds 1,2,3 --on both --rate 25

Each seed has its own schedule, on each kind of broker. At the end the first schedule is run with a deliberately broken
worker, whose errors must be found. Exits 1 if anything was lost, answered twice with different answers, or answered
without having been asked, if a worker crashed, or if the broken worker passed."""

import argparse
import asyncio
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness.report import between
from tests.faults.checker import Recovery, Verdict
from tests.faults.faults import FAULTS, Planned, inject, judged, judged_with_slots, plan
from tests.faults.ground import SETTLED_S, Ending, Ground, ground
from tests.support.engine import Unavailable

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
    on: str
    seed: int
    minutes: float
    verdict: Verdict
    crashes: tuple[Ending, ...]
    provider_calls: int

    @property
    def failures(self) -> list[str]:
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


ENOUGH_CONFIRMED = 15_000
ENOUGH_FAULTS = 20
BROKEN_MINUTES = 2.0
RECOVERED_WITHIN_S = 15.0
"""Time to recover before the next fault begins, which would change the figures of this one."""
TOLD = 20
"""How many violations of a run are printed; its history has all."""
LOSES_WITHIN_S = 15.0
"""Time to wait for the broken worker's requests; they are lost, so a short time is enough."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def carry_out(found: Ground, planned: Sequence[Planned], *, seconds: float, recovered_within_s: float) -> None:
    """Send requests, and cause one fault after the other, each after recovery from the one before, until the time is
    over."""
    end_s = time.monotonic() + seconds
    async with found.load.asking():
        await asyncio.sleep(SETTLED_S)
        for each in planned:
            await asyncio.sleep(each.calm_s)
            if time.monotonic() > end_s:
                return
            if each.fault.needs is not None and each.fault.needs not in found.store.is_a:
                continue
            done = await inject(found, each.fault, lasts_s=each.lasts_s, rng=random.Random(each.seed))
            await found.load.answered(within_s=recovered_within_s)
            say(
                f"  {done.at_s - found.began_s:6.1f} s  {done.code:4} {done.title} ({done.against}), "
                f"{done.healed_s - done.at_s:.1f} s, {done.in_flight} in flight"
            )


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all runs have in common."""

    rate: float
    store: str
    codes: frozenset[str] | None
    """The faults to cause; None: all."""
    folder: Path


async def one(
    on: str, conditions: Conditions, *, seed: int, seconds: float, part: tuple[int, int], broken: bool = False
) -> Run:
    folder = conditions.folder / ("broken" if broken else f"{on}-{seed}")
    await asyncio.to_thread(folder.mkdir, parents=True)
    codes = conditions.codes
    faults = [each for each in FAULTS if on in each.on and (codes is None or each.code in codes)]
    planned = plan(faults, seed=seed, seconds=seconds, part=part)
    module = "tests.faults.broken" if broken else "service.cli.main"
    say(f"{on}, seed {seed}, {seconds / 60:.1f} minutes{', the broken worker' if broken else ''}: {folder}")
    async with ground(
        on, folder=folder, seed=seed, rate=conditions.rate, store_is=conditions.store, module=module
    ) as found:
        began_s = time.monotonic()
        await carry_out(found, planned, seconds=seconds, recovered_within_s=1.0 if broken else RECOVERED_WITHIN_S)
        minutes = (time.monotonic() - began_s) / 60
        verdict = await (judged(found, answered_within_s=LOSES_WITHIN_S) if broken else judged_with_slots(found))
        found.write(folder / "history.jsonl")
        made = Run(on, seed, minutes, verdict, tuple(found.crew.crashes), len(found.calls()))
    say(f"  {verdict.confirmed} confirmed, {verdict.lost} lost, {len(made.failures)} violations")
    for failure in made.failures[:TOLD]:
        say(f"  {failure}")
    return made


async def everything(given: argparse.Namespace) -> int:
    """All seeds on all kinds of broker, then the broken worker; returns the exit code."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, task.cancel
    )  # so that containers and mounts are removed
    seeds = [int(each) for each in given.seeds.split(",")]
    kinds = ("single", "cluster") if given.on == "both" else (given.on,)
    seconds = 60 * given.minutes / (len(seeds) * len(kinds))
    conditions = Conditions(
        rate=given.rate,
        store=given.store,
        codes=None if given.faults is None else frozenset(given.faults.split(",")),
        folder=Path(given.folder or tempfile.mkdtemp(prefix="lanekeeper-faults-")),
    )
    runs = [
        await one(on, conditions, seed=seed, seconds=seconds, part=(n, len(seeds)))
        for on in kinds
        for n, seed in enumerate(seeds)
    ]
    broken = None
    if not given.without_broken:
        shorter = min(seconds, 60 * BROKEN_MINUTES)
        broken = await one("single", conditions, seed=seeds[0], seconds=shorter, part=(0, len(seeds)), broken=True)
    found = text(runs, broken=broken)
    print(found)
    if given.write is not None:
        between(given.write, found, command="./dev faults")
    problems = [
        f"{run.on}, seed {run.seed}: {len(run.failures)} violations, {run.failures[0]}" for run in runs if run.failures
    ]
    if broken is not None and broken.verdict.lost == 0:
        problems.append("the broken worker passed: nothing that this run says can be believed")
    if given.minutes >= 15:
        confirmed = sum(run.verdict.confirmed for run in runs)
        hit = sum(each.fault.in_flight > 0 for run in runs for each in run.verdict.recoveries)
        if confirmed < ENOUGH_CONFIRMED or hit < ENOUGH_FAULTS:
            problems.append(f"too little: {confirmed} confirmed, {hit} faults that hit work in flight")
    for problem in problems:
        say(problem)
    say(f"histories and logs: {conditions.folder}")
    return 1 if problems else 0


def main() -> int:
    read = argparse.ArgumentParser(prog="./dev faults", description="Break everything under load, and count.")
    read.add_argument("--minutes", type=float, default=24.0, help="of load, all seeds and brokers together")
    read.add_argument("--seeds", default="1,2,3")
    read.add_argument("--on", choices=("single", "cluster", "both"), default="both")
    read.add_argument("--store", choices=("sqlite", "redis"), default="sqlite")
    read.add_argument("--rate", type=float, default=20.0, help="requests a second")
    read.add_argument("--faults", metavar="CODES", help="of the catalogue, these alone: A1,B2; default: all")
    read.add_argument("--write", type=Path, metavar="FILE", help="put the table between its markers in this document")
    read.add_argument("--folder", help="for histories and logs; default: a temporary one")
    read.add_argument("--without-broken", action="store_true", help="leave out the worker that must be caught")
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it would log every connection that we break
    try:
        return asyncio.run(everything(read.parse_args()))
    except Unavailable as error:
        say(f"./dev faults: {error}")
        return 2
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
