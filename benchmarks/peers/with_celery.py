"""Celery with threads, because its tasks wait for a provider. Results are sent over RabbitMQ. Celery acknowledges late
and reserves one task for each thread, as its documentation advises for long tasks ("Optimizing")."""

import asyncio
import os
from typing import Any, Self

from celery import Celery
from kombu import Queue

from benchmarks.harness.requesters import PRIORITIES

QUEUE = "bench.celery"
app = Celery("bench", broker=os.environ["BENCH_AMQP_URL"], backend="rpc://")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    task_default_queue=QUEUE,
    task_queues=[Queue(QUEUE, queue_arguments={"x-max-priority": 9})],
    result_persistent=True,
    broker_transport_options={"confirm_publish": True},
    broker_pool_limit=60,
    worker_send_task_events=False,
)
_call: list[Any] = []


@app.task(name="call")
def call(body: str) -> str:
    if not _call:
        from benchmarks.harness.sdk import BlockingCalling  # requesters need no SDK, and it takes long to import

        _call.append(BlockingCalling(os.environ["BENCH_BASE_URL"]))
    return _call[0](body.encode()).decode()


class Requester:
    """Celery's own client. It blocks, so each caller has a thread."""

    async def __aenter__(self) -> Self:
        from concurrent.futures import ThreadPoolExecutor

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        return self

    async def __aexit__(self, *_: object) -> None:
        app.close()

    async def publish(self, body: bytes, *, lane: str, **_: Any) -> None:
        how = {"priority": PRIORITIES[lane], "reply_to": os.environ["BENCH_REPLY_TO"]}
        await asyncio.to_thread(call.apply_async, (body.decode(),), **how)

    async def ask(self, body: bytes, *, lane: str, **_: Any) -> None:
        def ask() -> None:
            call.apply_async((body.decode(),), priority=PRIORITIES[lane]).get(timeout=60, interval=0.001)

        await asyncio.to_thread(ask)
