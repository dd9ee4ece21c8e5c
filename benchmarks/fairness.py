"""Measures what each tenant of a lane gets while one of them has 10,000 requests waiting, and how long others wait.

    ./dev bench fairness [--tenants 3] [--processes 1] [--waiting 10000] [--slots 16] [--settle-s 30] [--quick]

The lane is `normal`; a call takes half a second. The first tenant's requests are published before all others. Then each
further tenant always has as many requests under way or waiting as the lane has slots, and one more tenant sends a
single request every quarter of a second. For ten seconds, the provider's calls are counted by tenant. The aim for each
tenant is at least half of an equal share, 1/(2n).
"""

import argparse
import asyncio
import sys
import time

import uvloop

from benchmarks.bench import Scenario, measure
from benchmarks.harness.contestants import Contestant, lanekeeper
from benchmarks.harness.load import Spec, send
from benchmarks.harness.requesters import Noted, Plain
from benchmarks.harness.results import Results, quantile
from benchmarks.harness.stage import Stage
from benchmarks.scenarios import FILLING, Figures

CALL_MS = 500
COUNTED_S = 10.0
ASKS_EVERY_S = 0.25
EACH = 10_000
"""More requests than a tenant but the first can send."""


async def fairness(
    stage: Stage, who: Contestant, *, tenants: int, processes: int, waiting: int, slots: int, settle_s: float
) -> Figures:
    log, loads = stage.call_log, [range(waiting)]
    loads += [range(first, first + EACH) for first in range(waiting, waiting + tenants * EACH, EACH)]
    await stage.reset(who)
    async with (
        stage.workers(who, slots=slots, processes=processes),
        Plain(stage.environment(who)) as plain,
        asyncio.TaskGroup() as group,
    ):
        noted = Noted(plain)
        await send(plain, Spec(do="publish", last=waiting, at_once=FILLING, call_ms=CALL_MS, tenant=1))
        specs = [
            Spec(do="ask", first=load[0], last=load[-1], call_ms=CALL_MS, tenant=tenant, at_once=slots * processes)
            for tenant, load in enumerate(loads[1:-1], start=2)
        ]
        single = loads.pop()
        one = Spec(
            do="ask", first=single[0], last=single[-1], call_ms=CALL_MS, tenant=tenants + 1, every_s=ASKS_EVERY_S
        )
        tasks = [group.create_task(send(noted, spec)) for spec in (*specs, one)]
        flooded_s = time.monotonic()  # until the scouts have read through the flood
        while time.monotonic() < flooded_s + settle_s and (await stage.intake(who)).ready > slots:
            await asyncio.sleep(0.1)
        since_s = time.monotonic()
        await asyncio.sleep(COUNTED_S)
        calls = [sum(since_s <= log.began[number] for number in load) for load in loads]
        waits = [
            1000 * (log.began[number] - asked_s)
            for number, asked_s in noted.asked.items()
            if number in single and asked_s >= since_s and log.began[number]
        ]
        for each in tasks:
            each.cancel()
    shares = {f"share_{tenant}": count / sum(calls) for tenant, count in enumerate(calls, start=1)}
    return {
        "calls_per_s": sum(calls) / COUNTED_S,
        "least_share": min(shares.values()),
        "aim": 1 / (2 * tenants),
        "settled_s": since_s - flooded_s,
        "single_p50_ms": quantile(waits, 0.5),
        "single_p95_ms": quantile(waits, 0.95),
        **shares,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--settle-s", type=float, default=30)
    parser.add_argument("--quick", action="store_true", help="2,000 requests wait")
    options = parser.parse_args()
    how = {name: given for name, given in vars(options).items() if name != "quick"}
    if options.quick:
        how["waiting"] = 2000
    found = Results.none_yet(())
    scenario = Scenario(
        name="fairness", run=lambda on, who: fairness(on, who, **how), contestants=[lanekeeper()], rounds=1
    )
    uvloop.run(measure([scenario], found))
    sys.exit(bool(list(found.errors())))
