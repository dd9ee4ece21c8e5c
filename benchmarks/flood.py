"""How long a critical request waits while a flood of batch jobs stands in the queue and fills every batch slot.

    .venv/bin/python benchmarks/flood.py [--jobs 10000] [--requests 400] [--every-ms 50]

10,000 batch jobs wait, the provider takes 300 ms; a critical request every 50 ms. Its wait is what the reply says
(`x-lane-wait-ms`: from publishing to the start of the attempt). Aim: p50 under 10 ms, p99 under 50 ms.
"""

import argparse
import asyncio
import uuid

import ground
import uvloop

from consumers.capacity.activity import quantile
from lanekeeper import Client
from lanekeeper.amqp.depth import depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry.tracing import Tracing
from service.worker import running as worker
from service.worker.assembly import assemble

LATENCY_MS = 300
PUBLISHING_AT_ONCE = 200


async def main(jobs: int, requests: int, every_ms: int) -> None:
    async with ground.broker() as url, ground.provider("--latency", f"{LATENCY_MS}ms") as base_url:
        settings = ground.settings(url, base_url)
        async with assemble(settings, declares=True) as parts, Client(url, names=parts.names) as client:
            await _fill(Publisher(parts.publishing, tracing=Tracing()), parts.names.requests, jobs)
            stop = asyncio.Event()
            working = asyncio.create_task(worker.run(parts, stop=stop, grace_s=1))
            batch = next(activity for activity in parts.activities if activity.lane == "batch")
            while batch.running < settings.lanes.batch.slots:
                await asyncio.sleep(0.05)
            waits = await _ask(client, requests, every_ms / 1000)
            left = (await depths(parts.publishing, [parts.names.intake("batch")]))[parts.names.intake("batch")]
            print(
                f"RabbitMQ {parts.version}: {jobs} batch jobs published, {left.ready} still waiting at the end, "
                f"{batch.running} of {settings.lanes.batch.slots} batch slots busy; provider {LATENCY_MS} ms"
            )
            print(
                f"  {requests} critical requests, one every {every_ms} ms: wait p50 {quantile(waits, 0.5)} ms, "
                f"p95 {quantile(waits, 0.95)} ms, p99 {quantile(waits, 0.99)} ms, max {waits[-1]} ms"
            )
            stop.set()
            await working
            await _empty(parts.publishing, parts.names.intake("batch"))


async def _fill(publisher: Publisher, exchange: str, jobs: int) -> None:
    left = iter(range(jobs))

    async def publish() -> None:
        for number in left:
            message = Message(
                body=b'{"prompt": "job %d"}' % number, message_id=uuid.uuid4().hex, content_type="application/json"
            )
            await publisher.publish(message, exchange=exchange, routing_key="batch.benchmark.flood", mandatory=False)

    await asyncio.gather(*(publish() for _ in range(PUBLISHING_AT_ONCE)))


async def _ask(client: Client, requests: int, every_s: float) -> list[int]:
    waits: list[int] = []

    async def ask(number: int) -> None:
        final = await client.request({"prompt": f"chat {number}"}, key="critical.benchmark.flood")
        waits.append(final.wait_ms)

    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(ask(number))
            await asyncio.sleep(every_s)
    return sorted(waits)


async def _empty(connection: object, queue: str) -> None:
    """Leave nothing of the flood where the broker is not our own."""
    channel = await connection.raw_channel(confirms=False)  # type: ignore[attr-defined]
    await channel.queue_purge(queue)
    await channel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--every-ms", type=int, default=50)
    options = parser.parse_args()
    uvloop.run(main(options.jobs, options.requests, options.every_ms))
