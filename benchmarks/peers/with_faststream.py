"""FastStream: handlers on asyncio with uvloop. FastStream's validation of arguments and its log lines are switched
off."""

import os
from typing import Any, Self

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from benchmarks.harness.requesters import PRIORITIES

QUEUE = "bench.faststream"
queue = RabbitQueue(QUEUE, durable=True, arguments={"x-max-priority": 9})


def broker_with(slots: int) -> RabbitBroker:
    """FastStream's broker object, with a prefetch of `slots` and publisher confirms."""
    channel = Channel(prefetch_count=slots, publisher_confirms=True)
    return RabbitBroker(os.environ["BENCH_AMQP_URL"], default_channel=channel, apply_types=False, logger=None)


async def undecoded(message: Any) -> bytes:
    """The body as bytes. Without this decoder FastStream would parse JSON."""
    return bytes(message.body)


async def work() -> None:
    from benchmarks.harness.sdk import Calling  # requesters need no SDK, and it takes long to import

    broker = broker_with(int(os.environ["BENCH_SLOTS"]))
    call = Calling(os.environ["BENCH_BASE_URL"])

    @broker.subscriber(queue, ack_policy=AckPolicy.NACK_ON_ERROR, decoder=undecoded)
    async def handle(body: bytes) -> bytes:
        return await call(body)

    await FastStream(broker).run()


class Requester:
    """FastStream's own client."""

    queue = queue

    async def __aenter__(self) -> Self:
        self._broker = broker_with(1)
        await self._broker.connect()
        await self._broker.declare_queue(self.queue)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._broker.stop()

    async def publish(self, body: bytes, *, number: int, lane: str, **_: Any) -> None:
        await self._broker.publish(
            body,
            queue=self.queue,
            priority=PRIORITIES[lane],
            persist=True,
            reply_to=os.environ["BENCH_REPLY_TO"],
            correlation_id=str(number),
        )

    async def ask(self, body: bytes, *, lane: str, **_: Any) -> None:
        await self._broker.request(body, queue=self.queue, priority=PRIORITIES[lane], persist=True, timeout=60)


if __name__ == "__main__":
    import uvloop

    uvloop.run(work())
