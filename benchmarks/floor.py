"""The floor: the shortest possible worker. With aio-pika on uvloop it takes a request, makes the SDK call, publishes a
persistent reply, waits for the confirm, and acknowledges. It has no store, no budget gate and no retries, and sends no
reply if a request fails.

Other workers' cost of a request is given as a ratio to the floor's. This command measures both, in turns, in one run:

    ./dev bench floor [--rounds 5] [--requests 3000] [--quick] [--against CHECKOUT]
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import aio_pika
import uvloop
from aio_pika.abc import AbstractIncomingMessage

from benchmarks.harness.sdk import Calling


async def work() -> None:
    call = Calling(os.environ["BENCH_BASE_URL"])
    connection = await aio_pika.connect_robust(os.environ["BENCH_AMQP_URL"])
    channel = await connection.channel(publisher_confirms=True)

    async def answer(request: AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(
            await call(request.body),
            content_type="application/json",
            correlation_id=request.correlation_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await channel.default_exchange.publish(reply, routing_key=request.reply_to or "")
        await request.ack()

    # The number of slots of each queue. One queue for all lanes, or one for each: "bench.floor.critical=1,…batch=7"
    for queue in os.environ.get("BENCH_QUEUES", f"bench.floor={os.environ['BENCH_SLOTS']}").split(","):
        name, _, slots = queue.partition("=")
        await channel.set_qos(prefetch_count=int(slots))  # applies to consumers that are started after it
        await (await channel.get_queue(name)).consume(answer)
    await asyncio.Event().wait()


def main() -> None:
    """Drain for the floor, Lanekeeper and the checkouts of `--against` in turns; prints their ratios to the floor."""
    from benchmarks.bench import PACKAGES, Scenario, measure  # the worker needs none of these
    from benchmarks.harness.contestants import FLOOR, lanekeeper
    from benchmarks.harness.report import text
    from benchmarks.harness.results import Results
    from benchmarks.scenarios import drain

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 800 requests")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument(
        "--against", type=Path, action="append", default=[], help="another checkout, set up; repeatable"
    )
    options = parser.parse_args()
    rounds, requests = (
        options.rounds or (1 if options.quick else 5),
        options.requests or (800 if options.quick else 3000),
    )
    contestants = (FLOOR, *(lanekeeper(path.name, code=path.resolve()) for path in options.against), lanekeeper())
    found = Results.none_yet(PACKAGES, quick=options.quick)
    scenario = Scenario(
        name="drain",
        run=lambda on, who: drain(on, who, requests=requests),
        contestants=contestants,
        rounds=rounds,
    )
    uvloop.run(measure([scenario], found))
    for who in contestants[1:]:
        cpu, rate = (found.ratio("drain", figure, of=who.name, to=FLOOR.name) for figure in ("cpu_ms", "per_s"))
        if cpu and rate:
            print(f"{who.name} to the floor: CPU a request {text(cpu, ' ×')}, drain {text(rate, ' ×')}")
    if list(found.errors()):
        sys.exit("some runs lost or repeated a message: they have no figure")


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        uvloop.run(work())
    else:
        main()
