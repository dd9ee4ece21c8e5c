"""The queue that a client takes its replies from: kept open, and what comes is handed to whoever awaits it.

async with ReplyQueue(connection, within_s=30) as queue:
    with queue.expecting(message) as arrived:
        message.reply_to = await queue.address()
        …                                          publish it
        reply = await next_of(arrived, end=None)
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeAlias

from topology.broker.connection import Connection
from topology.broker.inbox import Inbox
from topology.contract.messages import Message
from topology.contract.problems import BrokerError, BrokerUnreachable

RECONNECT_PAUSE_S = 0.2
Arrivals: TypeAlias = "asyncio.Queue[Message | BrokerError]"


class ReplyLost(BrokerError):
    """The connection was lost while the answer was awaited: the request goes on, its reply finds nobody."""


class ReplyQueue:
    """An exclusive queue, another one after each loss of its connection; replies are matched by correlation id."""

    def __init__(self, connection: Connection, *, within_s: float) -> None:
        """`within_s`: how long a caller waits for the queue to be there."""
        self._connection = connection
        self._within_s = within_s
        self._name: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._expected: dict[str, Arrivals] = {}
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listener = asyncio.create_task(self._listen(), name="client replies")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        await _ended(self._listener)

    @contextmanager
    def expecting(self, message: Message) -> Iterator[Arrivals]:
        """What is replied to a message, as it comes; the message gets a correlation id."""
        message.correlation_id = uuid.uuid4().hex
        arrived = self._expected[message.correlation_id] = asyncio.Queue()
        try:
            yield arrived
        finally:
            del self._expected[message.correlation_id]

    async def address(self) -> str:
        """The queue's name, for `reply_to`. Raises BrokerUnreachable."""
        try:
            async with asyncio.timeout(self._within_s):
                return await asyncio.shield(self._name)
        except TimeoutError:
            raise BrokerUnreachable(
                f"no reply queue on {self._connection.address} within {self._within_s:g} s: "
                f"{self._connection.trouble or 'unknown'}"
            ) from None

    async def _listen(self) -> None:
        """With its connection the queue goes, and with it every answer that it was to take."""
        while True:
            try:
                async with Inbox(self._connection) as inbox:
                    self._name.set_result(inbox.name)
                    async for message in inbox:
                        if (arrived := self._expected.get(message.correlation_id or "")) is not None:
                            arrived.put_nowait(message)
            except BrokerError as error:
                if self._name.done():
                    self._name = asyncio.get_running_loop().create_future()
                for arrived in self._expected.values():
                    arrived.put_nowait(
                        ReplyLost(
                            f"the connection was lost before the answer came ({error}); ask again under the same id, "
                            "or fetch it: lanekeeper result"
                        )
                    )
                await asyncio.sleep(RECONNECT_PAUSE_S)


async def next_of(arrived: Arrivals, *, end: float | None) -> Message:
    """The next reply. Raises ReplyLost, and TimeoutError at `end` (by the loop's clock)."""
    async with asyncio.timeout_at(end):
        reply = await arrived.get()
    if isinstance(reply, BrokerError):
        raise reply
    return reply


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task, asking until it has: `asyncio.wait_for` of Python 3.11, which aiormq calls, can lose a cancellation.

    Seen where a client was left while its reply queue was being declared: one in some dozens then waited for ever.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
