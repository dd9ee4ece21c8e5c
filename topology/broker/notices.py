"""Publishing what may be lost (life-cycle events): nobody waits for it, and many go out in one write.

Two events a request through the ordinary way cost a sixth of a request's CPU (benchmarks/overhead.py); put together
they cost a third of that.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

import structlog
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from topology import signals
from topology.broker.connection import Connection, asks_to_stop
from topology.contract.problems import BrokerUnreachable

WAITING = 1000
"""Notices that may wait to be written; more are dropped."""
TOGETHER = 64
"""At most so many in one write."""
WRITE_TIMEOUT_S = 5
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Notices:
    """JSON messages to exchanges, not persistent, without confirms. A task of its own writes them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: asyncio.Queue[tuple[str, str, bytes]] = asyncio.Queue(maxsize=WAITING)
        self._properties = Basic.Properties(content_type="application/json", delivery_mode=1)
        self._channel: Channel | None = None
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write(), name="notices")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._waiting.join()
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer

    def publish(self, body: bytes, *, exchange: str, routing_key: str) -> None:
        """Have it published soon; dropped where too many wait already."""
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait((exchange, routing_key, body))

    async def _write(self) -> None:
        while True:
            together = [await self._waiting.get()]
            while len(together) < TOGETHER and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._send(together)
            except asyncio.CancelledError:
                if asks_to_stop():
                    raise
            except (BrokerUnreachable, AMQPError, RuntimeError, OSError, TimeoutError, ValueError) as error:
                log.debug(signals.NOTICE_DROPPED, error=str(error))
            finally:
                for _ in together:
                    self._waiting.task_done()

    async def _send(self, together: list[tuple[str, str, bytes]]) -> None:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel(confirms=False, timeout_s=WRITE_TIMEOUT_S)
        frames = [
            frame
            for exchange, routing_key, body in together
            for frame in (
                Basic.Publish(exchange=exchange, routing_key=routing_key),
                ContentHeader(properties=self._properties, body_size=len(body)),
                ContentBody(body),
            )
        ]
        await self._channel.write_queue.put(ChannelFrame.marshall(self._channel.number, frames))
