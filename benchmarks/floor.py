"""The floor: the shortest honest worker. aio-pika on uvloop takes a request, makes the SDK call, publishes a persistent
reply, waits for the confirm, acknowledges. No store, no gate, no retries, no errors answered.

What a request costs elsewhere is told as a ratio to it, in one run, in turns:

    ./dev bench floor [--rounds 5] [--requests 3000]
"""

import asyncio
import sys

import aio_pika
import uvloop
from aio_pika.abc import AbstractIncomingMessage
from suite.sdk import Calling


async def work(amqp_url: str, queue_name: str, slots: int, base_url: str) -> None:
    call = Calling(base_url)
    connection = await aio_pika.connect_robust(amqp_url)
    channel = await connection.channel(publisher_confirms=True)
    await channel.set_qos(prefetch_count=slots)

    async def answer(request: AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(
            await call(request.body),
            content_type="application/json",
            correlation_id=request.correlation_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await channel.default_exchange.publish(reply, routing_key=request.reply_to or "")
        await request.ack()

    queue = await channel.get_queue(queue_name)
    await queue.consume(answer)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        uvloop.run(work(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]))
    else:
        from suite.paired import main

        main(__doc__)
