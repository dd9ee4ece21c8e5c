"""Fetches the first message (the head) of each of several queues with `basic.get`, so that a worker can choose among
the queues.

    heads = Heads(queues)
    async for delivery in HeadsSession(channel, heads, …): …       holds at most one message of each queue
    heads.pass_on(delivery.queue)                                  this head was chosen; the queue's next one is fetched

The queues are not consumed, because a consumer prefetches messages: no other process could work on the prefetched
messages, and messages with a higher priority could not overtake them. Once a second, a passive declaration of each
queue finds out whether it has messages; the broker's answer to a fetch also says how many messages are left.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from aiormq.channel import Channel
from pamqp.commands import Basic

from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.frames import message_of
from lanekeeper.amqp.driver.incoming import Delivered
from topology.broker.session import RPC_TIMEOUT_S, ChannelLost, Delivery, Session

READ_LENGTHS_EVERY_S: Final = 1.0
"""The seconds between two readings of the lengths of the queues from which a worker fetches with `basic.get`. Reading
one queue's length (a passive declaration) takes 0.1 ms of CPU."""


class Heads:
    """Decides from which of several queues to fetch the next message. A queue's head is its first message; a process
    holds a head that it has fetched until `pass_on`, and holds at most one for each queue. When the channel is lost,
    the same `Heads` is used with the next channel, so the lengths of the queues stay known."""

    def __init__(self, queues: Iterable[str]) -> None:
        self._ready = dict.fromkeys(queues, 0)
        self._held: set[str] = set()
        self.changed = asyncio.Event()

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._ready)

    @property
    def ready(self) -> int:
        """How many messages wait in all the queues together, without those that a process has fetched and not settled
        yet."""
        return sum(self._ready.values())

    def ready_in(self, queue: str) -> int:
        return self._ready[queue]

    def publish_seen(self, queue: str) -> None:
        """Add one to the length that this process remembers for a queue, because it has published a message there."""
        self._ready[queue] += 1
        self.changed.set()

    def pass_on(self, queue: str) -> None:
        """Allow the next fetch from a queue. Call it when work on the message that was fetched from the queue has
        begun, or when this message was acknowledged or returned to the queue."""
        self._held.discard(queue)
        self.changed.set()

    def next(self) -> str | None:
        """The queue from which to fetch next. Only queues count that have messages, and from which this process holds
        no fetched message. Of these, it is the queue whose last fetch is longest ago. Returns None if there is no such
        queue."""
        for queue, ready in self._ready.items():
            if ready > 0 and queue not in self._held:
                return queue
        return None

    def fetched(self, queue: str, *, left: int) -> None:
        """Record that the first message of a queue was fetched, and that `left` messages remain in the queue."""
        del self._ready[queue]
        self._ready[queue] = left  # moves the queue to the end of the order
        self._held.add(queue)

    def found(self, queue: str, ready: int) -> None:
        """Record the length of a queue, as the broker has reported it."""
        self._ready[queue] = ready

    def lost(self) -> None:
        """Record that this process holds no fetched message any more: the channel was lost, so the broker has returned
        these messages to their queues."""
        self._held.clear()


class HeadsSession(Session):
    """A `Session` for several queues that fetches with `basic.get`, in place of consuming. Each delivery is the head
    (the first message) of the queue that `heads` chooses."""

    def __init__(self, channel: Channel, heads: Heads, *, queue: str, counted: bool) -> None:
        super().__init__(channel, queue=queue, counted=counted)
        self._heads = heads
        self._fetching = False
        self._next_reading_s = 0.0

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
            if self._fetching and (queue := self._heads.next()) is not None:
                if (delivery := await self._fetch(queue)) is not None:
                    return delivery
            elif self._fetching and loop.time() >= self._next_reading_s:
                await self._read_lengths()
                self._next_reading_s = loop.time() + READ_LENGTHS_EVERY_S
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_reading_s if self._fetching else None):
                        await self._heads.changed.wait()

    async def _fetch(self, queue: str) -> Delivery | None:
        with border(f"cannot fetch from {queue!r}", lost=ChannelLost):
            found = await self._channel.basic_get(queue, timeout=RPC_TIMEOUT_S)
        if not isinstance(found.delivery, Basic.GetOk):
            self._heads.found(queue, 0)
            return None
        self._heads.fetched(queue, left=found.delivery.message_count or 0)
        got = Delivered(message_of(found), found.delivery.delivery_tag or 0, bool(found.delivery.redelivered))
        return Delivery(got, queue=queue, channel=self._channel, counted=self._counted)

    async def _read_lengths(self) -> None:
        for queue in self._heads.queues:
            with border(f"cannot look at {queue!r}", lost=ChannelLost):
                declared = await self._channel.queue_declare(queue, passive=True, timeout=RPC_TIMEOUT_S)
            self._heads.found(queue, declared.message_count or 0)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._heads.changed.set()
