"""Queues whose first messages (heads) are fetched one at a time (`basic.get`), so that the reader can choose among the
queues.

    heads = Heads(queues)
    async for delivery in HeadsSession(channel, heads, …): …       one of each queue is in hand at most
    heads.pass_on(delivery.queue)                                  its head was chosen: the next is fetched

A consumer would need a prefetch for each queue, and no other process could work on what it holds, nor could a higher
priority overtake it. A passive declaration each second finds out whether a queue holds anything; after a fetch the
broker says how many messages are left.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from aiormq.channel import Channel
from pamqp.commands import Basic

from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.frames import message_of
from lanekeeper.amqp.driver.incoming import Delivered
from topology.broker.session import RPC_TIMEOUT_S, ChannelLost, Delivery, Session

LOOK_EVERY_S: Final = 1.0
"""How often the queues' lengths are read: one passive declaration for each queue, 0.1 ms of CPU."""


class Heads:
    """What is known of the queues: how many messages wait in each, and whose head is held. It outlives sessions."""

    def __init__(self, queues: Iterable[str]) -> None:
        self._ready = dict.fromkeys(queues, 0)
        self._held: set[str] = set()
        self.changed = asyncio.Event()

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._ready)

    @property
    def ready(self) -> int:
        """How many messages wait in all the queues, without those that a process holds."""
        return sum(self._ready.values())

    def ready_in(self, queue: str) -> int:
        return self._ready[queue]

    def publish_seen(self, queue: str) -> None:
        """Note that this process published one more message to a queue."""
        self._ready[queue] += 1
        self.changed.set()

    def pass_on(self, queue: str) -> None:
        """Note that a queue's head is being worked on, or is gone: the next may be fetched."""
        self._held.discard(queue)
        self.changed.set()

    def next(self) -> str | None:
        """A queue whose head should be fetched next, the one that was asked longest ago first; None if there is
        none."""
        for queue, ready in self._ready.items():
            if ready > 0 and queue not in self._held:
                return queue
        return None

    def fetched(self, queue: str, *, left: int) -> None:
        """Note that a queue's head is held now, and that `left` messages remain behind it."""
        del self._ready[queue]
        self._ready[queue] = left  # the last to be asked next time
        self._held.add(queue)

    def found(self, queue: str, ready: int) -> None:
        """Note that `ready` messages wait in a queue."""
        self._ready[queue] = ready

    def lost(self) -> None:
        """Note that the channel is lost: the broker delivers the held heads again."""
        self._held.clear()


class HeadsSession(Session):
    """The heads that one channel fetches, as deliveries. It ends, or is lost, like every session."""

    def __init__(self, channel: Channel, heads: Heads, *, queue: str, counted: bool) -> None:
        super().__init__(channel, queue=queue, counted=counted)
        self._heads = heads
        self._fetching = False
        self._look_at_s = 0.0

    async def start(self, *, prefetch: int) -> None:
        self._channel.closing.add_done_callback(self._on_closed)
        self._heads.lost()
        self._fetching = True

    async def stop(self) -> None:
        self._stopped = True
        self._heads.changed.set()

    async def pause(self) -> None:
        self._fetching = False

    async def resume(self) -> None:
        self._fetching = True
        self._heads.changed.set()

    async def __anext__(self) -> Delivery:
        loop = asyncio.get_running_loop()
        while True:
            self._heads.changed.clear()
            if self._lost is not None:
                raise ChannelLost(f"{self._queue}: {self._lost}")
            if self._stopped:
                raise StopAsyncIteration
            if self._fetching:
                if (queue := self._heads.next()) is not None:
                    if (delivery := await self._fetch(queue)) is not None:
                        return delivery
                    continue
                if loop.time() >= self._look_at_s:
                    await self._look()
                    self._look_at_s = loop.time() + LOOK_EVERY_S
                    continue
            try:
                async with asyncio.timeout_at(self._look_at_s if self._fetching else None):
                    await self._heads.changed.wait()
            except TimeoutError:
                pass

    async def _fetch(self, queue: str) -> Delivery | None:
        with border(f"cannot fetch from {queue!r}", lost=ChannelLost):
            found = await self._channel.basic_get(queue, timeout=RPC_TIMEOUT_S)
        if not isinstance(found.delivery, Basic.GetOk):
            self._heads.found(queue, 0)
            return None
        self._heads.fetched(queue, left=found.delivery.message_count or 0)
        got = Delivered(message_of(found), found.delivery.delivery_tag or 0, bool(found.delivery.redelivered))
        return Delivery(got, queue=queue, channel=self._channel, counted=self._counted)

    async def _look(self) -> None:
        for queue in self._heads.queues:
            with border(f"cannot look at {queue!r}", lost=ChannelLost):
                told = await self._channel.queue_declare(queue, passive=True, timeout=RPC_TIMEOUT_S)
            self._heads.found(queue, told.message_count or 0)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._heads.changed.set()
