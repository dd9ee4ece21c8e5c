"""Measures what a request costs that is answered in a provider's batch: CPU time and memory of one worker.

    ./dev bench batches [--requests 50000] [--batch 1000] [--batch-time 10s]
    ./dev bench batches --items 5000            beside it: the items of a Message Batch of the gateway, in turns

`lanekeeper serve` takes all requests of the lane `batch`, gathers them into batches of so many, waits for the simulated
provider, which has a process of its own, and replies to each request. The CPU time is that of the whole process,
without its start. The memory is sampled; flat means that it does not grow with the number of requests.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.harness.processes import broker, clean_environ, cpu_s, process, resident_mib, simulated
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from tests.support.private_broker import free_ports
from topology.broker.consume import Inbox

NAMESPACE = "bench-batches"
REQUEST = {
    "model": "claude-haiku-5-5",
    "max_tokens": 256,
    "messages": [
        {
            "role": "user",
            "content": "Summarise this review in one sentence: " + "it works as it should, mostly. " * 30,
        }
    ],
}
BODY = json.dumps(REQUEST).encode()
WARM = 1000
ROUNDS = 3
AT_ONCE = 500


def environment(
    options: argparse.Namespace, *, amqp_url: str, base_url: str, folder: Path, port: int
) -> dict[str, str]:
    lane = "LANEKEEPER_LANES__BATCH__"
    return clean_environ(
        LANEKEEPER_AMQP_URL=amqp_url,
        LANEKEEPER_NAMESPACE=NAMESPACE,
        LANEKEEPER_STORE_URL=f"sqlite:///{folder}/store.sqlite",
        LANEKEEPER_LOG_LEVEL="warning",
        LANEKEEPER_GATEWAY__PORT=str(port),
        ANTHROPIC_API_KEY="benchmark",
        ANTHROPIC_BASE_URL=base_url,
        **{
            f"{lane}SLOTS": "64",
            f"{lane}SLOTS_MAX": "64",
            f"{lane}SIDE_QUEUES": "0",  # one tenant has no other to be fair to
            f"{lane}BATCHES__COUNT": str(options.batch),
            f"{lane}BATCHES__WINDOW_S": "10",
            f"{lane}BATCHES__FIRST_POLL_S": "2",
        },
    )


async def measure(options: argparse.Namespace) -> None:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with broker() as amqp_url, simulated(folder, "--batch-time", options.batch_time) as (base_url, _):
            environ = environment(options, amqp_url=amqp_url, base_url=base_url, folder=folder, port=port)
            command = (sys.executable, "-m", "service.cli.main", "serve")
            async with (
                process(command, environ=environ, log=folder / "worker", port=port) as worker,
                Connection(amqp_url, name="bench") as connection,
                Inbox(connection) as inbox,
            ):
                publisher = Publisher(connection, tracing=None)
                if options.items:
                    await compare(options.items, worker, publisher, inbox, url=f"http://127.0.0.1:{port}")
                else:
                    await run(options, worker, publisher, inbox)
            with urllib.request.urlopen(f"{base_url}/simulated/stats") as answer:  # noqa: ASYNC210  all is over
                stats = json.load(answer)
            created, saved = stats["batches"]["created"], stats["usd"]["saved"]
            print(f"batches {created}, live calls {stats['calls']}, saved ${saved:.4f}")


async def run(options: argparse.Namespace, worker: int, publisher: Publisher, inbox: Inbox) -> None:
    began_s, began_cpu_s, memory, outcomes = time.monotonic(), cpu_s(worker), list[float](), dict[str, int]()
    idle_mib = resident_mib(worker)
    places = asyncio.Semaphore(AT_ONCE)

    async def publish(number: int) -> None:
        message = Message(body=BODY, message_id=f"request-{number}", reply_to=inbox.name)
        try:
            await publisher.publish_surely(message, exchange=f"{NAMESPACE}.requests", routing_key="batch.bench.sum")
        finally:
            places.release()

    async def fill() -> None:
        async with asyncio.TaskGroup() as publishing:
            for number in range(options.requests):
                await places.acquire()
                publishing.create_task(publish(number))

    async def sample() -> None:
        while True:
            memory.append(resident_mib(worker))
            await asyncio.sleep(0.5)

    sampling, filling = asyncio.create_task(sample()), asyncio.create_task(fill())
    left = options.requests
    async for reply in inbox:
        status = str(reply.headers.get("x-lane-status"))
        outcomes[status] = outcomes.get(status, 0) + 1
        left -= 1
        if not left:
            break
    sampling.cancel()
    await filling
    took_s, used_s = time.monotonic() - began_s, cpu_s(worker) - began_cpu_s
    quarter = len(memory) // 4
    print(
        f"{options.requests} requests in batches of {options.batch}: {outcomes}, {took_s:.1f} s, "
        f"{1000 * used_s / options.requests:.2f} ms CPU a request"
    )
    most = [f"{max(memory[nth * quarter : (nth + 1) * quarter] or [0]):.0f}" for nth in range(4)]
    print(f"memory of the worker: {idle_mib:.0f} MiB idle, in the quarters of the time at most {', '.join(most)} MiB")


async def compare(count: int, worker: int, publisher: Publisher, inbox: Inbox, *, url: str) -> None:
    """Requests with replies, and items of a Message Batch with their results, in turns. The CPU time is the whole
    process's; that of the requests' publisher is told apart, because for items the gateway does its work."""

    async def requests(name: str, count: int) -> None:
        async with asyncio.TaskGroup() as publishing:
            places = asyncio.Semaphore(AT_ONCE)

            async def publish(number: int) -> None:
                async with places:
                    message = Message(body=BODY, message_id=f"{name}-{number}", reply_to=inbox.name)
                    await publisher.publish_surely(
                        message, exchange=f"{NAMESPACE}.requests", routing_key="batch.bench.sum"
                    )

            for number in range(count):
                publishing.create_task(publish(number))
        left = count
        async for reply in inbox:
            assert reply.headers.get("x-lane-status") == "ok"
            left -= 1
            if not left:
                return

    async def items(name: str, count: int) -> None:
        asked = {"requests": [{"custom_id": f"{name}-{number}", "params": REQUEST} for number in range(count)]}
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "x-api-key": "benchmark"}
        async with aiohttp.ClientSession(url, headers=headers, raise_for_status=True) as session:
            async with session.post("/v1/messages/batches", data=json.dumps(asked).encode()) as answer:
                batch = await answer.json()
            while batch["processing_status"] != "ended":
                await asyncio.sleep(0.5)
                async with session.get(f"/v1/messages/batches/{batch['id']}") as answer:
                    batch = await answer.json()
            async with session.get(f"/v1/messages/batches/{batch['id']}/results") as answer:
                results = [json.loads(line) async for line in answer.content]
        assert [each["result"]["type"] for each in results] == ["succeeded"] * count

    async def used_ms(do: Callable[[str, int], Awaitable[None]], name: str) -> tuple[float, float]:
        began_s, own_s = cpu_s(worker), time.process_time()
        await do(name, count)
        return 1000 * (cpu_s(worker) - began_s) / count, 1000 * (time.process_time() - own_s) / count

    await requests("warm", WARM)
    await items("warm", WARM)
    for turn in range(ROUNDS):
        of_request, published = await used_ms(requests, f"request-{turn}")
        of_item, _ = await used_ms(items, f"item-{turn}")
        print(
            f"CPU: a request {of_request:.2f} ms, and {published:.2f} ms in its client; an item {of_item:.2f} ms, "
            f"{of_item / of_request:.2f} ×, with the client's {of_item / (of_request + published):.2f} ×"
        )


def main() -> None:
    options = argparse.ArgumentParser(
        prog="./dev bench batches", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    options.add_argument("--requests", type=int, default=50_000)
    options.add_argument("--items", type=int, default=0)
    options.add_argument("--batch", type=int, default=1000)
    options.add_argument("--batch-time", default="10s")
    uvloop.run(measure(options.parse_args()))


if __name__ == "__main__":
    main()
