"""The shortest possible requester on aio-pika.

It publishes to the exchange BENCH_EXCHANGE with the routing key BENCH_KEY, in which `{lane}` is replaced by the lane.
Replies that it does not wait for go to the queue BENCH_REPLY_TO.
"""

import asyncio
import os
import time
import uuid
from typing import Any, Self

import aio_pika

PRIORITIES = {"critical": 9, "normal": 5, "batch": 1}
DIRECT = "amq.rabbitmq.reply-to"


class Requester:
    """Publishes persistently, with confirms; answers come by direct reply-to."""

    def __init__(self) -> None:
        self._key = os.environ["BENCH_KEY"]
        self._reply_to = os.environ["BENCH_REPLY_TO"]
        self._waiting: dict[str | None, asyncio.Future[float]] = {}

    async def __aenter__(self) -> Self:
        self._connection = await aio_pika.connect(os.environ["BENCH_AMQP_URL"])
        self._channel = await self._connection.channel(publisher_confirms=True)
        name = os.environ["BENCH_EXCHANGE"]
        self._exchange = await self._channel.get_exchange(name) if name else self._channel.default_exchange
        replies = await self._channel.get_queue(DIRECT, ensure=False)
        await replies.consume(self._answered, no_ack=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    async def publish(
        self, body: bytes, *, number: int, lane: str, tenant: int, reply_to: str | None = None, stream: bool = False
    ) -> None:
        headers: dict[str, Any] = {"x-lane-sent-ms": time.time_ns() // 1_000_000}
        if tenant:
            headers["x-lane-tenant"] = f"tenant-{tenant}"
        if stream:
            headers["x-lane-stream"] = True
        message = aio_pika.Message(
            body,
            content_type="application/json",
            message_id=uuid.uuid4().hex,
            correlation_id=str(number),
            reply_to=reply_to or self._reply_to,
            priority=PRIORITIES[lane],
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            user_id=os.environ.get("BENCH_USER"),
            headers=headers,
        )
        await self._exchange.publish(message, routing_key=self._key.format(lane=lane))

    async def ask(self, body: bytes, *, number: int, lane: str, tenant: int) -> None:
        await self._first(body, number=number, lane=lane, tenant=tenant, stream=False)

    async def first_part(self, body: bytes, *, number: int, lane: str, tenant: int) -> float:
        return await self._first(body, number=number, lane=lane, tenant=tenant, stream=True)

    async def _first(self, body: bytes, *, number: int, lane: str, tenant: int, stream: bool) -> float:
        answered = self._waiting[str(number)] = asyncio.get_running_loop().create_future()
        await self.publish(body, number=number, lane=lane, tenant=tenant, reply_to=DIRECT, stream=stream)
        return float(await answered)

    async def _answered(self, reply: Any) -> None:
        if reply.headers.get("x-lane-status", "ok") != "ok":
            raise SystemExit(f"a request failed: {reply.body[:500]!r}")
        if (answered := self._waiting.pop(reply.correlation_id, None)) is not None:
            answered.set_result(time.monotonic())
