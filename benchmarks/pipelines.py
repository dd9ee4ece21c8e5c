"""Measures what a step of a pipeline costs beside a request, and how busy a fan-out keeps the slots of its lane.

    ./dev bench pipelines [--requests 600] [--items 1000] [--slots 8] [--latency-ms 200]

Worker, client and simulated provider share this process; each figure is of one run. A pipeline of three steps is
compared with three requests, as many at a time; then a list is fanned out over the slots of the lane `batch`. Busy is
the time of all calls, as the provider saw them, in all slots from the first call's begin to the last one's end.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence

import psutil
import uvloop

from benchmarks.harness.worker import worker
from consumers.flows.pipelines import StepSpec
from lanekeeper import Client
from lanekeeper.contract.names import PIPELINE
from service.config.flows import PipelineSettings
from service.simulated.app import Call, SimulatedAPI, SimulatedOptions

AT_ONCE = 16
THREE = tuple(StepSpec(name=name, prompt="{{ input }}") for name in ("one", "two", "three"))
FAN_OUT = (StepSpec(name="all", each="input", prompt="{{ item }}", lane="batch"),)


async def many(
    client: Client, count: int, headers: dict[str, str], *, key: str = "critical.bench.ask", at_once: int = AT_ONCE
) -> float:
    """The seconds that this many requests take, so many at a time."""
    places, began_s = asyncio.Semaphore(at_once), time.monotonic()

    async def one(number: int) -> None:
        async with places:
            body = json.dumps(f"{number}").encode() if headers else {"prompt": f"{number}"}
            await client.request(body, key=key, headers=headers, timeout_s=600)

    await asyncio.gather(*map(one, range(count)))
    return time.monotonic() - began_s


async def measure(options: argparse.Namespace) -> None:
    lanes = {
        "batch": {"slots": options.slots, "slots_max": options.slots, "batches": {"enabled": False}},
        # the steps after the first come from the due queue, which has a quarter of the slots
        "critical": {"slots": 4 * AT_ONCE, "slots_max": 4 * AT_ONCE},
    }
    pipelines = {"three": PipelineSettings(steps=THREE), "all": PipelineSettings(steps=FAN_OUT)}
    async with (
        SimulatedAPI(SimulatedOptions(latency_ms=0)) as api,
        worker(api.base_url, namespace="bench-pipelines", lanes=lanes, pipelines=pipelines) as client,
    ):
        await many(client, AT_ONCE, {})
        requests_s = await many(client, options.requests, {})
        steps_s = await many(client, options.requests // 3, {PIPELINE: "three"})
        print(
            f"a request {1000 * requests_s / options.requests:.2f} ms, a step "
            f"{1000 * steps_s / options.requests:.2f} ms, {AT_ONCE} at a time"
        )
        api.configure(SimulatedOptions(latency_ms=options.latency_ms))
        process = psutil.Process()
        resident = most = process.memory_info().rss
        body = json.dumps([f"item {number}" for number in range(options.items)]).encode()
        asking = asyncio.create_task(
            client.request(body, key="batch.bench.all", headers={PIPELINE: "all"}, timeout_s=3600)
        )
        while not asking.done():
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.1)
        joined_s = time.monotonic()
        await asking
        text, last_s = busy(list(api.calls)[-options.items :], options.slots)
        print(
            f"a fan-out of {options.items} items: {text}, joined {joined_s - last_s:.1f} s later; "
            f"resident memory {resident / 2**20:.0f} MiB before, at most {most / 2**20:.0f} MiB"
        )
        await many(client, options.items, {}, key="batch.bench.ask", at_once=options.items)
        print(f"{options.items} requests instead: {busy(list(api.calls)[-options.items :], options.slots)[0]}")


def busy(calls: Sequence[Call], slots: int) -> tuple[str, float]:
    """How much of the slots' time the calls took, as text, and when the last one ended."""
    first_s, last_s = min(call.started_s for call in calls), max(call.ended_s or 0.0 for call in calls)
    in_calls_s = sum((call.ended_s or 0.0) - call.started_s for call in calls)
    return f"{last_s - first_s:.1f} s, {slots} slots busy {in_calls_s / slots / (last_s - first_s):.1%}", last_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--latency-ms", type=int, default=200)
    uvloop.run(measure(parser.parse_args()))
