"""Compares how a small budget is spent by Lanekeeper, without a gate, by a semaphore and by LiteLLM's proxy.

    ./dev bench budget [--minutes 5] [--speed 10] [--only gate,semaphore] [--scenarios all]

All contestants get the same load in the same run. Each has its own simulated provider, which enforces 60 requests and
40,000 input tokens a minute. 500 batch jobs wait, and a critical request comes every two seconds. A wait is the time
until the answer, without the provider's own time; for a request without an answer, the time that it has waited at the
end. "Used" is a percentage of what could be used: what the provider's buckets held at the beginning, plus the refill.
`--speed 10` scales all rates and intervals, so that ten minutes take one; delays by CPU and network then weigh ten
times as much.
"""

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ground
import uvloop
from contest import gate, litellm, plot, rivals, workers
from contest.load import Load
from contest.running import Contestant, run
from contest.scenarios import SCENARIOS
from contest.score import Row, table

RIVALS: dict[str, tuple[str, Contestant]] = {
    "nogate": ("No gate, retries on 429", rivals.no_gate),
    "semaphore": (f"Semaphore of {rivals.AT_ONCE}, retries on 429", rivals.semaphore),
}
NAMES = ("lanekeeper", "gate", *RIVALS, "litellm")


async def main(load: Load, *, only: list[str], scenarios: list[str], program: Path, picture: Path) -> None:
    async with ground.broker() as broker_url:
        ours: Contestant = partial(workers.lanekeeper, broker_url=broker_url)
        if only:
            print(_described(load))
            rows = await _contest(load, only=only, ours=ours, program=program)
            print(table(rows))
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_text(plot.svg(rows, load))
            print(f"Waits over time: {picture}")
        for name in scenarios:
            await _scenario(name, load, broker_url=broker_url)
    print(f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


async def _contest(load: Load, *, only: list[str], ours: Contestant, program: Path) -> list[Row]:
    """Run the chosen contestants at the same time."""
    known: dict[str, tuple[str, Contestant]] = {
        "lanekeeper": ("Lanekeeper", ours),
        "gate": ("Lanekeeper's gate alone", gate.gate_alone),
        **RIVALS,
    }
    rows = [run(*known[name], load) for name in known if name in only]
    if "litellm" in only:
        rows += [_litellm(load, program), _litellm(load, program, further=litellm.STRICT)]
    return list(await asyncio.gather(*rows))


async def _litellm(load: Load, program: Path, *, further: str = "") -> Row:
    kind = "priorities, strict" if further else "priorities"
    if (reason := litellm.why_not(load, program)) is not None:
        return Row(name=f"LiteLLM's proxy, {kind}", why_not=reason)
    name = f"LiteLLM {await litellm.version(program)}, {kind}"
    try:
        return await run(name, partial(litellm.proxy, program=program, further=further), load)
    except TimeoutError:
        return Row(name=name, why_not=f"did not start within {litellm.START_WITHIN_S} s")


async def _scenario(name: str, load: Load, *, broker_url: str) -> None:
    scenario, events = SCENARIOS[name], Counter[str]()
    load = scenario.load(load)
    async with ground.redis() as redis_url:
        if scenario.workers > 1 and redis_url is None:
            print(f"\n{name}: not run: no redis-server is installed")
            return
        store = redis_url if scenario.workers > 1 else None
        contestant = partial(
            workers.lanekeeper, broker_url=broker_url, workers=scenario.workers, redis_url=store, events=events
        )
        row = await run("Lanekeeper", contestant, load, options=scenario.options, trouble=scenario.trouble)
    print(f"\n{name}: {scenario.fault_in(row) or 'as it must be'}; {_described(load)}\n{table([row])}")
    print(
        "Logged by the workers: "
        + (", ".join(f"{each} {count}" for each, count in sorted(events.items())) or "nothing")
    )


def _described(load: Load) -> str:
    scaled = "" if load.speed == 1 else f" (clock {load.speed:g} times as fast: {load.real_s:g} s)"
    critical = f"a critical request every {load.critical_every_s:g} s" if load.critical_every_s else "none is critical"
    return (
        f"{load.window_s:g} s{scaled}; provider: {load.requests_per_minute} requests and "
        f"{load.input_tokens_per_minute:,} input tokens a minute, buckets of {load.burst_s:g} s, an answer in "
        f"{load.latency_s:g} s; {load.jobs} batch jobs wait, {critical}; {load.tokens[0]} to {load.tokens[1]} input "
        "tokens each."
    )


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in (*known, "all", "none")]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; known are {', '.join(known)}, all, none")
        return list(known) if "all" in found else [name for name in found if name != "none"]

    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--speed", type=float, default=1)
    parser.add_argument("--burst", type=float, default=10, help="seconds' worth that the provider's buckets hold")
    parser.add_argument("--latency", type=float, default=1, help="seconds that the provider takes for an answer")
    parser.add_argument("--only", type=_names(NAMES), default=list(NAMES), help=", ".join(NAMES))
    parser.add_argument(
        "--scenarios", type=_names(tuple(SCENARIOS)), default=[], help=", ".join(SCENARIOS).replace("%", "%%")
    )
    parser.add_argument("--litellm", type=Path, default=litellm.PROGRAM, help="its program")
    parser.add_argument("--plot", type=Path, default=Path(".cache/budget.svg"))
    options = parser.parse_args()
    uvloop.run(
        main(
            Load(
                window_s=60 * options.minutes,
                speed=options.speed,
                burst_s=options.burst,
                latency_s=options.latency,
            ),
            only=options.only,
            scenarios=options.scenarios,
            program=options.litellm,
            picture=options.plot,
        )
    )
