"""Dramatiq with threads, as its documentation advises for tasks that wait. Results are written to Redis, because
Dramatiq cannot send them over RabbitMQ."""

import os
from functools import partial
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis import Redis

from benchmarks.harness.requesters import PRIORITIES
from benchmarks.peers.blocking import BlockingRequester, call

QUEUE = "bench.dramatiq"
backend = RedisBackend(client=Redis.from_url(os.environ["BENCH_REDIS_URL"], socket_timeout=None))  # waits for results
broker = RabbitmqBroker(url=os.environ["BENCH_AMQP_URL"], confirm_delivery=True, max_priority=9)
broker.add_middleware(Results(backend=backend))
dramatiq.set_broker(broker)


task = dramatiq.actor(call, queue_name=QUEUE, store_results=True, max_retries=0)


def send(body: str, lane: str) -> Any:
    return task.send_with_options(args=(body,), broker_priority=PRIORITIES[lane])


def ask(body: str, lane: str) -> None:
    send(body, lane).get_result(backend=backend, block=True, timeout=60_000)


Requester = partial(BlockingRequester, send, ask, broker.close)
