"""FastStream with what its users add so that a request survives a crash and is called once: a claim and the outcome in
Redis, and a persistent, confirmed reply. A request that was answered before gets the stored answer."""

import os
from uuid import uuid4

from faststream import AckPolicy, FastStream
from faststream.rabbit import RabbitMessage, RabbitQueue

from benchmarks.peers import with_faststream
from benchmarks.peers.with_faststream import broker_with

QUEUE = "bench.faststream_once"
queue = RabbitQueue(QUEUE, durable=True, arguments={"x-max-priority": 9})
CLAIMED_FOR_S = 60
KEPT_FOR_S = 86_400


async def undecoded(message: RabbitMessage) -> RabbitMessage:
    """The whole message: a claim needs its id."""
    return message


async def work() -> None:
    from redis.asyncio import Redis

    from benchmarks.harness.sdk import Calling

    broker = broker_with(int(os.environ["BENCH_SLOTS"]))
    call = Calling(os.environ["BENCH_BASE_URL"])
    redis = Redis.from_url(os.environ["BENCH_REDIS_URL"])
    me = uuid4().hex

    @broker.subscriber(queue, ack_policy=AckPolicy.NACK_ON_ERROR, decoder=undecoded, no_reply=True)
    async def handle(message: RabbitMessage) -> None:
        claim, outcome = f"claim:{message.correlation_id}", f"outcome:{message.correlation_id}"
        if not await redis.set(claim, me, nx=True, ex=CLAIMED_FOR_S) and await redis.get(claim) != me.encode():
            raise RuntimeError("another worker has claimed it")
        answer = await redis.get(outcome)
        if answer is None:
            answer = await call(message.body)
            await redis.set(outcome, answer, ex=KEPT_FOR_S)
        await broker.publish(answer, queue=message.reply_to, persist=True, correlation_id=message.correlation_id)
        await redis.delete(claim)

    await FastStream(broker).run()


class Requester(with_faststream.Requester):
    """FastStream's own client, to this queue."""

    queue = queue


if __name__ == "__main__":
    import uvloop

    uvloop.run(work())
