"""Dramatiq with threads, as its documentation advises for tasks that wait. Results are written to Redis, because
Dramatiq cannot send them over RabbitMQ."""

import asyncio
import os
from typing import Any, Self

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis import Redis

from benchmarks.harness.requesters import PRIORITIES

QUEUE = "bench.dramatiq"
backend = RedisBackend(client=Redis.from_url(os.environ["BENCH_REDIS_URL"], socket_timeout=None))  # waits for results
broker = RabbitmqBroker(url=os.environ["BENCH_AMQP_URL"], confirm_delivery=True, max_priority=9)
broker.add_middleware(Results(backend=backend))
dramatiq.set_broker(broker)
_call: list[Any] = []


@dramatiq.actor(queue_name=QUEUE, store_results=True, max_retries=0)
def call(body: str) -> str:
    if not _call:
        from benchmarks.harness.sdk import BlockingCalling  # requesters need no SDK, and it takes long to import

        _call.append(BlockingCalling(os.environ["BENCH_BASE_URL"]))
    return _call[0](body.encode()).decode()


class Requester:
    """Dramatiq's own client. It blocks, so each caller has a thread."""

    async def __aenter__(self) -> Self:
        from concurrent.futures import ThreadPoolExecutor

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        return self

    async def __aexit__(self, *_: object) -> None:
        broker.close()

    async def publish(self, body: bytes, *, lane: str, **_: Any) -> None:
        how = {"broker_priority": PRIORITIES[lane]}
        await asyncio.to_thread(call.send_with_options, args=(body.decode(),), **how)

    async def ask(self, body: bytes, *, lane: str, **_: Any) -> None:
        def ask() -> None:
            sent = call.send_with_options(args=(body.decode(),), broker_priority=PRIORITIES[lane])
            sent.get_result(backend=backend, block=True, timeout=60_000)

        await asyncio.to_thread(ask)
