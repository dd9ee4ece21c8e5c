"""Celery with threads, because its tasks wait for a provider. Results are sent over RabbitMQ. Celery acknowledges late
and reserves one task for each thread, as its documentation advises for long tasks ("Optimizing")."""

import os
from functools import partial

from celery import Celery
from kombu import Queue

from benchmarks.harness.requesters import PRIORITIES
from benchmarks.peers.blocking import BlockingRequester, call

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


task = app.task(name="call")(call)


def send(body: str, lane: str) -> None:
    task.apply_async((body,), priority=PRIORITIES[lane], reply_to=os.environ["BENCH_REPLY_TO"])


def ask(body: str, lane: str) -> None:
    task.apply_async((body,), priority=PRIORITIES[lane]).get(timeout=60, interval=0.001)


Requester = partial(BlockingRequester, send, ask, app.close)
