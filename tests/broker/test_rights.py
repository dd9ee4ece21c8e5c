"""The exported users on a real broker: each may do what its role needs, and the broker refuses everything else, also by
the way of dead letters, and beyond its limits (threat T21). Whether a user may publish is checked without delivering a
message to anybody."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from itertools import product
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aio_pika.exceptions import AMQPError
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, TopologyMismatch
from tests.support.brokers import Vhost
from tests.support.defaults import LANES
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.users import HASH, PASSWORD, Act, Broker, imported_users
from tests.support.waiting import until
from topology.broker.admin import apply, check_write_rights, verify
from topology.broker.management import Management, discover
from topology.declaration import declare
from topology.delays import hop
from topology.export import User, definitions, rights
from topology.plan import compare


@pytest.fixture
async def broker_with_users(vhost: Vhost) -> AsyncIterator[Broker]:
    async with imported_users(vhost) as it:
        yield it


def publish(exchange: str, key: str = "", headers: dict[str, object] | None = None) -> Act:
    async def do(channel: AbstractChannel) -> None:
        message = aio_pika.Message(b"{}", delivery_mode=2, headers=headers)  # type: ignore[arg-type]
        to = await channel.get_exchange(exchange, ensure=False)
        await to.publish(message, key, mandatory=False, timeout=10)

    return Act(f"publish to {exchange or 'the default exchange'} with {key} {headers or ''}", do)


def get(queue: str) -> Act:
    async def do(channel: AbstractChannel) -> None:
        await (await channel.get_queue(queue, ensure=False)).get(no_ack=True, fail=False)

    return Act(f"get from {queue}", do)


def consume(queue: str) -> Act:
    async def ignore(message: AbstractIncomingMessage) -> None: ...

    async def do(channel: AbstractChannel) -> None:
        await (await channel.get_queue(queue, ensure=False)).consume(ignore, no_ack=True)

    return Act(f"consume {queue}", do)


def own_queue(bound_to: str | None = None, key: str = "#") -> Act:
    async def do(channel: AbstractChannel) -> None:
        own = await channel.declare_queue(exclusive=True)
        if bound_to is not None:
            await own.bind(bound_to, key)
        await own.get(fail=False)

    return Act(f"bind a queue of its own to {bound_to} with {key}", do)


async def unbind(channel: AbstractChannel, queue: str, exchange: str, key: str) -> None:
    await (await channel.get_queue(queue, ensure=False)).unbind(exchange, key)


async def purge(channel: AbstractChannel, queue: str) -> None:
    await (await channel.get_queue(queue, ensure=False)).purge()


def declare_queue(name: str) -> Act:
    arguments: dict[str, Any] = {"x-queue-type": "quorum"}
    return Act(f"declare {name}", lambda channel: channel.declare_queue(name, durable=True, arguments=arguments))


def declare_exchange(name: str) -> Act:
    return Act(
        f"declare exchange {name}",
        lambda channel: channel.declare_exchange(name, "topic", durable=True),
    )


def delete_queue(name: str) -> Act:
    return Act(f"delete {name}", lambda channel: channel.queue_delete(name))


@pytest.mark.oldest_version
async def test_after_an_import_with_users_there_is_no_difference(broker_with_users: Broker, vhost: Vhost) -> None:
    it = broker_with_users

    assert compare(it.topology, await it.management.topology()) == []
    # Without topic permissions everything is allowed, so check that they were imported.
    taken = vhost.api("GET", f"topic-permissions/{vhost.quoted}/{it.app}")
    assert [(each["exchange"], each["write"], each["read"]) for each in taken] == [
        ("lane.requests", r"^(normal|batch)\.{username}\.", "^$")
    ]


@pytest.mark.oldest_version
async def test_an_application_may_publish_to_its_lanes_under_its_own_name(broker_with_users: Broker) -> None:
    it = broker_with_users

    assert await it.may("application", publish("lane.requests", f"normal.{it.app}.chat"))
    assert await it.may("application", publish("lane.requests", f"batch.{it.app}.chat.more"))
    assert not await it.may("application", publish("lane.requests", f"critical.{it.app}.chat"))
    assert not await it.may("application", publish("lane.requests", "normal.somebody.chat"))
    assert not await it.may("application", publish("lane.requests", "nowhere"))
    assert await it.may("pager", publish("lane.requests", f"critical.{it.users['pager'].name}.alert"))
    assert not await it.may("pager", publish("lane.requests", f"normal.{it.users['pager'].name}.alert"))


@pytest.mark.oldest_version
async def test_an_application_is_answered_by_direct_reply_to_and_in_its_reply_queue(
    broker_with_users: Broker, vhost: Vhost
) -> None:
    it = broker_with_users
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    async with serving(vhost, declares=False):
        channel = await (await it.connection("application")).channel()
        for reply_to in ("amq.rabbitmq.reply-to", Names().reply_queue(it.app)):
            await (await channel.get_queue(reply_to, ensure=False)).consume(arrived.put, no_ack=True)
            message = aio_pika.Message(b'{"prompt": "x"}', reply_to=reply_to, delivery_mode=2)
            requests = await channel.get_exchange("lane.requests", ensure=False)
            await requests.publish(message, f"normal.{it.app}.x")
            reply = await asyncio.wait_for(arrived.get(), 60)
            assert reply.headers["x-lane-status"] == "ok"


NOT_FOR_APPLICATIONS = [
    *(publish(exchange, "critical.a.b") for exchange in ("lane.due", "lane.dead", "lane.events", "lane.fallen")),
    publish("lane.delay.00", "critical.a.b", {"lane-d00": False}),
    publish("lane.control", "cancel"),
    publish("lane.webhooks", "webhooks.normal"),
    get("lane.webhooks"),
    publish("", "lane.critical"),
    own_queue(),
    declare_queue("mine"),
    declare_queue("lane.critical"),
    declare_queue("lane.gold"),
    declare_queue("lane.reply.somebody"),
    get("lane.reply.somebody"),
    declare_exchange("mine"),
    declare_exchange("lane.old"),
    declare_exchange("amq.gen-mine"),
    *(get(queue) for queue in ("lane.normal", "lane.normal.due", "lane.dead", "lane.fallen", "lane.delay.00")),
    *(own_queue(exchange) for exchange in ("lane.requests", "lane.events", "lane.dead", "lane.due", "amq.topic")),
    delete_queue("lane.normal"),
    Act("purge lane.normal", lambda channel: purge(channel, "lane.normal")),
    Act("unbind lane.normal", lambda channel: unbind(channel, "lane.normal", "lane.requests", "normal.#")),
]


@pytest.mark.oldest_version
async def test_an_application_may_do_nothing_else(broker_with_users: Broker, vhost: Vhost) -> None:
    it = broker_with_users
    vhost.api("PUT", f"queues/{vhost.quoted}/lane.reply.somebody", {"durable": True})

    assert [act.what for act in NOT_FOR_APPLICATIONS if await it.may("application", act)] == []


@pytest.mark.oldest_version
async def test_a_copy_to_another_lane_by_cc_is_refused_from_4_0_on(broker_with_users: Broker) -> None:
    it = broker_with_users
    for header in ("CC", "BCC"):
        copied = publish("lane.requests", f"normal.{it.app}.chat", {header: [f"critical.{it.app}.chat"]})

        # 3.x does not refuse it (docs/contract.md); there the worker refuses CC, and nobody can see BCC.
        assert await it.may("application", copied) == it.version.startswith("3.")


@pytest.mark.oldest_version
async def test_a_client_may_also_cancel_and_fetch_results_and_nothing_else(
    broker_with_users: Broker, vhost: Vhost
) -> None:
    it = broker_with_users
    mine = f"critical.{it.users['client'].name}.chat"
    assert [key for key in ("cancel", "result") if not await it.may("client", publish("lane.control", key))] == []
    assert await it.may("client", publish("lane.requests", mine))

    vhost.api("PUT", f"queues/{vhost.quoted}/lane.reply.somebody", {"durable": True})
    forbidden = [act for act in NOT_FOR_APPLICATIONS if act.what != publish("lane.control", "cancel").what]

    assert not await it.may("client", publish("lane.control", "status"))
    assert [act.what for act in forbidden if await it.may("client", act)] == []


FOR_WORKERS = [
    *(consume(f"lane.{lane}{due}") for lane in ("critical", "normal", "batch") for due in ("", ".due")),
    consume("lane.fallen"),
    consume("lane.control"),
    publish("lane.requests", "normal.a.b"),  # of schedules
    publish("lane.delay.00", "normal.a.b", dict(hop(0, Names()).headers)),
    publish("lane.delay.28", "normal.a.b", {}),
    publish("lane.dead", "normal.a.b"),
    get("lane.dead"),
    publish("lane.webhooks", "webhooks.normal"),
    consume("lane.webhooks"),
    publish("lane.events", "normal.a.started.m1"),
    publish("", "some.reply.queue"),
    own_queue("lane.control", "status"),
]


NOT_FOR_WORKERS = [
    *(publish(exchange, "normal.a.b") for exchange in ("lane.due", "lane.fallen", "lane.control")),
    get("lane.delay.00"),
    *(own_queue(exchange) for exchange in ("lane.requests", "lane.events", "lane.delay.00")),
    declare_queue("lane.critical"),
    declare_queue("lane.gold"),
    declare_exchange("lane.old"),
    delete_queue("lane.normal"),
    Act("delete lane.requests", lambda channel: channel.exchange_delete("lane.requests")),
]


@pytest.mark.oldest_version
@pytest.mark.all_delay_levels
async def test_a_worker_may_do_its_work_and_nothing_else(broker_with_users: Broker) -> None:
    it = broker_with_users

    assert [act.what for act in FOR_WORKERS if not await it.may("worker", act)] == []
    assert [act.what for act in NOT_FOR_WORKERS if await it.may("worker", act)] == []


NOT_FOR_OPERATORS = [
    publish("lane.requests", "nowhere.somebody.chat"),
    publish("", "lane.critical"),
    get("lane.critical"),
    get("lane.webhooks"),
    own_queue("lane.requests"),
    declare_queue("lane.gold"),
    delete_queue("lane.dead"),
]


@pytest.mark.oldest_version
async def test_an_operator_may_publish_to_any_lane_cancel_watch_read_dead_letters_and_nothing_else(
    broker_with_users: Broker,
) -> None:
    it = broker_with_users

    assert await it.may("operator", publish("lane.requests", "critical.somebody.chat"))
    assert await it.may("operator", publish("lane.control", "cancel"))
    assert await it.may("operator", own_queue("lane.events"))
    assert await it.may("operator", get("lane.dead"))
    assert await it.may("operator", publish("lane.dead", "normal.a.b")), "dead letters that were exported"
    assert await it.may("operator", publish("lane.webhooks", "webhooks.normal")), "outcomes that were dead letters"
    assert compare(it.topology, await (await management_of(it, "operator")).topology()) == []
    assert [act.what for act in NOT_FOR_OPERATORS if await it.may("operator", act)] == []


@pytest.mark.oldest_version
async def test_a_deployer_may_apply_and_read_the_whole_topology(broker_with_users: Broker) -> None:
    it = broker_with_users
    connection = await it.connection("deployer")
    channel = await connection.channel()
    for queue in it.topology.queues:
        await channel.queue_delete(queue.name)
    for exchange in it.topology.exchanges:
        await channel.exchange_delete(exchange.name)

    await apply(it.topology, connection)

    verification = await verify(it.topology, await management_of(it, "deployer"), connection)
    assert (verification.seen, verification.differences) == ("everything", ())
    assert not await it.may("deployer", declare_queue("orders"))


@pytest.mark.oldest_version
async def test_a_worker_can_verify_the_objects_it_may_see(broker_with_users: Broker) -> None:
    it = broker_with_users
    connection = await it.connection("worker")

    verification = await verify(it.topology, None, connection)

    assert (verification.seen, verification.differences) == ("existence", ())
    hidden = it.version.startswith("4.3")  # without the import anyone could publish
    assert ("nor whether these exist, which the user has no rights to: lane.due" in str(verification.note)) == hidden
    assert len(str(verification.note)) < 500, "it names some, and counts the others"

    admin = await aio_pika.connect(it.url("deployer"))
    await (await admin.channel()).queue_delete("lane.batch.due")
    await admin.close()
    assert [each.line for each in (await verify(it.topology, None, connection)).missing] == [
        "queue lane.batch.due is missing"
    ]


@pytest.mark.oldest_version
async def test_a_worker_has_no_access_to_the_management_api(broker_with_users: Broker) -> None:
    with pytest.raises(AccessRefused, match="needs the tag `management`"):
        await (await management_of(broker_with_users, "worker")).topology()


async def management_of(it: Broker, role: str) -> Management:
    found = await discover(it.url(role), it.management.url)
    assert found is not None
    return found


ESCAPE: dict[str, Any] = {
    "x-dead-letter-exchange": "lane.requests",
    "x-dead-letter-routing-key": "critical.finance.report",
    "x-message-ttl": 0,
}
NAMES = ("", "amq.gen-mine", "mine", "{own}", "{own}.more")
STREAMED = b'{"prompt": "one two three four five six seven eight nine ten"}'


@pytest.mark.oldest_version
@pytest.mark.parametrize("role", ["application", "client"])
async def test_an_application_cannot_publish_to_another_lane_by_dead_lettering(
    role: str, broker_with_users: Broker, vhost: Vhost
) -> None:
    it = broker_with_users
    async with serving(vhost, declares=False) as worker, requester(vhost) as admin:
        await admin.read_dead()
        channel = await (await it.connection(role)).channel()
        try:
            queue = (await channel.declare_queue(exclusive=True, arguments=ESCAPE)).name
        except ChannelAccessRefused:
            queue = None
        if queue is not None:
            lane = it.users[role].lanes[0]
            message = aio_pika.Message(STREAMED, reply_to=queue, headers={"x-lane-stream": True}, message_id="streamed")
            requests = await channel.get_exchange("lane.requests", ensure=False)
            await requests.publish(message, f"{lane}.{it.users[role].name}.chat")
            await until(lambda: admin.dead)

        forged = [each for each in admin.dead if each.headers["x-lane-routing-key"] == "critical.finance.report"]
        assert (queue, len(forged), len(worker.api.calls)) == (None, 0, 0)


@pytest.mark.oldest_version
@pytest.mark.parametrize("queue", ["lane.batches", "lane.tickets"])
async def test_a_worker_has_the_rights_to_keep_what_does_not_belong_into_a_queue(queue: str, vhost: Vhost) -> None:
    topology = declare(LANES, names=Names(), broker_version=vhost.version)
    async with serving(vhost), requester(vhost) as admin:
        await admin.read_dead()
        vhost.api(
            "PUT", f"permissions/{vhost.quoted}/{vhost.user}", asdict(rights(User("w", "worker", HASH), topology))
        )
        await admin.publish({"prompt": "stray"}, exchange="", key=queue, message_id="stray-1", reply_to=None)
        letter = await admin.buried("stray-1")
        assert letter.headers["x-lane-dead-code"] == "internal"
        await until(lambda: admin.holds(0, queue, "lane.fallen"))


@pytest.mark.oldest_version
async def test_an_application_cannot_declare_a_queue_of_any_name(broker_with_users: Broker) -> None:
    it = broker_with_users
    declared: list[str] = []
    for role, arguments, name in product(("application", "client"), ({}, ESCAPE), NAMES):
        queue = name.format(own=f"lane.reply.{it.users[role].name}")
        if await it.may(role, declaring(queue, arguments)):
            declared.append(f"{role}: {name!r} {arguments}")

    assert declared == []


def declaring(queue: str, arguments: dict[str, Any]) -> Act:
    return Act(
        f"declare {queue}",
        lambda channel: channel.declare_queue(queue, durable=bool(queue), arguments=arguments),
    )


@pytest.fixture
async def connection(vhost: Vhost) -> AsyncIterator[Connection]:
    async with Connection(vhost.amqp_url, name="rights") as connection:
        yield connection


@pytest.mark.oldest_version
async def test_the_check_of_the_right_to_publish_delivers_nothing(connection: Connection) -> None:
    channel = await connection.channel(confirms=True)
    queue = (await channel.queue_declare("", exclusive=True)).queue or ""
    await channel.queue_bind(queue, "amq.topic", "#")
    await check_write_rights(connection, (("", queue), ("amq.topic", "some.key")))
    await channel.basic_publish(b"after", exchange="amq.topic", routing_key="after")
    found = (await channel.queue_declare(queue, passive=True)).message_count
    assert found == 1, "that which was published after it"


@pytest.mark.oldest_version
@pytest.mark.parametrize("exchange", ["", "amq.topic"])
async def test_a_missing_right_is_reported_each_time(connection: Connection, vhost: Vhost, exchange: str) -> None:
    allowed = {"": "^amq.topic$", "amq.topic": "^amq.default$"}[exchange]
    vhost.api("PUT", f"permissions/{vhost.quoted}/{vhost.user}", {"configure": "", "write": allowed, "read": ""})
    for _ in range(20):
        with pytest.raises(AccessRefused, match=exchange or "amq.default"):
            await check_write_rights(connection, (("", "some"), ("amq.topic", "some")))


@pytest.mark.oldest_version
async def test_a_missing_exchange_is_reported_with_the_command_that_declares_it(connection: Connection) -> None:
    with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
        await check_write_rights(connection, (("not-there", "some"),))


CONNECTIONS, CHANNELS = 2, 3


@pytest.fixture
async def url(vhost: Vhost) -> AsyncIterator[str]:
    """The URL of an application that may have only few connections and channels."""
    name = f"app-{secrets.token_hex(4)}"
    topology = declare(LANES, names=Names(), broker_version=vhost.version)
    user = User(name, "application", HASH, connections=CONNECTIONS, channels=CHANNELS)
    vhost.api("POST", "definitions", definitions(topology, vhost.name, [user]))
    yield str(URL(vhost.amqp_url).with_user(name).with_password(PASSWORD))
    vhost.api("DELETE", f"users/{name}")


async def refused(opening: object) -> bool:
    try:
        await opening  # type: ignore[misc]
    except (AMQPError, ConnectionError, RuntimeError):
        return True
    return False


@pytest.mark.every_version
async def test_connections_and_channels_above_the_users_limits_are_refused(url: str) -> None:
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(CONNECTIONS):
            made.append(await aio_pika.connect(url))
            stack.push_async_callback(_closed, made[-1])
        await until(lambda: refused(_connected(url)))  # the broker counts a moment after it has let somebody in
        for _ in range(CHANNELS):
            await made[0].channel()
        await until(lambda: refused(_with_a_channel(made[1])))


async def _connected(url: str) -> None:
    await (await aio_pika.connect(url)).close()


async def _with_a_channel(connection: aio_pika.abc.AbstractConnection) -> None:
    await (await connection.channel()).close()


async def _closed(connection: aio_pika.abc.AbstractConnection) -> None:
    with suppress(AMQPError, ConnectionError, RuntimeError):
        await connection.close()


@pytest.mark.every_version
def test_workers_have_no_such_limits() -> None:
    topology = declare(LANES, names=Names(), broker_version="4.3.6")
    users = definitions(topology, "/", [User("w", "worker", HASH), User("a", "client", HASH)])["users"]
    assert [each.get("limits") for each in users] == [None, {"max-connections": 200, "max-channels": 2000}]
