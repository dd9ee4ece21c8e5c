"""Connections of applications to a broker that fails: a publisher that records its confirms, and a reader that
waits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, DeliveryError, PublishError
from pamqp.commands import Basic

from tests.faults.history import Told

CONFIRM_S = 10.0
HEARTBEAT_S = 3
PREFETCH = 200


class Publisher:
    """One connection with one confirming channel; after any uncertain outcome it is opened again at the next node."""

    def __init__(self, urls: Sequence[str], node: int) -> None:
        self._urls = urls
        self._node = node
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._opening = asyncio.Lock()

    async def publish(self, body: bytes, *, key: str, properties: Basic.Properties) -> Told:
        channel: AbstractChannel | None = None
        try:
            channel = await self._open()
            await channel.basic_publish(
                body,
                exchange="lane.requests",
                routing_key=key,
                properties=properties,
                mandatory=True,
                timeout=CONFIRM_S,
            )
            return "confirmed"
        except PublishError:
            return "returned"
        except DeliveryError:
            return "refused"
        except (AMQPError, OSError, TimeoutError, RuntimeError, asyncio.CancelledError) as error:
            if asks_to_stop(error):
                raise
            # A new channel each time, because aiormq matches returned messages by message id only.
            if channel is self._channel:
                await self.close()
            return "unknown"

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                await asyncio.wait_for(connection.close(), timeout=0.5)

    async def _open(self) -> AbstractChannel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                await self.close()
                self._node = (self._node + 1) % len(self._urls)
                async with asyncio.timeout(CONFIRM_S):
                    self._connection = await aiormq.connect(_named(self._urls[self._node], "asks"))
                    self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            return self._channel


async def read(urls: Sequence[str], queue: str, take: Callable[[DeliveredMessage], None]) -> None:
    """Pass on everything that arrives in a queue, for ever; when a node is lost, from the next one."""
    node = len(urls) - 1  # the last node, because faults affect the others as far as there are others
    while True:
        ended = asyncio.Event()

        async def taken(delivered: DeliveredMessage) -> None:
            take(delivered)
            with suppress(AMQPError, RuntimeError, OSError):
                assert isinstance(delivered.delivery, Basic.Deliver)
                await delivered.channel.basic_ack(delivered.delivery.delivery_tag or 0, wait=False)

        def end(_: object, ended: asyncio.Event = ended) -> None:
            ended.set()

        try:
            async with connected(urls[node], name="reads") as connection:
                channel = await connection.channel()
                assert isinstance(channel, Channel)
                connection.closing.add_done_callback(end)
                channel.closing.add_done_callback(end)
                channel.on_consumer_cancel_callbacks.add(end)
                await channel.basic_qos(prefetch_count=PREFETCH)
                await channel.basic_consume(queue, taken, timeout=CONFIRM_S)
                await ended.wait()
        except (AMQPError, OSError, TimeoutError, RuntimeError, asyncio.CancelledError) as error:
            if asks_to_stop(error):
                raise
        node = (node + 1) % len(urls)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def connected(url: str, name: str = "declares") -> AsyncIterator[AbstractConnection]:
    async with asyncio.timeout(CONFIRM_S):
        connection = await aiormq.connect(_named(url, name))
    try:
        yield connection
    finally:
        with suppress(Exception):
            await asyncio.wait_for(connection.close(), timeout=1)


def _named(url: str, name: str) -> str:
    return f"{url}?heartbeat={HEARTBEAT_S}&name=faults+{name}"


def asks_to_stop(error: BaseException) -> bool:
    """Whether a cancellation was requested. aiormq also cancels whatever waits on a connection that is lost."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
