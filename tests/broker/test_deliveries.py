"""Deliveries from a real broker: up to the prefetch, settled once, delivered again when the channel is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry.tracing import Tracing
from tests.support.brokers import Vhost, close_connection
from tests.support.waiting import until
from topology.broker.consume import ChannelLost, Deliveries, Delivery
from topology.broker.memory import EXPECTED_FOR_S, HeldBytes

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}


@dataclass
class Lines:
    """A queue `some`, and methods to fill and consume it."""

    vhost: Vhost
    consuming: Connection
    publisher: Publisher
    lost: list[Exception] = field(default_factory=list)

    async def declare(self, arguments: dict[str, Any] | None = None) -> None:
        channel = await self.consuming.channel(confirms=False)
        await channel.queue_declare("some", durable=True, arguments=QUORUM if arguments is None else arguments)
        await channel.close()

    async def publish(self, *bodies: bytes, **properties: Any) -> None:
        for body in bodies:
            await self.publisher.publish(Message(body=body, **properties), exchange="", routing_key="some")

    async def until_ready(self, count: int) -> None:
        """Wait until so many messages are ready; unsettled messages return a moment after their channel closed."""

        async def holds() -> bool:
            return (await depths(self.publisher.connection, ["some"]))["some"].ready == count

        await until(holds)

    @asynccontextmanager
    async def at_work(
        self,
        work: Callable[[Delivery], Coroutine[Any, Any, None]],
        *,
        prefetch: int = 4,
        counted: bool = True,
        **more: Any,
    ) -> AsyncIterator[Deliveries]:
        """Like a pool: a task for each delivery, until stopped or the channel is lost."""
        deliveries = Deliveries(self.consuming, queue="some", prefetch=prefetch, counted=counted, **more)

        async def run() -> None:
            async with aclosing(deliveries.sessions()) as sessions:
                async for session in sessions:
                    try:
                        async with asyncio.TaskGroup() as running:
                            async for delivery in session:
                                running.create_task(work(delivery))
                    except* ChannelLost as group:
                        self.lost.extend(group.exceptions)

        running = asyncio.create_task(run())
        try:
            await until(lambda: deliveries.trouble is None)
            yield deliveries
            await deliveries.stop()
            await asyncio.wait_for(running, 60)
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.fixture
async def lines(vhost: Vhost) -> AsyncIterator[Lines]:
    async with AsyncExitStack() as stack:
        consuming = await stack.enter_async_context(Connection(vhost.amqp_url, name=f"{vhost.name} consume"))
        publishing = await stack.enter_async_context(Connection(vhost.amqp_url, name=f"{vhost.name} publish"))
        lines = Lines(vhost, consuming, Publisher(publishing, tracing=Tracing()))
        await lines.declare()
        yield lines


@pytest.mark.oldest_version
async def test_no_more_than_the_prefetch_is_delivered(lines: Lines) -> None:
    held: list[Delivery] = []

    async def hold(delivery: Delivery) -> None:
        held.append(delivery)

    await lines.publish(*(b"%d" % at for at in range(10)))
    async with lines.at_work(hold, prefetch=3):
        await until(lambda: len(held) == 3)
        await asyncio.sleep(0.2)
        assert len(held) == 3
        await held[0].ack()
        await until(lambda: len(held) == 4)
    await lines.until_ready(9)


@pytest.mark.oldest_version
async def test_an_acknowledged_message_is_gone_and_was_read_completely(lines: Lines) -> None:
    seen: list[Delivery] = []

    async def ack(delivery: Delivery) -> None:
        seen.append(delivery)
        await delivery.ack()

    async with lines.at_work(ack):
        await lines.publish(b"x", message_id="m", priority=7, headers={"a": 1})
        await until(lambda: seen)
    (delivery,) = seen
    assert (delivery.queue, delivery.redelivered, delivery.times_delivered) == ("some", False, 1)
    assert (delivery.message.body, delivery.message.message_id, delivery.message.priority) == (b"x", "m", 7)
    assert delivery.message.headers["a"] == 1
    await lines.until_ready(0)


@pytest.mark.every_version
@pytest.mark.parametrize("how", ["reject", "nack"])
async def test_a_rejected_delivery_is_counted_whatever_its_headers_say_and_a_nacked_one_only_before_4_3(
    lines: Lines, how: str
) -> None:
    seen: list[int | None] = []

    async def give_back_twice(delivery: Delivery) -> None:
        seen.append(delivery.times_delivered)
        await (getattr(delivery, how)() if len(seen) < 3 else delivery.ack())

    async with lines.at_work(give_back_twice):
        await lines.publish(b"x", headers={"x-delivery-count": 30} if how == "reject" else {})
        await until(lambda: len(seen) == 3)
    version = tuple(int(part) for part in lines.vhost.version.split(".")[:2])
    assert seen == ([1, 1, 1] if how == "nack" and version >= (4, 3) else [1, 2, 3])


@pytest.mark.oldest_version
async def test_a_queue_that_does_not_count_deliveries_reports_no_count_despite_a_clients_header(lines: Lines) -> None:
    channel = await lines.consuming.channel(confirms=False)
    await channel.queue_delete("some")
    await lines.declare({"x-queue-type": "classic"})
    seen: list[int | None] = []

    async def reject_once(delivery: Delivery) -> None:
        seen.append(delivery.times_delivered)
        await (delivery.reject() if len(seen) < 2 else delivery.ack())

    async with lines.at_work(reject_once, counted=False):
        await lines.publish(b"x", headers={"x-delivery-count": 0, "x-acquired-count": 1})
        await until(lambda: len(seen) == 2)
    assert seen == [1, None]


@pytest.mark.every_version
async def test_a_lost_connection_ends_the_work_and_unsettled_messages_are_delivered_again(lines: Lines) -> None:
    begun: list[tuple[bytes, bool]] = []
    ended: list[bytes] = []

    async def work(delivery: Delivery) -> None:
        begun.append((delivery.message.body, delivery.redelivered))
        if not delivery.redelivered:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append(delivery.message.body)
                with pytest.raises(ChannelLost):
                    await delivery.ack()
                raise
        await delivery.ack()

    async with lines.at_work(work):
        await lines.publish(b"1", b"2")
        await until(lambda: len(begun) == 2)
        await close_connection(lines.vhost, f"{lines.vhost.name} consume")
        await until(lambda: len(begun) == 4)
    assert sorted(begun) == [(b"1", False), (b"1", True), (b"2", False), (b"2", True)]
    assert sorted(ended) == [b"1", b"2"]
    assert lines.lost
    await lines.until_ready(0)


@pytest.mark.oldest_version
async def test_a_deleted_queue_is_consumed_again_when_it_is_back(lines: Lines) -> None:
    seen: list[bytes] = []

    async def ack(delivery: Delivery) -> None:
        seen.append(delivery.message.body)
        await delivery.ack()

    async with lines.at_work(ack) as deliveries:
        channel = await lines.publisher.connection.channel(confirms=False)
        await channel.queue_delete("some")
        await until(lambda: deliveries.trouble is not None and "no queue 'some'" in deliveries.trouble)
        assert "lanekeeper topology apply" in (deliveries.trouble or "")
        await lines.declare()
        await lines.publish(b"back")
        await until(lambda: seen == [b"back"])
    assert "cancelled the consumer" in str(lines.lost[0])


async def test_a_stop_takes_no_more_deliveries_and_lets_running_ones_end(lines: Lines) -> None:
    begun: list[bytes] = []
    go = asyncio.Event()

    async def work(delivery: Delivery) -> None:
        begun.append(delivery.message.body)
        await go.wait()
        await delivery.ack()

    await lines.publish(*(b"%d" % at for at in range(6)))
    async with lines.at_work(work, prefetch=2) as deliveries:
        await until(lambda: len(begun) == 2)
        await deliveries.stop()
        await lines.publish(b"late")
        go.set()
    assert len(begun) == 2
    await lines.until_ready(5)
    assert deliveries.trouble == "stopped"
    assert not lines.lost


async def test_a_stop_does_not_wait_for_a_missing_queue(lines: Lines) -> None:
    deliveries = Deliveries(lines.consuming, queue="not-there", prefetch=1)

    async def run() -> None:
        async for _ in deliveries.sessions():
            pytest.fail("there is no such queue")

    running = asyncio.create_task(run())
    await until(lambda: "not-there" in (deliveries.trouble or ""))
    await deliveries.stop()
    await asyncio.wait_for(running, 60)


async def test_deliveries_held_over_a_pause_and_later_ones_are_each_settled_once(lines: Lines) -> None:
    settled: list[bytes] = []
    go = asyncio.Event()

    async def work(delivery: Delivery) -> None:
        await go.wait()
        await delivery.ack()
        settled.append(delivery.message.body)

    bodies = [b"%d" % at for at in range(12)]
    async with lines.at_work(work, prefetch=4) as deliveries:
        await lines.publish(*bodies[:6])
        await lines.until_ready(2)
        await deliveries.pause("store: away")
        paused = deliveries.trouble
        assert paused == "paused: store: away"
        go.set()
        await until(lambda: len(settled) == 4)
        await lines.publish(*bodies[6:])
        await lines.until_ready(8)
        for _ in range(3):
            await deliveries.resume()
            await deliveries.pause("again")
        await deliveries.resume()
        assert deliveries.trouble is None
        await until(lambda: len(settled) == 12)
    assert sorted(settled) == sorted(bodies)
    assert not lines.lost, "the channel was kept"
    await lines.until_ready(0)


@pytest.mark.oldest_version
async def test_a_resized_consumer_keeps_what_is_in_hand_and_gets_as_many_as_its_new_prefetch(lines: Lines) -> None:
    held: list[Delivery] = []

    async def hold(delivery: Delivery) -> None:
        held.append(delivery)

    async def resize(prefetch: int) -> None:
        await deliveries.resize(prefetch)
        await deliveries.resized()

    bodies = [b"%02d" % at for at in range(20)]
    await lines.publish(*bodies)
    async with lines.at_work(hold, prefetch=2) as deliveries:
        await until(lambda: len(held) == 2)
        await resize(5)
        await until(lambda: len(held) == 2 + 5)
        while held:
            await held.pop().ack()
        await until(lambda: len(held) == 5)
        await deliveries.resize(1)
        for _ in range(5):
            await held.pop(0).ack()
        await lines.until_ready(8)
        await deliveries.pause("store: away")
        await deliveries.resized()
        await asyncio.sleep(0.2)
        assert not held, "it is paused"
        await deliveries.resume()
        await until(lambda: len(held) == 1)
        await asyncio.sleep(0.2)
        assert [each.message.body for each in held] == bodies[12:13]
    assert not lines.lost, "the channel was kept"
    await lines.until_ready(8)


async def test_a_lost_channel_is_opened_again_with_the_prefetch_that_was_asked_for_last(lines: Lines) -> None:
    held: list[Delivery] = []

    async def hold(delivery: Delivery) -> None:
        held.append(delivery)

    await lines.publish(*(b"%d" % at for at in range(6)))
    async with lines.at_work(hold, prefetch=1) as deliveries:
        await until(lambda: len(held) == 1)
        await deliveries.resize(3)
        await close_connection(lines.vhost, f"{lines.vhost.name} consume")
        await until(lambda: len(held) == 1 + 3)
        assert not deliveries.is_resizing
    await lines.until_ready(6)


async def test_after_a_connection_is_lost_during_a_pause_nothing_is_consumed_before_its_end(lines: Lines) -> None:
    seen: list[bytes] = []

    async def ack(delivery: Delivery) -> None:
        seen.append(delivery.message.body)
        await delivery.ack()

    async with lines.at_work(ack) as deliveries:
        await deliveries.pause("store: away")
        await close_connection(lines.vhost, f"{lines.vhost.name} consume")
        await until(lambda: lines.consuming.openings == 2)
        await lines.publish(b"1")
        await asyncio.sleep(0.2)
        assert not seen
        await deliveries.resume()
        await until(lambda: seen == [b"1"])


async def test_after_a_channel_error_a_new_channel_gets_the_unsettled_messages_again(lines: Lines) -> None:
    seen: list[bool] = []

    async def settle_twice_at_first(delivery: Delivery) -> None:
        seen.append(delivery.redelivered)
        if not delivery.redelivered:
            delivery.tag = 99  # a delivery tag that the broker does not know: 406 PRECONDITION_FAILED
        await delivery.ack()

    async with lines.at_work(settle_twice_at_first):
        await lines.publish(b"1")
        await until(lambda: seen == [False, True])
        await lines.until_ready(0)
    assert "PRECONDITION_FAILED" in str(lines.lost[0])
    assert lines.consuming.openings == 1, "the connection was kept"


async def test_a_stop_does_not_wait_for_a_missing_connection(lines: Lines) -> None:
    async with lines.at_work(lambda delivery: delivery.ack()) as deliveries:
        lines.vhost.api("DELETE", f"permissions/{lines.vhost.quoted}/{lines.vhost.user}")
        await (await lines.consuming.underlying()).close()
        await until(lambda: "not into virtual host" in (deliveries.trouble or "") or not lines.consuming.is_open)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
    assert loop.time() - began_s < 10


@pytest.mark.oldest_version
async def test_what_has_no_room_comes_when_there_is_some_and_others_are_delivered_meanwhile(lines: Lines) -> None:
    held, taken = HeldBytes(4000), list[Delivery]()

    async def hold(delivery: Delivery) -> None:
        taken.append(delivery)

    await lines.publish(*(b"%d" % at * 1000 for at in range(6)))
    async with lines.at_work(hold, prefetch=6, held=held) as deliveries:
        await until(lambda: len(taken) == 2 and deliveries.is_short_of_room)
        await asyncio.sleep(0.2)
        assert (len(taken), held.waiting, held.in_all) == (2, 4, 2000)
        began_s = asyncio.get_running_loop().time()
        for number in range(6):
            await until(lambda number=number: len(taken) > number)
            await taken[number].ack()
        assert asyncio.get_running_loop().time() - began_s < EXPECTED_FOR_S, "each uses the room that is kept for it"
        assert [each.message.body[:1] for each in taken] == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert max(each.times_delivered or 0 for each in taken) <= 2
    await lines.until_ready(0)
    assert held.in_all == held.waiting == 0


async def test_a_pause_and_a_lost_channel_leave_nothing_counted(lines: Lines) -> None:
    held, taken = HeldBytes(4000), list[Delivery]()

    async def hold(delivery: Delivery) -> None:
        taken.append(delivery)

    await lines.publish(*(b"%d" % at * 1000 for at in range(6)))
    async with lines.at_work(hold, prefetch=6, held=held) as deliveries:
        await until(lambda: held.waiting == 4)
        await deliveries.pause("test")
        assert (held.waiting, held.in_all) == (0, 2000)
        await lines.until_ready(4)
        await deliveries.resume()
        await until(lambda: held.waiting == 4)
        await close_connection(lines.vhost, f"{lines.vhost.name} consume")
        await until(lambda: lines.lost)
        await until(lambda: held.waiting == 4 and held.in_all == 2000)
    assert held.in_all == held.waiting == 0


async def test_a_delivery_that_is_settled_twice_costs_no_channel(lines: Lines) -> None:
    taken: list[bytes] = []

    async def settle_twice(delivery: Delivery) -> None:
        await delivery.ack()
        await delivery.reject()
        taken.append(delivery.message.body)

    await lines.publish(b"1", b"2")
    async with lines.at_work(settle_twice, prefetch=1):
        await until(lambda: len(taken) == 2)
        await lines.publish(b"3")
        await until(lambda: len(taken) == 3)
    assert not lines.lost
    await lines.until_ready(0)


async def test_a_body_that_is_too_large_is_dropped_at_once_whatever_is_held(lines: Lines) -> None:
    held, taken = HeldBytes(4000), list[Delivery]()

    async def hold(delivery: Delivery) -> None:
        taken.append(delivery)

    await lines.publish(b"x" * 2000, b"y" * 3000, b"z" * 9000)
    async with lines.at_work(hold, prefetch=6, held=held, most_bytes=2000):
        await until(lambda: len(taken) == 3)
        assert [(len(each.message.body), each.cut_bytes) for each in taken] == [(2000, 0), (0, 3000), (0, 9000)]
        for each in taken:
            await each.ack()
