"""taskiq: tasks on asyncio with uvloop; results in Redis, as its documentation advises."""

import os
from typing import Any, Self

from taskiq_aio_pika import AioPikaBroker, Queue, QueueType
from taskiq_redis import RedisAsyncResultBackend

from benchmarks.harness.requesters import PRIORITIES

QUEUE = "bench.taskiq"
backend: RedisAsyncResultBackend[str] = RedisAsyncResultBackend(redis_url=os.environ["BENCH_REDIS_URL"])
broker = AioPikaBroker(
    os.environ["BENCH_AMQP_URL"],
    result_backend=backend,
    qos=int(os.environ.get("BENCH_SLOTS", "1")),
    task_queues=[Queue(name=QUEUE, type=QueueType.CLASSIC, max_priority=9)],
)
_call: list[Any] = []


@broker.task(task_name="call")
async def call(body: str) -> str:
    if not _call:
        from benchmarks.harness.sdk import Calling  # requesters need no SDK, and it takes long to import

        _call.append(Calling(os.environ["BENCH_BASE_URL"]))
    return (await _call[0](body.encode())).decode()


class Requester:
    """taskiq's own client."""

    async def __aenter__(self) -> Self:
        await broker.startup()
        return self

    async def __aexit__(self, *_: object) -> None:
        await broker.shutdown()

    async def publish(self, body: bytes, *, lane: str, **_: Any) -> None:
        await call.kicker().with_labels(priority=PRIORITIES[lane]).kiq(body.decode())

    async def ask(self, body: bytes, *, lane: str, **_: Any) -> None:
        task = await call.kicker().with_labels(priority=PRIORITIES[lane]).kiq(body.decode())
        await task.wait_result(check_interval=0.001, timeout=60)
