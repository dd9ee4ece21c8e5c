"""The topology on a real broker: applied completely, repeatedly, concurrently, and never over different objects;
imported, it is the same; verified completely with the management API, and without it only that the objects exist;
watched for deleted objects; and delays that end on time in the right lane."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage
from aiohttp import web
from structlog.testing import capture_logs
from yarl import URL

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, TopologyMismatch
from lanekeeper.telemetry import signals
from tests.support.brokers import Vhost, close_connection
from tests.support.defaults import LANES
from tests.support.waiting import until
from tests.support.web_server import web_server
from topology.broker import admin as watching
from topology.broker import management as management_module
from topology.broker.admin import TopologyWatch, apply, verify
from topology.broker.management import Management, discover
from topology.declaration import Binding, Exchange, Queue, Topology, declare
from topology.delays import hop
from topology.lanes import BATCH, CRITICAL, NORMAL
from topology.plan import compare


async def lines(declared: Topology, management: Management) -> list[str]:
    return [each.line for each in compare(declared, await management.topology())]


@pytest.mark.all_delay_levels
@pytest.mark.every_version
async def test_on_an_empty_virtual_host_everything_is_declared(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)

    assert await lines(declared, management) == []


async def test_applying_again_changes_nothing(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)
    await apply(declared, connection)

    assert await lines(declared, management) == []


@pytest.mark.every_version
async def test_several_processes_may_apply_at_the_same_time(
    declared: Topology, vhost: Vhost, management: Management
) -> None:
    connections = [await aio_pika.connect(vhost.amqp_url) for _ in range(4)]

    await asyncio.gather(*(apply(declared, each) for each in connections))

    assert await lines(declared, management) == []
    await asyncio.gather(*(each.close() for each in connections))


async def test_two_installations_share_a_virtual_host(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    other = declare(LANES, names=Names("acme"), broker_version=declared.broker_version)

    await apply(declared, connection)
    await apply(other, connection)

    assert await lines(declared, management) == []
    assert await lines(other, management) == []


@pytest.mark.every_version
async def test_a_queue_with_another_argument_is_named_and_not_changed(
    vhost: Vhost, declared: Topology, connection: AbstractConnection
) -> None:
    await apply(declared, connection)
    channel = await connection.channel()
    requests = await channel.get_exchange("lane.requests", ensure=False)
    await requests.publish(aio_pika.Message(b"kept"), "critical.a.b")
    lanes = (replace(CRITICAL, max_length=7), NORMAL, BATCH)

    with pytest.raises(TopologyMismatch) as raised:
        await apply(declare(lanes, names=Names(), broker_version=declared.broker_version), connection)

    text = str(raised.value)
    assert text.startswith(
        f"queue lane.critical in vhost {vhost.name} exists with another x-max-length: wanted 7, found 10000."
    )
    assert "`lanekeeper topology plan`" in text
    assert f"rabbitmqctl -p '{vhost.name}' delete_queue 'lane.critical'" in text
    critical = await (await connection.channel()).get_queue("lane.critical", ensure=False)
    message = await critical.get()
    assert message.body == b"kept"


@pytest.mark.parametrize(("exchanges", "number"), [(1, -1), (0, 0)])
async def test_nothing_is_declared_if_one_queue_has_another_argument(
    declared: Topology, connection: AbstractConnection, management: Management, exchanges: int, number: int
) -> None:
    one = declared.queues[number]
    other = replace(one, arguments={**one.arguments, "x-max-length": 9})
    await apply(Topology(exchanges=declared.exchanges[:exchanges], queues=(other,)), connection)
    before = await management.topology()

    with pytest.raises(TopologyMismatch, match=one.name):
        await apply(declared, connection)

    assert await management.topology() == before


@pytest.mark.oldest_version
@pytest.mark.parametrize(
    ("there", "text"),
    [
        (
            Exchange("lane.dead", "direct"),
            "exchange lane.dead in vhost {} exists with another type: wanted topic, found",
        ),
        (
            Exchange("lane.due", "topic"),
            "exchange lane.due in vhost {} exists with another internal: wanted true, found",
        ),
        (Exchange("lane.requests", "topic"), "another alternate-exchange: wanted lane.fallen, found nothing"),
        (Queue("lane.dead", {"x-queue-type": "classic"}), "another x-queue-type: wanted quorum, found classic"),
        (Queue("lane.dead", {"x-queue-type": "quorum", "x-max-length": 9}), "x-max-length: wanted nothing, found 9"),
    ],
    ids=["exchange type", "internal", "alternate exchange", "queue type", "limit"],
)
async def test_a_property_that_the_broker_compares_is_refused_by_name(
    vhost: Vhost, declared: Topology, connection: AbstractConnection, there: Exchange | Queue, text: str
) -> None:
    other = Topology(queues=(there,)) if isinstance(there, Queue) else Topology(exchanges=(there,))
    await apply(other, connection)

    with pytest.raises(TopologyMismatch) as raised:
        await apply(declared, connection)

    assert text.format(vhost.name) in str(raised.value)


@pytest.mark.oldest_version
async def test_a_name_exclusively_used_by_another_client_is_reported(
    declared: Topology, connection: AbstractConnection, vhost: Vhost
) -> None:
    other = await aio_pika.connect(vhost.amqp_url)
    await (await other.channel()).declare_queue("lane.dead", exclusive=True)

    with pytest.raises(TopologyMismatch, match="an exclusive queue of another client"):
        await apply(declared, connection)
    await other.close()


@pytest.mark.oldest_version
async def test_a_policy_that_would_remove_messages_is_named(
    declared: Topology, connection: AbstractConnection, management: Management, vhost: Vhost
) -> None:
    await apply(declared, connection)

    policy = {"pattern": r"^lane\.dead$", "definition": {"message-ttl": 60_000}, "apply-to": "queues"}
    vhost.api("PUT", f"policies/{vhost.quoted}/trim", policy)

    for _ in range(120):
        if found := await lines(declared, management):
            break
        await asyncio.sleep(0.5)  # the API shows a policy's effect only after its next update, every 5 s
    assert found == ["queue lane.dead: policy message-ttl is 60000, declared is not set"]


@pytest.mark.all_delay_levels
@pytest.mark.every_version
async def test_with_the_management_api_every_difference_is_found(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)
    await apply(Topology(bindings=(Binding("lane.requests", "lane.dead", routing_key="#"),)), connection)

    found = await verify(declared, management, connection)

    assert (found.seen, found.note) == ("everything", None)
    assert [each.change for each in found.differences] == ["extra"]
    assert found.missing == ()


@pytest.mark.oldest_version
async def test_without_the_management_api_missing_objects_are_found_and_the_limits_are_stated(
    declared: Topology, connection: AbstractConnection
) -> None:
    await apply(declared, connection)
    channel = await connection.channel()
    await channel.queue_delete("lane.delay.11")
    await channel.exchange_delete("lane.events")

    found = await verify(declared, None, connection)

    assert found.seen == "existence"
    assert [each.line for each in found.missing] == [
        "exchange lane.events is missing",
        "queue lane.delay.11 is missing",
    ]
    assert str(found.note) == (
        "no management API was found, so that arguments and bindings could not be seen; "
        "set LANEKEEPER_MANAGEMENT_URL, with a user that has the tag `management`"
    )


async def test_an_api_that_does_not_answer_is_reported(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)
    silent = replace(management, url="http://127.0.0.1:9")

    found = await verify(declared, silent, connection)

    assert (found.seen, found.differences) == ("existence", ())
    assert "no management API at http://127.0.0.1:9" in str(found.note)


async def test_the_api_of_another_broker_is_not_used(
    declared: Topology, connection: AbstractConnection, management: Management
) -> None:
    await apply(declared, connection)

    async def other(request: web.BaseRequest) -> web.Response:
        return web.json_response({"rabbitmq_version": "4.3.6", "cluster_name": "rabbit@elsewhere"})

    async with web_server(other) as url:
        found = await verify(declared, replace(management, url=url), connection)
        assert await discover("amqp://guest:guest@127.0.0.1/", url) is not None

    assert (found.seen, found.differences) == ("existence", ())
    assert "is another broker's" in str(found.note)


@pytest.fixture
def port_of_api(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the default port be that of the test's broker: the real port is rarely free."""
    monkeypatch.setattr(management_module, "PORT", URL(vhost.management_url).port)


@pytest.mark.oldest_version
async def test_an_api_that_refuses_the_amqp_user_counts_as_not_found(vhost: Vhost, port_of_api: None) -> None:
    assert await discover(str(URL(vhost.amqp_url).with_user("nobody").with_password("wrong"))) is None


async def test_credentials_in_the_management_url_are_used_before_those_of_the_amqp_url() -> None:
    found = await discover("amqp://app:secret@broker/prod", "https://look:only@api.example/rabbit")

    assert found == Management("https://api.example/rabbit", "look", "only", "prod")
    assert await discover("amqp://app:secret@broker", "http://api.example:15672") == Management(
        "http://api.example:15672", "app", "secret", "/"
    )


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
async def test_a_server_that_is_not_rabbitmq_gets_no_credentials(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[str] = []

    async def curious(request: web.BaseRequest) -> web.Response:
        heads.append(str(request.headers))
        return web.Response(status=401, headers={"www-authenticate": "Basic realm=Printer"})

    async with web_server(curious) as url:
        monkeypatch.setattr(management_module, "PORT", URL(url).port)
        monkeypatch.setattr(management_module, "TLS_PORT", URL(url).port)
        assert await discover(f"{scheme}://app:secret@127.0.0.1/") is None

    assert len(heads) == (1 if scheme == "amqp" else 0)  # credentials of an amqps URL are not sent without TLS
    assert not any("authorization" in head.lower() for head in heads)


async def test_credentials_are_not_sent_after_a_redirect() -> None:
    asked: list[str] = []

    async def elsewhere(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.Response(status=302, headers={"location": "/stolen"})

    async with web_server(elsewhere) as url:
        with pytest.raises(BrokerError, match="answered 302"):
            await Management(url, "app", "secret", "/").cluster_name()

    assert asked == ["/api/overview"]


async def test_a_password_is_never_shown() -> None:
    shown = await discover("amqp://app:secret@broker", "http://look:hidden@127.0.0.1:9")

    assert shown is not None
    with pytest.raises(BrokerUnreachable) as raised:
        await shown.cluster_name()

    assert "hidden" not in str(raised.value)
    assert "hidden" not in repr(shown)


async def test_an_answer_that_never_comes_ends_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management_module, "TIMEOUT_S", 0.1)

    over = asyncio.Event()

    async def too_late(request: web.BaseRequest) -> web.Response:
        await over.wait()
        return web.Response()

    async with web_server(too_late) as url:
        with pytest.raises(BrokerUnreachable, match="no management API at"):
            await Management(url, "app", "secret", "/").cluster_name()
        over.set()


async def test_any_name_of_a_virtual_host_works(vhost: Vhost, declared: Topology, management: Management) -> None:
    name = f"team a/ü {secrets.token_hex(4)}"
    vhost.api("PUT", f"vhosts/{quote(name, safe='')}")
    try:
        every = {"configure": ".*", "write": ".*", "read": ".*"}
        vhost.api("PUT", f"permissions/{quote(name, safe='')}/{quote(vhost.user, safe='')}", every)
        url = f"{vhost.amqp_url.rsplit('/', 1)[0]}/{quote(name, safe='')}"
        connection = await aio_pika.connect(url)
        await apply(declared, connection)

        found = await discover(url, vhost.management_url)

        assert found is not None
        assert (await verify(declared, found, connection)).differences == ()
        await connection.close()
    finally:
        vhost.api("DELETE", f"vhosts/{quote(name, safe='')}")


NAMES = Names()


@pytest.fixture
async def applied(connection: AbstractConnection, declared: Topology) -> AbstractConnection:
    """A connection to a virtual host with the whole topology."""
    await apply(declared, connection)
    return connection


Arrivals = asyncio.Queue[tuple[float, AbstractIncomingMessage]]


async def arrivals(applied: AbstractConnection, queue: str) -> Arrivals:
    """The messages that arrive in a queue, with their times (monotonic, s)."""
    arrived: Arrivals = asyncio.Queue()
    channel = await applied.channel()
    arrives = await channel.get_queue(queue, ensure=False)

    async def take(message: AbstractIncomingMessage) -> None:
        arrived.put_nowait((time.monotonic(), message))

    await arrives.consume(take, no_ack=True)
    return arrived


async def publish(applied: AbstractConnection, exchange: str, key: str, **properties: Any) -> float:
    """Publish and wait for the confirm; returns the time just before (monotonic, s)."""
    channel = await applied.channel(on_return_raises=True)
    to = await channel.get_exchange(exchange, ensure=False)
    before = time.monotonic()
    await to.publish(aio_pika.Message(b"{}", delivery_mode=2, **properties), key, timeout=10)
    return before


CAME_BY = {0: "lane.delay.00", 100: "lane.due", 200: "lane.delay.00", 700: "lane.due", 1250: "lane.due"}
"""The exchange by which a delay of so many milliseconds ends."""


@pytest.mark.every_version
async def test_a_delay_ends_on_time_in_the_due_queue_with_routing_key_and_properties_kept(
    applied: AbstractConnection,
) -> None:
    arrived, sent = await arrivals(applied, "lane.normal.due"), {}
    for delay_ms in CAME_BY:
        way = hop(delay_ms, NAMES)
        sent[str(delay_ms)] = await publish(
            applied,
            way.exchange,
            "normal.support.chat",
            headers={**way.headers, "traceparent": "kept"},
            priority=7,
            message_id=str(delay_ms),
            reply_to="r1",
            correlation_id="c1",
        )
    for _ in CAME_BY:
        at, message = await asyncio.wait_for(arrived.get(), 60)

        delay_ms = int(message.message_id or "")
        waited_ms = (at - sent[str(delay_ms)]) * 1000
        assert -(-delay_ms // 100) * 100 <= waited_ms < delay_ms + 15_000
        assert (message.routing_key, message.exchange) == ("normal.support.chat", CAME_BY[delay_ms])
        assert (message.priority, message.reply_to, message.correlation_id) == (7, "r1", "c1")
        assert message.headers["traceparent"] == "kept"


@pytest.mark.every_version
async def test_dead_letters_stay_however_often_they_are_read_and_returned(applied: AbstractConnection) -> None:
    """Read 40 times, which is above the default delivery limit of 20 on 4.x."""
    await publish(applied, "lane.dead", "normal.a.b")
    dead = await (await applied.channel()).get_queue("lane.dead", ensure=False)

    for _ in range(40):
        message = await dead.get()
        assert message.body == b"{}"
        await message.reject(requeue=True)


@pytest.mark.every_version
async def test_control_messages_are_kept_whatever_their_routing_key(applied: AbstractConnection) -> None:
    for key in ("cancel", "result", "change", "status", "cancel.twice", "cancle", ""):
        await publish(applied, "lane.control", key)

    control = await (await applied.channel()).get_queue("lane.control")
    assert control.declaration_result.message_count == 7


COMMAND = "run: lanekeeper topology apply"


class Declared:
    def __init__(self, vhost: Vhost, connection: Connection, topology: Topology) -> None:
        self.vhost = vhost
        self.connection = connection
        self.topology = topology
        self.has_management = True

    @asynccontextmanager
    async def watched(self, *, declares: bool = False) -> AsyncIterator[TopologyWatch]:
        watch = TopologyWatch(self.topology, self.connection, declares=declares, find_management=self._find)
        assert watch.trouble is None, "it was applied just now"
        running = asyncio.create_task(watch.run())
        yield watch
        running.cancel()
        await asyncio.wait([running])

    async def _find(self, connection: Connection) -> Management | None:
        url = self.vhost.management_url if self.has_management else None
        return await discover(self.vhost.amqp_url, url) if url else None

    async def delete_queue(self, name: str) -> None:
        channel = await self.connection.channel(confirms=False)
        await channel.queue_delete(name)
        await channel.close()

    async def unbind(self) -> None:
        """Remove the binding of the critical lane."""
        channel = await self.connection.channel(confirms=False)
        await channel.queue_unbind("lane.critical", "lane.requests", "critical.#")
        await channel.close()

    async def is_bound(self) -> bool:
        found = await asyncio.to_thread(
            self.vhost.api, "GET", f"bindings/{self.vhost.quoted}/e/lane.requests/q/lane.critical"
        )
        return bool(found)


@pytest.fixture
async def installed(vhost: Vhost) -> AsyncIterator[Declared]:
    async with Connection(vhost.amqp_url, name=vhost.name) as connection:
        topology = declare(LANES, names=Names(), broker_version=connection.version)
        await apply(topology, await connection.underlying())
        yield Declared(vhost, connection, topology)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.5)
    monkeypatch.setattr(watching, "AGAIN_AFTER_S", 0.2)


def mentions(watch: TopologyWatch, *words: str) -> Callable[[], bool]:
    return lambda: all(word in (watch.trouble or "") for word in words)


@pytest.mark.oldest_version
async def test_a_deleted_queue_is_reported_once_until_it_is_back(installed: Declared, often: None) -> None:
    with capture_logs() as logs:
        async with installed.watched() as watch:
            await installed.delete_queue("lane.delay.03")
            watch.check_soon()
            await until(mentions(watch, "lane.delay.03 is missing", COMMAND))
            assert watch.hindrance == watch.trouble, "what is to be retried would go nowhere"
            await asyncio.sleep(0.6)
            await apply(installed.topology, await installed.connection.underlying())
            await until(lambda: watch.trouble is None)
    told = [each for each in logs if each["event"] == signals.QUEUE_DELETED]
    assert [(each["log_level"], each["queues"]) for each in told] == [("error", ["lane.delay.03"])]


async def test_a_process_that_declares_recreates_a_deleted_queue_and_reports_it(
    installed: Declared, often: None
) -> None:
    with capture_logs() as logs:
        async with installed.watched(declares=True) as watch:
            await installed.delete_queue("lane.critical")
            watch.check_soon()
            await until(lambda: any(each["event"] == signals.TOPOLOGY_APPLIED for each in logs))
            await until(lambda: watch.trouble is None)
    assert any(each["event"] == signals.QUEUE_DELETED and each["queues"] == ["lane.critical"] for each in logs)
    assert not (await verify(installed.topology, None, await installed.connection.underlying())).missing
    assert await installed.is_bound()


@pytest.mark.oldest_version
async def test_a_removed_binding_is_noticed_through_the_management_api(installed: Declared, often: None) -> None:
    async with installed.watched() as watch:
        await installed.unbind()
        await until(mentions(watch, "lane.requests → queue lane.critical", "is missing", COMMAND))
        assert watch.hindrance is None
        await apply(installed.topology, await installed.connection.underlying())
        await until(lambda: watch.trouble is None)


async def test_a_process_that_declares_restores_bindings_even_if_it_cannot_see_them(
    installed: Declared, often: None
) -> None:
    installed.has_management = False
    async with installed.watched(declares=True) as watch:
        await installed.unbind()
        await until(installed.is_bound)
        assert watch.trouble is None


async def test_after_a_reconnect_the_topology_is_unknown_until_it_was_checked(installed: Declared) -> None:
    async with installed.watched() as watch:
        seen: list[str] = []

        async def note() -> None:
            while True:
                if watch.trouble is not None:
                    seen.append(watch.trouble)
                await asyncio.sleep(0)

        noting = asyncio.create_task(note())
        await close_connection(installed.vhost, installed.vhost.name)
        await until(lambda: installed.connection.openings == 2)
        await until(lambda: watch.trouble is None)
        noting.cancel()
        await asyncio.wait([noting])
    assert seen[0] == "not verified since the connection was lost"
