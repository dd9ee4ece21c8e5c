"""Publishes messages that may be lost (life-cycle events), many in one write; nobody waits for them.

Two events a request, published the ordinary way, cost a quarter of all that we add to a call (measured).
So they are collected for a moment and their frames are built here; these differ only in the key and the body.
"""

import asyncio
import struct
from contextlib import suppress
from typing import Self

from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError
from pamqp.commands import Basic

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import asks_to_stop
from lanekeeper.amqp.driver.frames import properties_of
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerBlocked, BrokerError
from lanekeeper.telemetry import logs, signals

WAITING = 1000
"""Notices that may wait to be written; more are dropped."""
TOGETHER = 100
"""At most so many in one write."""
GATHER_S = 0.005
"""How long the first of them waits for others."""
WRITE_TIMEOUT_S = 5
_Notice = tuple[str, str, bytes, bytes]
"""Exchange, routing key, properties as they are written, body."""
log = logs.logger()


class Notices:
    """JSON messages to exchanges, not persistent, without confirms. A task of its own writes them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: asyncio.Queue[_Notice] = asyncio.Queue(maxsize=WAITING)
        self._closing = False
        self._channel: Channel | None = None
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write(), name="notices")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        if self._writer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._waiting.join()
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer

    def publish(self, body: bytes, *, exchange: str, routing_key: str) -> None:
        """Publish it soon. It is dropped if too many wait already."""
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait((exchange, routing_key, _JSON, body))

    def send(self, message: Message, *, routing_key: str) -> bool:
        """The same for a message to a queue; False if it was dropped. It costs a fifth of a confirmed publish."""
        if self._waiting.full():
            return False
        self._waiting.put_nowait(("", routing_key, properties_of(message).marshal(), message.body))
        return True

    async def _write(self) -> None:
        while True:
            together = [await self._waiting.get()]
            if not self._closing:
                await asyncio.sleep(GATHER_S)
            while len(together) < TOGETHER and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._send(together)
            except asyncio.CancelledError:
                if asks_to_stop():
                    raise
            except (BrokerError, AMQPError, RuntimeError, OSError, TimeoutError, ValueError) as error:
                log.debug(signals.NOTICE_DROPPED, error=str(error))
            finally:
                for _ in together:
                    self._waiting.task_done()

    async def _send(self, together: list[_Notice]) -> None:
        if self._connection.blocked is not None:  # otherwise all of it would stay in our memory until the alarm ends
            raise BrokerBlocked(self._connection.blocked)
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.raw_channel(confirms=False, timeout_s=WRITE_TIMEOUT_S)
        number = self._channel.number
        payload = b"".join(_frames(number, *notice) for notice in together)
        await self._channel.write_queue.put(ChannelFrame(payload=payload, should_close=False))


_JSON = Basic.Properties(content_type="application/json", delivery_mode=1).marshal()


def _frames(channel: int, exchange: str, routing_key: str, properties: bytes, body: bytes) -> bytes:
    """`Basic.Publish`, content header and body (AMQP 0-9-1, sections 4.2.4 to 4.2.6), in a tenth of pamqp's time."""
    name, key = exchange.encode(), routing_key.encode()
    method = b"".join((b"\0\x3c\0\x28\0\0", bytes((len(name),)), name, bytes((len(key),)), key, b"\0"))
    header = struct.pack(">HHQ", Basic.frame_id, 0, len(body)) + properties
    return _frame(1, channel, method) + _frame(2, channel, header) + _frame(3, channel, body)


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"
