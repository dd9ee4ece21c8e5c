"""Publishes messages that may be lost, such as the life-cycle events of requests: many in one write, without confirms.

Each request causes two events. Publishing them one by one took a quarter of the CPU that Lanekeeper adds to a model
call.
"""

import asyncio
from contextlib import suppress
from typing import Self

import structlog
from aiormq.abc import ChannelFrame, FrameType
from aiormq.channel import Channel
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver import translate_broker_errors
from lanekeeper.amqp.tolerant import Properties
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerBlocked
from lanekeeper.telemetry import signals

WAITING = 1000
TOGETHER = 100
GATHER_S = 0.025
"""When this time was 5 ms, a worker that handled one request after another made one write for each request, and used a
tenth more CPU."""
WRITE_TIMEOUT_S = 5
_Notice = tuple[str, str, Properties, bytes]
log = structlog.get_logger()


class Notices:
    """Queues messages, and writes many at a time to the connection in a background task."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: asyncio.Queue[_Notice] = asyncio.Queue(maxsize=WAITING)
        self._closing = False
        self._channel: Channel | None = None
        self._writer: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write(), name="notices")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._waiting.join()
        self._writer.cancel()
        with suppress(asyncio.CancelledError):
            await self._writer

    def publish(self, body: bytes, *, exchange: str, routing_key: str) -> None:
        """Queue a JSON event, which is not persistent. It is dropped without an error if `WAITING` messages are
        queued."""
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait((exchange, routing_key, _JSON, body))

    def send(self, message: Message, *, routing_key: str) -> bool:
        """Queue a message for the queue named `routing_key`. Returns False if it was dropped, because `WAITING`
        messages are queued. This takes a fifth of the CPU time of a confirmed publish."""
        if self._waiting.full():
            return False
        self._waiting.put_nowait(("", routing_key, Properties(message), message.body))
        return True

    async def _write(self) -> None:
        while True:
            together = [await self._waiting.get()]
            if not self._closing:
                await asyncio.sleep(GATHER_S)
            while len(together) < TOGETHER and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            try:
                with translate_broker_errors("publishing notices"):
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await self._send(together)
            except Exception as error:  # whatever it is, the next notices are sent
                log.debug(signals.NOTICE_DROPPED, error=str(error))
            finally:
                for _ in together:
                    self._waiting.task_done()

    async def _send(self, together: list[_Notice]) -> None:
        if self._connection.blocked is not None:  # during an alarm, written frames would stay in our memory
            raise BrokerBlocked(self._connection.blocked)
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel(confirms=False, timeout_s=WRITE_TIMEOUT_S)
        channel = self._channel
        frames: list[FrameType] = []
        for exchange, routing_key, properties, body in together:
            pieces = [
                ContentBody(body[at:][: channel.max_content_size])
                for at in range(0, len(body), channel.max_content_size)
            ]
            frames += [
                Basic.Publish(exchange=exchange, routing_key=routing_key),
                ContentHeader(body_size=len(body), properties=properties),
                *pieces,
            ]
        await channel.write_queue.put(ChannelFrame.marshall(channel.number, frames))


_JSON = Properties(Message(body=b"", content_type="application/json", persistent=False))
