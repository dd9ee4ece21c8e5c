"""Who spends a small budget best: Lanekeeper, no gate, a semaphore, LiteLLM's proxy; the same load, in the same run.

    ./dev bench budget [--minutes 5] [--speed 10] [--only gate,semaphore] [--plot waits.svg]

60 requests and 40,000 input tokens a minute, enforced by a simulated provider of each contestant's own; 500 batch jobs
wait, a critical request comes every two seconds. `--speed 10`: all rates and intervals scaled alike, so that ten
minutes take one. A wait is the time until the answer without the provider's own; of what has no answer in the end, how
long it has waited so far.
"""

import argparse
import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import ground  # noqa: F401  sets up logging
import uvloop
from contest import gate, rivals
from contest.load import Asking, Load, send
from contest.provider import provider
from contest.score import Row, table

Contestant = Callable[[str, Load], AbstractAsyncContextManager[Asking]]
CONTESTANTS: dict[str, tuple[str, Contestant]] = {
    "gate": ("Lanekeeper's gate alone", gate.gate_alone),
    "nogate": ("no gate, again on 429", rivals.no_gate),
    "semaphore": (f"semaphore of {rivals.AT_ONCE}, again on 429", rivals.semaphore),
}


async def main(load: Load, names: list[str]) -> None:
    print(_described(load))
    rows = await asyncio.gather(*(_row(*CONTESTANTS[name], load) for name in names))
    print(table(list(rows)))
    print(f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


async def _row(name: str, contestant: Contestant, load: Load) -> Row:
    async with provider(load) as by, contestant(by.base_url, load) as asking:
        sending = asyncio.create_task(send(asking, load))
        await asyncio.sleep(load.real_s)
        books = await by.books()
        return Row(name=name, board=await sending, books=books)


def _described(load: Load) -> str:
    scaled = "" if load.speed == 1 else f" (clock {load.speed:g} times as fast: {load.real_s:g} s)"
    return (
        f"{load.window_s:g} s{scaled}; provider: {load.requests_per_minute} requests and "
        f"{load.input_tokens_per_minute:,} input tokens a minute, buckets of {load.burst_s:g} s, an answer in "
        f"{load.latency_s:g} s. {load.jobs} batch jobs of {load.job_tokens[0]} to {load.job_tokens[1]} tokens wait; "
        f"a critical request of {load.critical_tokens} every {load.critical_every_s or 0:g} s."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--speed", type=float, default=1)
    parser.add_argument("--burst", type=float, default=10, help="seconds' worth that the provider's buckets hold")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTESTANTS))
    options = parser.parse_args()
    uvloop.run(main(Load(window_s=60 * options.minutes, speed=options.speed, burst_s=options.burst), options.only))
