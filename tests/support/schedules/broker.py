"""A broker in memory: the behaviour of RabbitMQ 4.3's quorum queues on which the promise depends (docs/facts.md).

A message is with one consumer at a time, within its prefetch. Returned messages are delivered first: a lost channel and
`reject` count a delivery, `nack` does not, and all count an acquisition. Acknowledgements travel as frames: they arrive
later, or are lost with their channel. A delayed message goes to the due queue when its time has come. Messages that
expire, or exceed the delivery limit, go to `lane.fallen`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from aiormq.exceptions import ChannelInvalidStateError

from lanekeeper.amqp.driver import Delivered
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from topology.broker.consume import Delivery
from topology.declaration import DELIVERY_LIMIT
from topology.delays import LEVELS, wait_ms

NAMES = Names()
LANE = "critical"
SIDE_QUEUES = 2
ABSENT_PRIORITY = 4
Settled = Callable[["Channel", "Entry", str], None]


@dataclass(eq=False)
class Entry:
    message: Message
    expires_s: float | None = None
    counted: int = 0
    """`x-delivery-count`."""
    acquired: int = 0
    is_returned: bool = False
    queue: "Queue | None" = None
    """The queue from which it was delivered last."""


@dataclass(eq=False)
class Queue:
    name: str
    counts: bool = True
    """Whether it counts deliveries: quorum queues do, the classic intake of RabbitMQ 3.x does not."""
    ready: list[Entry] = field(default_factory=list)

    def take(self) -> Entry:
        """Take the next message: returned ones first, then by priority."""
        found = max(self.ready, key=lambda each: (each.is_returned, _priority(each)))
        self.ready.remove(found)
        found.queue = self
        return found


class Channel:
    """A consumer of one queue, and the channel on which a `Delivery` is settled. The broker and the worker notice its
    end at different times."""

    def __init__(self, broker: "Broker", queue: Queue, *, prefetch: int, owner: str) -> None:
        self._broker = broker
        self.queue = queue
        self.prefetch = prefetch
        self.owner = owner
        self.unacked: dict[int, Entry] = {}
        self.frames: list[tuple[str, int]] = []
        self.settled: set[int] = set()
        self.is_broken = False
        """Nothing passes through any more."""
        self.is_open = True
        """Whether the broker takes it for open."""
        self.is_known_lost = False
        """Whether the worker knows that it is lost."""
        self.is_consuming = True
        self.arrive: Callable[[Delivery], None] = lambda _: None
        self._tags = 0
        self._delivered: dict[int, Entry] = {}

    @property
    def has_room(self) -> bool:
        waiting = len(self.unacked) < self.prefetch
        return self.is_open and self.is_consuming and not self.is_broken and waiting and bool(self.queue.ready)

    def deliver(self) -> None:
        queue = self.queue
        entry = queue.take()
        self._tags += 1
        self.unacked[self._tags] = self._delivered[self._tags] = entry
        headers = dict(entry.message.headers)
        if entry.acquired and queue.counts:
            headers[n.ACQUIRED_COUNT] = entry.acquired
        if entry.counted and queue.counts:
            headers[n.DELIVERY_COUNT] = entry.counted
        got = Delivered(replace(entry.message, headers=headers), self._tags, entry.acquired > 0)
        delivery = Delivery(got, queue=queue.name, channel=self, counted=queue.counts)  # type: ignore[arg-type]
        entry.acquired += 1
        self.arrive(delivery)

    async def basic_ack(self, tag: int, **_: Any) -> None:
        self._write("ack", tag)

    async def basic_reject(self, tag: int, **_: Any) -> None:
        self._write("reject", tag)

    async def basic_nack(self, tag: int, **_: Any) -> None:
        self._write("nack", tag)

    def _write(self, how: str, tag: int) -> None:
        if self.is_known_lost:
            raise ChannelInvalidStateError("closed")
        self._broker.on_settle(self, self._delivered[tag], "twice" if tag in self.settled else how)
        self.settled.add(tag)
        if not self.is_broken:
            self.frames.append((how, tag))

    def read_frame(self) -> None:
        """The broker reads the next frame that the worker wrote."""
        how, tag = self.frames.pop(0)
        entry = self.unacked.pop(tag, None)
        if entry is not None and how != "ack":
            self._broker.give_back(entry, counts=how == "reject")

    def lose(self) -> None:
        """The broker notices that the channel is lost."""
        self.is_open = False
        self.is_broken = True
        self.frames.clear()
        for entry in self.unacked.values():
            self._broker.give_back(entry, counts=True)
        self.unacked.clear()


class Broker:
    """The exchanges and queues of one lane."""

    def __init__(self, *, time_s: Callable[[], float], on_settle: Settled, counts: bool = True) -> None:
        self._time_s = time_s
        self.on_settle = on_settle
        self.intake, self.due, self.fallen = (
            Queue(name) for name in (NAMES.intake(LANE), NAMES.due(LANE), NAMES.strays)
        )
        self.sides = [Queue(NAMES.side(LANE, number), counts) for number in range(SIDE_QUEUES)]
        self.intake.counts = counts
        self.queues = {queue.name: queue for queue in (self.intake, self.due, self.fallen, *self.sides)}
        self.channels: list[Channel] = []
        self.delayed: list[tuple[float, Message]] = []
        self.dead: list[Message] = []
        self.replies: dict[str, list[Message]] = {}

    def open(self, queue: str, *, prefetch: int, owner: str) -> Channel:
        self.channels.append(Channel(self, self.queues[queue], prefetch=prefetch, owner=owner))
        return self.channels[-1]

    def publish(self, message: Message, *, exchange: str, routing_key: str) -> None:
        kept = replace(message, headers=dict(message.headers), exchange=exchange, routing_key=routing_key)
        if exchange == "":
            self.replies.setdefault(routing_key, []).append(kept)
        elif exchange == NAMES.requests or exchange.startswith(NAMES.side_prefix):
            queue = self.intake if exchange == NAMES.requests else self.sides[int(exchange[len(NAMES.side_prefix) :])]
            life_s = None if kept.expiration is None else int(kept.expiration) / 1000
            queue.ready.append(Entry(kept, None if life_s is None else self._time_s() + life_s))
        elif exchange == NAMES.dead:
            self.dead.append(kept)
        else:
            assert exchange.startswith(NAMES.delay_prefix), exchange
            levels = [level for level in range(LEVELS) if kept.headers.get(NAMES.delay_bit(level)) is True]
            headers = {**kept.headers, n.DEATH: [{"queue": exchange, "reason": "expired"}]} if levels else kept.headers
            due_s = self._time_s() + sum(wait_ms(level) for level in levels) / 1000
            self.delayed.append((due_s, replace(kept, exchange=NAMES.due_exchange, headers=headers)))

    def give_back(self, entry: Entry, *, counts: bool) -> None:
        queue = entry.queue
        assert queue is not None
        entry.counted += counts
        entry.is_returned = True
        if entry.counted > DELIVERY_LIMIT and queue.counts and queue is not self.fallen:
            self._publish_stray(queue, entry, "delivery_limit")
        else:
            queue.ready.append(entry)

    def next_timer_s(self) -> float | None:
        """The time at which the next delay or message expires."""
        times = [due_s for due_s, _ in self.delayed]
        times += [each.expires_s for queue in self._expiring for each in queue.ready if each.expires_s is not None]
        return min(times, default=None)

    def on_time(self) -> None:
        """Deliver the delayed messages that are due, and expire messages."""
        now_s = self._time_s()
        for each in [each for each in self.delayed if each[0] <= now_s]:
            self.delayed.remove(each)
            self.due.ready.append(Entry(each[1]))
        for queue in self._expiring:
            for entry in [each for each in queue.ready if each.expires_s is not None and each.expires_s <= now_s]:
                queue.ready.remove(entry)
                self._publish_stray(queue, entry, "expired")

    @property
    def _expiring(self) -> tuple[Queue, ...]:
        return (self.intake, *self.sides)

    def _publish_stray(self, queue: Queue, entry: Entry, reason: str) -> None:
        message = entry.message
        death = {"queue": queue.name, "reason": reason, "exchange": message.exchange}
        if reason == "expired":
            death["original-expiration"] = str(message.expiration)
        headers = {**message.headers, n.DEATH: [death]}
        fallen = replace(message, headers=headers, exchange=NAMES.strays, expiration=None)
        self.fallen.ready.append(Entry(fallen))


def _priority(entry: Entry) -> int:
    return ABSENT_PRIORITY if entry.message.priority is None else entry.message.priority
