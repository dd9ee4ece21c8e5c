"""The floor: the shortest possible worker. With aio-pika on uvloop it takes a request, makes the SDK call, publishes a
persistent reply, waits for the confirm, and acknowledges. It has no store, no budget gate and no retries, and sends no
reply if a request fails.

Other workers' cost of a request is given as a ratio to the floor's. This command measures both, in turns, in one run:

    ./dev bench floor [--rounds 5] [--requests 3000]
"""

import asyncio
import os
import sys

import aio_pika
import uvloop
from aio_pika.abc import AbstractIncomingMessage
from suite.sdk import Calling


async def work() -> None:
    call = Calling(os.environ["BENCH_BASE_URL"])
    connection = await aio_pika.connect_robust(os.environ["BENCH_AMQP_URL"])
    channel = await connection.channel(publisher_confirms=True)

    async def reply(request: AbstractIncomingMessage, body: bytes, *, persistent: bool = True) -> None:
        message = aio_pika.Message(
            body,
            content_type="application/json",
            correlation_id=request.correlation_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT if persistent else aio_pika.DeliveryMode.NOT_PERSISTENT,
        )
        await channel.default_exchange.publish(message, routing_key=request.reply_to or "")

    async def answer(request: AbstractIncomingMessage) -> None:
        if request.headers.get("x-lane-stream"):
            parts = []
            async for part in call.parts(request.body):
                await reply(request, part, persistent=False)
                parts.append(part)
            await reply(request, b"".join(parts))
        else:
            await reply(request, await call(request.body))
        await request.ack()

    # The number of slots of each queue. One queue for all lanes, or one for each: "bench.floor.critical=1,…batch=7"
    for queue in os.environ.get("BENCH_QUEUES", f"bench.floor={os.environ['BENCH_SLOTS']}").split(","):
        name, _, slots = queue.partition("=")
        await channel.set_qos(prefetch_count=int(slots))  # applies to consumers that are started after it
        await (await channel.get_queue(name)).consume(answer)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        uvloop.run(work())
    else:
        from bench import floor_and_ours

        floor_and_ours(__doc__)
