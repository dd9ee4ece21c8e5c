"""Drain: requests are published first, then one worker process takes them; requests a second, CPU of that process."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import aio_pika

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from suite import load
from suite.books import Books
from suite.contestants import Contestant, Place
from suite.processes import cpu_s, process
from topology.broker.admin.apply import apply

WARM = 0.2
"""Share of the requests before the first look."""
LOOK_EVERY_S = 0.01
WITHIN_S = 120.0
_PUBLISHING_AT_ONCE = 200


class Spoiled(Exception):
    """A run that lost or repeated a request, or did not end: it has no figure."""


@dataclass(frozen=True, kw_only=True)
class Drained:
    """What one round came to."""

    per_s: float
    cpu_ms: float
    """Of the worker, a request."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at the books and at the worker."""

    calls: int
    at_s: float
    cpu_s: float

    @classmethod
    def at(cls, books: Books, pid: int) -> "Look":
        return cls(calls=books.calls, at_s=time.perf_counter(), cpu_s=cpu_s(pid))


def between(first: Look, last: Look) -> Drained:
    calls = last.calls - first.calls
    return Drained(per_s=calls / (last.at_s - first.at_s), cpu_ms=1000 * (last.cpu_s - first.cpu_s) / calls)


async def drain(who: Contestant, connection: Connection, books: Books, place: Place, *, requests: int) -> Drained:
    """One round. Raises Spoiled."""
    await apply(who.topology(connection.version), await connection.underlying())
    await empty(connection, who.queue, who.reply_to)
    books.clear()
    await fill(who, place.amqp_url, range(requests))
    work = who.worker(place)
    async with process(work.command, environ=work.environ, log=Path(place.folder, f"{who.name}.log")) as pid:
        async with asyncio.timeout(WITHIN_S):
            while books.calls < WARM * requests:
                await asyncio.sleep(LOOK_EVERY_S)
            first = Look.at(books, pid)
            while books.calls < requests:
                await asyncio.sleep(LOOK_EVERY_S)
            last = Look.at(books, pid)
            while (await depths(connection, [who.reply_to]))[who.reply_to].ready < requests:
                await asyncio.sleep(LOOK_EVERY_S)
    await check(who, place.amqp_url, connection, books, requests=requests)
    return between(first, last)


async def fill(who: Contestant, amqp_url: str, numbers: range, *, size: int = load.BODY_BYTES) -> None:
    """Publish requests, persistent and confirmed."""
    connection = await aio_pika.connect(amqp_url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        exchange = await channel.get_exchange(who.exchange) if who.exchange else channel.default_exchange
        left = iter(numbers)

        async def publish() -> None:
            for number in left:
                message = aio_pika.Message(
                    load.body(number, size=size),
                    content_type="application/json",
                    message_id=uuid.uuid4().hex,
                    correlation_id=str(number),
                    reply_to=who.reply_to,
                    priority=4,
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                    headers={"x-lane-sent-ms": time.time_ns() // 1_000_000},
                )
                await exchange.publish(message, routing_key=who.key)

        await asyncio.gather(*(publish() for _ in range(_PUBLISHING_AT_ONCE)))


async def check(who: Contestant, amqp_url: str, connection: Connection, books: Books, *, requests: int) -> None:
    """Every request was called once and answered once, and nothing waits. Raises Spoiled."""
    replies: list[str | None] = []
    async with await aio_pika.connect(amqp_url) as reading:
        channel = await reading.channel()
        await channel.set_qos(prefetch_count=500)
        queue = await channel.get_queue(who.reply_to)
        while (reply := await queue.get(no_ack=True, fail=False)) is not None:
            if reply.headers.get("x-lane-status", "ok") != "ok":
                raise Spoiled(f"{who.name}: a request ended as {reply.body[:500]!r}")
            replies.append(reply.correlation_id)
    waiting = (await depths(connection, [who.queue]))[who.queue].ready
    missing = requests - len(set(replies))
    if missing or waiting or books.repeated or len(replies) != requests:
        twice = len(replies) - len(set(replies))
        raise Spoiled(
            f"{who.name}: {missing} of {requests} without a reply, {twice} with two, {books.repeated} called twice, "
            f"{waiting} waiting"
        )


async def empty(connection: Connection, *queues: str) -> None:
    channel = await connection.raw_channel(confirms=False)
    for queue in queues:
        await channel.queue_purge(queue)
    await channel.close()
