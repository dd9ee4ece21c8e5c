"""Publishing to a real broker: a message counts as published only after its confirm."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic
from yarl import URL

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import PROBE_WITHIN_S, Publisher
from lanekeeper.amqp.replies import DirectReplies
from lanekeeper.amqp.tolerant import message_of
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerError,
    BrokerUnreachable,
    ConfirmUnknown,
    InvalidArgument,
    MessageTooLarge,
    PublishRefused,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.telemetry.tracing import Tracing
from tests.faults.proxy import LOOPBACK, Proxy
from tests.support.brokers import Vhost, close_connection
from tests.support.waiting import until
from topology.lanes import MIB

LARGEST = {3: 128 * MIB, 4: 16 * MIB}
"""The broker's default limit for the size of a message, by major version."""
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture
async def publisher(vhost: Vhost) -> AsyncIterator[Publisher]:
    async with Connection(vhost.amqp_url, name=vhost.name) as connection:
        yield Publisher(connection, tracing=Tracing())


async def declare(publisher: Publisher, queue: str, **arguments: Any) -> None:
    channel = await publisher.connection.channel(confirms=False)
    await channel.queue_declare(queue, durable=True, arguments={**QUORUM, **arguments})
    await channel.close()


async def waiting(publisher: Publisher, queue: str, *, least: int = 1) -> int:
    """The number of ready messages, as soon as there are at least so many: the broker may count them a moment later."""

    async def ready() -> int:
        found = (await depths(publisher.connection, [queue]))[queue].ready
        return found if found >= least else 0

    return int(await until(ready))


async def fill(publish: Callable[..., Awaitable[None]]) -> None:
    """Publish to the queue `full` until it refuses; its limit is not exact."""
    for _ in range(50):
        await publish(Message(body=b""), exchange="", routing_key="full")


@pytest.mark.oldest_version
async def test_a_message_without_a_queue_is_unroutable(publisher: Publisher) -> None:
    with pytest.raises(Unroutable, match="'nobody'"):
        await publisher.publish(Message(body=b"", message_id="m"), exchange="", routing_key="nobody")
    await publisher.publish(Message(body=b""), exchange="", routing_key="nobody", mandatory=False)


@pytest.mark.every_version
async def test_a_full_queue_refuses_a_publish(publisher: Publisher) -> None:
    await declare(publisher, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    with pytest.raises(PublishRefused, match="refused 'full'"):
        await fill(publisher.publish)


async def test_a_refused_publish_is_retried_within_the_time_limit(publisher: Publisher) -> None:
    await declare(publisher, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(PublishRefused):
        await fill(partial(publisher.publish_surely, refused_within_s=0.3))
    assert loop.time() - began_s > 0.04  # at least one pause; a pause that would end too late is not begun
    assert loop.time() - began_s < 20


@pytest.mark.oldest_version
async def test_a_missing_exchange_is_reported_with_the_command_that_declares_it(publisher: Publisher) -> None:
    with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
        await publisher.publish(Message(body=b""), exchange="not-there", routing_key="k")
    await declare(publisher, "some")
    await publisher.publish(Message(body=b""), exchange="", routing_key="some")  # on a new channel


@pytest.mark.oldest_version
async def test_a_missing_right_is_reported(publisher: Publisher, vhost: Vhost) -> None:
    rights = {"configure": ".*", "write": "^some$", "read": ".*"}
    vhost.api("PUT", f"permissions/{vhost.quoted}/{vhost.user}", rights)
    with pytest.raises(AccessRefused):
        await publisher.publish_surely(Message(body=b""), exchange="amq.topic", routing_key="k", within_s=60)


async def test_publishes_in_progress_succeed_although_another_was_refused(publisher: Publisher, vhost: Vhost) -> None:
    await declare(publisher, "some")
    rights = {"configure": ".*", "write": "^(amq.default|some)$", "read": ".*"}
    vhost.api("PUT", f"permissions/{vhost.quoted}/{vhost.user}", rights)
    found = await asyncio.gather(
        *(
            publisher.publish_surely(Message(body=b""), exchange="amq.topic" if at == 5 else "", routing_key="some")
            for at in range(30)
        ),
        return_exceptions=True,
    )
    assert isinstance(found.pop(5), AccessRefused)
    assert found == [None] * 29


async def test_a_missing_connection_is_reported_within_the_time_limit(publisher: Publisher, vhost: Vhost) -> None:
    vhost.api("DELETE", f"permissions/{vhost.quoted}/{vhost.user}")
    await (await publisher.connection.underlying()).close()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    found = await asyncio.gather(
        *(publisher.publish(Message(body=b""), exchange="", routing_key="k", timeout_s=0.3) for _ in range(100)),
        return_exceptions=True,
    )
    assert {type(each) for each in found} == {BrokerUnreachable}
    assert loop.time() - began_s < 15, "they wait one after the other"


async def test_a_broker_that_opens_no_channel_is_reported_within_the_time_limit(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*, confirms: bool, timeout_s: float) -> Channel:
        await asyncio.sleep(timeout_s)
        raise BrokerUnreachable("silent")

    monkeypatch.setattr(publisher.connection, "channel", silent)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    found = await asyncio.gather(
        *(publisher.publish(Message(body=b""), exchange="", routing_key="k", timeout_s=0.3) for _ in range(100)),
        return_exceptions=True,
    )
    assert {type(each) for each in found} == {BrokerUnreachable}
    assert loop.time() - began_s < 15, "they wait one after the other"


async def test_after_a_closed_connection_publishes_in_progress_are_unknown_and_confirmed_ones_are_kept(
    publisher: Publisher, vhost: Vhost
) -> None:
    await declare(publisher, "some")
    confirmed = 0
    failed: list[Any] = []

    async def publish_on() -> None:
        nonlocal confirmed
        while not failed:
            try:
                await publisher.publish(Message(body=b"x" * 5000), exchange="", routing_key="some", timeout_s=5)
                confirmed += 1
            except BrokerError as error:
                failed.append(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(publish_on())
        await close_connection(vhost, vhost.name)
    assert any(isinstance(error, ConfirmUnknown) for error in failed)
    assert {type(error) for error in failed} <= {ConfirmUnknown, BrokerUnreachable}
    assert await waiting(publisher, "some", least=confirmed) >= confirmed > 0


async def test_written_messages_are_on_their_way_together_and_arrive_in_their_order(publisher: Publisher) -> None:
    await declare(publisher, "some")
    written = [Message(body=b"%d" % number) for number in range(100)]
    answers = [await publisher.write(each, exchange="", routing_key="some") for each in written]
    assert await asyncio.gather(*answers) == [None] * 100
    channel = await publisher.connection.channel(confirms=False)
    got = [(await channel.basic_get("some", no_ack=True)).body for _ in written]
    assert got == [each.body for each in written]


async def test_a_written_message_whose_channel_is_lost_gets_an_error(publisher: Publisher) -> None:
    await declare(publisher, "some")
    answers = [await publisher.write(Message(body=b""), exchange=each, routing_key="some") for each in ("", "nowhere")]
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(found[1], Exception)
    await publisher.publish(Message(body=b""), exchange="", routing_key="some")  # on a new channel


async def test_publish_surely_survives_a_lost_connection(publisher: Publisher, vhost: Vhost) -> None:
    await declare(publisher, "some")
    done = asyncio.Event()
    published = 0

    async def publish_on() -> None:
        nonlocal published
        while not done.is_set():
            await publisher.publish_surely(Message(body=b"x"), exchange="", routing_key="some")
            published += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(publish_on())
        loss = publisher.connection.loss  # taken now: it may have reconnected when the management API answers
        await close_connection(vhost, vhost.name)
        await loss
        before = published
        await publisher.connection.underlying()
        await until(lambda: published > before + 20)
        done.set()
    assert await waiting(publisher, "some", least=published) >= published


@pytest.fixture
def first_hangs(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Channel], asyncio.Event]:
    """The channels that are opened, of which the first publishes nothing until the event. RabbitMQ's channel hangs when
    it waits for the leader of a queue (tests/faults/test_cluster.py)."""
    monkeypatch.setattr("lanekeeper.amqp.publisher.HANGS_AFTER_S", 0.1)
    opened: list[Channel] = []
    goes_on = asyncio.Event()
    open_channel = publisher.connection.channel

    async def opens(**how: Any) -> Channel:
        channel = await open_channel(**how)
        if not how["confirms"]:
            return channel
        opened.append(channel)
        if len(opened) == 1:
            publishes = channel.basic_publish

            async def publishes_later(*message: Any, **how: Any) -> Any:
                await goes_on.wait()
                return await publishes(*message, **how)

            monkeypatch.setattr(channel, "basic_publish", publishes_later)
        return channel

    monkeypatch.setattr(publisher.connection, "channel", opens)
    return opened, goes_on


async def test_a_channel_that_answers_nothing_is_left_for_another_and_closed_once_it_has_answered(
    publisher: Publisher, first_hangs: tuple[list[Channel], asyncio.Event]
) -> None:
    opened, goes_on = first_hangs
    await declare(publisher, "some")
    publish = partial(publisher.publish, exchange="", routing_key="some")
    hanging = asyncio.create_task(publish(Message(body=b"", message_id="m")))
    await until(lambda: publisher._confirming is not None and publisher._confirming.hangs)
    await publish(Message(body=b"", message_id="m"))
    await publish(Message(body=b""))
    assert [each.is_closed for each in opened] == [False, False]
    goes_on.set()
    await hanging
    await until(lambda: [each.is_closed for each in opened] == [True, False])


async def test_the_replies_to_what_a_channel_published_before_it_hung_still_come_over_it(
    publisher: Publisher, first_hangs: tuple[list[Channel], asyncio.Event]
) -> None:
    opened, goes_on = first_hangs
    direct = DirectReplies()
    asking = Publisher(publisher.connection, tracing=Tracing(), on_channel=direct.consume)
    await declare(publisher, "some")
    messages = [Message(body=b"first"), Message(body=b"second")]
    with direct.expecting(messages[0]) as first, direct.expecting(messages[1]) as second:
        publish = partial(asking.publish, exchange="", routing_key="some")
        hanging = asyncio.create_task(publish(messages[0]))
        await until(lambda: asking._confirming is not None and asking._confirming.hangs)
        await publish(messages[1])
        goes_on.set()
        await hanging
        channel = await publisher.connection.channel(confirms=False)

        async def answer(came: DeliveredMessage) -> None:
            asked = message_of(came)
            properties = Basic.Properties(correlation_id=asked.correlation_id)
            await channel.basic_publish(asked.body, routing_key=asked.reply_to or "", properties=properties)

        await channel.basic_consume("some", answer, no_ack=True)
        end = asyncio.get_running_loop().time() + 10
        assert [(await each.next(end=end)).body for each in (first, second)] == [b"first", b"second"]
    assert [each.is_closed for each in opened] == [False, False]


async def test_after_a_cancelled_publish_the_next_with_the_same_id_succeeds(publisher: Publisher) -> None:
    await declare(publisher, "some")
    tasks = [
        asyncio.create_task(publisher.publish(Message(body=b"", message_id="m"), exchange="", routing_key="some"))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [True, True, False]
    assert found[2] is None
    assert publisher._confirming is not None
    assert not publisher._confirming._mandatory


@pytest.mark.every_version
async def test_a_return_is_never_taken_for_that_of_a_later_message_with_the_same_id(publisher: Publisher) -> None:
    """The publisher of the earlier one did not wait for it."""
    await declare(publisher, "some")
    for number in range(50):
        earlier = Message(body=b"earlier", message_id=f"m-{number}")
        leaving = asyncio.create_task(publisher.publish(earlier, exchange="", routing_key="nowhere"))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        leaving.cancel()
        await publisher.publish(
            Message(body=b"later", message_id=f"m-{number}"), exchange="", routing_key="some", mandatory=number % 2 == 0
        )
        with pytest.raises(Unroutable):
            await publisher.publish(earlier, exchange="", routing_key="nowhere")
        await asyncio.gather(leaving, return_exceptions=True)
    assert await waiting(publisher, "some", least=50) == 50


@pytest.mark.every_version
@pytest.mark.parametrize("size", [100, 20_000])
async def test_a_publish_that_closes_its_channel_costs_no_connection_whatever_is_on_its_way(
    publisher: Publisher, size: int
) -> None:
    await declare(publisher, "some")
    other = await publisher.connection.channel(confirms=False)

    async def publish(number: int) -> None:
        exchange = "not-there" if number == 150 else ""
        await publisher.publish(Message(body=bytes(size)), exchange=exchange, routing_key="some")

    for _ in range(3):
        found = await asyncio.gather(*(publish(number) for number in range(400)), return_exceptions=True)
        assert isinstance(found.pop(150), TopologyMismatch)
        assert {type(each) for each in found} <= {type(None), ConfirmUnknown}
    assert (publisher.connection.openings, other.is_closed) == (1, False)


@pytest.mark.oldest_version
async def test_a_publish_to_an_exchange_named_as_the_virtual_host_is_not_blamed_for_anothers(
    publisher: Publisher, vhost: Vhost
) -> None:
    channel = await publisher.connection.channel(confirms=False)
    await channel.exchange_declare(vhost.name, exchange_type="fanout")
    exchanges = [vhost.name] * 20 + ["not-there"] + [vhost.name] * 20
    found = await asyncio.gather(
        *(publisher.publish(Message(body=b""), exchange=each, routing_key="k", mandatory=False) for each in exchanges),
        return_exceptions=True,
    )
    assert [number for number, each in enumerate(found) if isinstance(each, TopologyMismatch)] == [20]


@pytest.mark.oldest_version
@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": {"CC": 5}},
        {"headers": {"BCC": "some"}},
        {"headers": {"x" * 256: 1}},
        {"headers": {"big": "y" * 131_072}},
        {"expiration": "soon"},
        {"expiration": str(2**32)},
        {"correlation_id": "é" * 128},
    ],
    ids=str,
)
async def test_what_the_broker_would_close_a_channel_for_is_not_sent(publisher: Publisher, wrong: Any) -> None:
    await declare(publisher, "some")
    properties = [wrong if number == 5 else {} for number in range(20)]
    found = await asyncio.gather(
        *(publisher.publish(Message(body=b"", **each), exchange="", routing_key="some") for each in properties),
        return_exceptions=True,
    )
    assert isinstance(found.pop(5), InvalidArgument)
    assert found == [None] * 19
    assert publisher.connection.openings == 1


async def test_an_error_that_the_caller_does_not_want_retried_is_raised_at_once(publisher: Publisher) -> None:
    asked: list[None] = []
    telling = Publisher(publisher.connection, tracing=Tracing(), on_missing=lambda: asked.append(None))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(TopologyMismatch) as error:
        await telling.publish_surely(
            Message(body=b""), exchange="not-there", routing_key="k", gives_up_on=(TopologyMismatch,)
        )
    assert loop.time() - began_s < 10
    assert not error.value.maybe_published
    assert asked, "somebody may look what else is missing"


@pytest.mark.every_version
async def test_a_message_too_large_for_the_broker_is_not_sent_and_the_connection_stays_open(
    publisher: Publisher,
) -> None:
    """Other tasks publish on the connection meanwhile."""
    await declare(publisher, "some")
    largest = LARGEST[int(publisher.connection.version.split(".")[0])]
    opened, loss = publisher.connection.openings, publisher.connection.loss

    async def publish(size: int) -> None:
        await publisher.publish_surely(Message(body=bytes(size)), exchange="", routing_key="some")

    too_large = [publish(largest + 1) for _ in range(3)]
    came_to = await asyncio.gather(*too_large, *(publish(10) for _ in range(50)), return_exceptions=True)
    refused, others = came_to[:3], came_to[3:]
    assert all(isinstance(each, MessageTooLarge) for each in refused)
    assert {(each.size, each.limit) for each in refused if isinstance(each, MessageTooLarge)} == {
        (largest + 1, largest)
    }
    assert others == [None] * 50
    assert await publisher.exceeded_limit(largest + 1) == largest
    assert await publisher.exceeded_limit(largest) is None
    assert (publisher.connection.openings, loss.done()) == (opened, False)
    await until(lambda: waiting(publisher, "some"))


@pytest.mark.oldest_version
async def test_a_user_without_any_rights_can_find_out_the_brokers_limit(vhost: Vhost) -> None:
    name = f"{vhost.name}-none"
    vhost.api("PUT", f"users/{name}", {"password": "none", "tags": ""})
    try:
        vhost.api("PUT", f"permissions/{vhost.quoted}/{name}", {"configure": "^$", "write": "^$", "read": "^$"})
        url = vhost.amqp_url.replace(f"{vhost.user}:{vhost.password}@", f"{name}:none@")
        async with Connection(url, name=vhost.name) as connection:
            publisher = Publisher(connection, tracing=Tracing())
            assert await publisher.exceeded_limit(16 * MIB) is None
            found = await until(lambda: publisher.exceeded_limit(200 * MIB))  # None while it cannot be found out
            assert found == LARGEST[int(connection.version.split(".")[0])]
    finally:
        vhost.api("DELETE", f"users/{name}")


async def test_after_a_failed_look_for_the_brokers_limit_large_publishes_do_not_wait_for_one_each(vhost: Vhost) -> None:
    """The broker takes new connections, and says nothing on them."""
    parts = URL(vhost.amqp_url)
    async with (
        Proxy(str(parts.host), parts.port or 5672) as line,
        Connection(str(parts.with_host(LOOPBACK).with_port(line.port)), name=vhost.name) as connection,
    ):
        publisher = Publisher(connection, tracing=Tracing())
        before = line.connected
        line.freeze()
        large, began_s = Message(body=bytes(2 * MIB)), time.monotonic()
        publishes = (publisher.publish(large, exchange="", routing_key="nobody") for _ in range(20))
        ended = await asyncio.gather(*publishes, return_exceptions=True)
        assert {type(each) for each in ended} == {BrokerUnreachable}
        assert line.connected - before == 1
        assert time.monotonic() - began_s < 2 * PROBE_WITHIN_S
        await line.mend()

        async def is_found() -> bool:
            with suppress(BrokerUnreachable):
                await publisher.publish(large, exchange="", routing_key="nobody", mandatory=False)
                return True
            return False

        await until(is_found, within_s=60)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_channel_on_which_replies_cannot_be_received_is_closed(vhost: Vhost, is_cancelled: bool) -> None:
    channels: list[Channel] = []

    async def fails(channel: Channel) -> None:
        channels.append(channel)
        if is_cancelled:
            await asyncio.Event().wait()
        raise BrokerUnreachable("no replies")

    async with Connection(vhost.amqp_url, name=vhost.name) as connection:
        publisher = Publisher(connection, tracing=Tracing(), on_channel=fails)
        publishing = asyncio.create_task(publisher.publish(Message(body=b"{}"), exchange="", routing_key="some"))
        await until(lambda: bool(channels))
        if is_cancelled:
            publishing.cancel()
        await asyncio.wait_for(asyncio.gather(publishing, return_exceptions=True), 30)
        assert [channel.is_closed for channel in channels] == [True]
