"""The supervised connection: errors are one clear line, a lost connection is opened again, a cancellation takes effect
at any moment, and nothing is written to a connection that the broker does not read."""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from lanekeeper.amqp import driver
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerUnreachable,
    ConfirmUnknown,
    TopologyMismatch,
)
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from service.checks import run_checks
from tests.faults.proxy import FROM, Proxy
from tests.support.brokers import Vhost, close_connection, memory_alarm
from tests.support.certificates import certificate
from tests.support.private_broker import PrivateBroker
from tests.support.settings import load
from tests.support.waiting import until
from topology.broker import management
from topology.broker.admin import WritingRights
from topology.broker.consume import Deliveries, Inbox


@pytest.mark.every_version
async def test_the_connection_has_the_brokers_version_and_address(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="test") as connection:
        assert connection.is_open
        assert connection.trouble is None
        assert connection.version.startswith(vhost.version.split("+")[0])
        assert connection.address == f"{URL(vhost.amqp_url).host}:{URL(vhost.amqp_url).port}"
    assert not connection.is_open


async def test_a_refused_connection_is_one_line_that_says_what_to_check(unused_tcp_port: int) -> None:
    with pytest.raises(BrokerUnreachable, match=r"no broker at 127\.0\.0\.1:\d+: .*LANEKEEPER_AMQP_URL") as error:
        async with Connection(f"amqp://guest:secret@127.0.0.1:{unused_tcp_port}/", name="test"):
            pass
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.oldest_version
async def test_a_wrong_password_is_one_line_without_the_password(vhost: Vhost) -> None:
    url = str(URL(vhost.amqp_url).with_password("secret"))
    with pytest.raises(AccessRefused, match=f"refused user '{vhost.user}'.*[^.]; check user, password") as error:
        async with Connection(url, name="test"):
            pass
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.oldest_version
async def test_a_missing_virtual_host_is_named(vhost: Vhost) -> None:
    with pytest.raises(AccessRefused, match=f"not into virtual host '{vhost.name}-not-there'"):
        async with Connection(vhost.amqp_url + "-not-there", name="test"):
            pass


async def test_over_tls_a_connection_publishes_and_is_lost_and_opened_again(vhost: Vhost, tmp_path: Path) -> None:
    """On every Python that is supported: the TLS of Debian 12's own (3.11.2) has faults of its own."""
    cert, key = certificate(tmp_path, "localhost")
    serving, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=cert)
    serving.load_cert_chain(cert, key)
    parts, taken = URL(vhost.amqp_url), list[asyncio.StreamWriter]()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while some := await reader.read(65536):
                writer.write(some)
                await writer.drain()
        writer.transport.abort()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        to_broker = await asyncio.open_connection(parts.host, parts.port or 5672)
        await asyncio.gather(pipe(reader, to_broker[1]), pipe(to_broker[0], writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=serving)
    url = parts.with_scheme("amqps").with_host("localhost").with_port(server.sockets[0].getsockname()[1])
    async with server, Connection(str(url), name=vhost.name, ssl_context=trusting) as connection:
        publisher = Publisher(connection, tracing=Tracing())
        large = Message(body=bytes(2**20))
        await publisher.publish(large, exchange="", routing_key="nobody", mandatory=False)
        loss = connection.loss
        taken[0].transport.abort()
        await asyncio.wait_for(loss, 60)
        await publisher.publish_surely(large, exchange="", routing_key="nobody", mandatory=False)
        assert connection.openings == 2


async def test_a_lost_connection_is_reported_and_opened_again(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name=vhost.name) as connection:
        channel = await connection.channel(confirms=True)
        loss = connection.loss
        await close_connection(vhost, vhost.name)
        assert "CONNECTION_FORCED" in await asyncio.wait_for(loss, 60)
        await connection.underlying(timeout_s=60)
        assert connection.trouble is None
        assert connection.loss is not loss
        assert channel.is_closed
        assert not (await connection.channel(confirms=True)).is_closed


async def test_waiting_for_a_channel_ends_at_its_time_limit(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="test") as connection:
        vhost.api("DELETE", f"permissions/{vhost.quoted}/{vhost.user}")  # so that it does not reconnect
        await (await connection.underlying()).close()
        with pytest.raises(BrokerUnreachable, match=r"within 0\.2 s"):
            await connection.channel(confirms=False, timeout_s=0.2)
        assert connection.trouble is not None
        await until(lambda: "not into virtual host" in (connection.trouble or ""))


@pytest.mark.oldest_version
async def test_an_inbox_has_a_name_and_gets_what_is_bound_to_it(vhost: Vhost) -> None:
    async with (
        Connection(vhost.amqp_url, name="test") as connection,
        Inbox(connection, bindings=(("amq.topic", "status"),)) as inbox,
    ):
        assert inbox.name.startswith("amq.gen-")
        channel = await connection.channel(confirms=True)
        await channel.basic_publish(b"1", exchange="", routing_key=inbox.name)
        await channel.basic_publish(b"2", exchange="amq.topic", routing_key="status")
        assert [(await anext(inbox)).body, (await anext(inbox)).body] == [b"1", b"2"]


@pytest.mark.every_version
async def test_depths_count_ready_messages_and_name_missing_queues(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="test") as connection:
        channel = await connection.channel(confirms=True)
        await channel.queue_declare("some", durable=True)
        await channel.basic_publish(b"1", exchange="", routing_key="some")

        async def counted() -> bool:
            found = (await depths(connection, ["some"]))["some"]
            return (found.ready, found.consumers) == (1, 0)

        await until(counted)
        with pytest.raises(TopologyMismatch, match="not-there"):
            await depths(connection, ["not-there"])


async def test_of_two_urls_the_reachable_one_is_used(vhost: Vhost, unused_tcp_port: int) -> None:
    dead = f"amqp://guest:guest@127.0.0.1:{unused_tcp_port}/"
    for _ in range(4):  # either may be tried first
        async with Connection(f"{dead}, {vhost.amqp_url}", name="test") as connection:
            assert connection.endpoint == (URL(vhost.amqp_url).host, URL(vhost.amqp_url).port)
            assert connection.address == f"{URL(vhost.amqp_url).host}:{URL(vhost.amqp_url).port}"


async def test_if_no_url_is_reachable_all_are_named(unused_tcp_port_factory: Callable[[], int]) -> None:
    ports = unused_tcp_port_factory(), unused_tcp_port_factory()
    with pytest.raises(BrokerUnreachable) as error:
        async with Connection(",".join(f"amqp://guest:secret@127.0.0.1:{port}/" for port in ports), name="test"):
            pass
    assert all(f"127.0.0.1:{port}" in str(error.value) for port in ports)
    assert "secret" not in str(error.value)


async def test_a_lost_connection_continues_with_the_next_url(vhost: Vhost) -> None:
    """The same broker twice, as in a cluster where each node has a URL."""
    given = URL(vhost.amqp_url)
    other = str(given.with_host("127.0.0.1" if given.host == "localhost" else "localhost"))
    async with Connection(f"{vhost.amqp_url},{other}", name=vhost.name) as connection:
        first = connection.endpoint
        await close_connection(vhost, vhost.name)
        await until(lambda: connection.openings == 2)
        assert connection.endpoint != first


async def test_the_management_api_is_found_at_the_first_host_that_has_one(
    vhost: Vhost, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = URL(vhost.management_url).port
    assert port is not None
    monkeypatch.setattr(management, "PORT", port)
    dead = str(URL(vhost.amqp_url).with_host("127.0.0.99"))  # of loopback, where no server of ours listens
    found = await management.discover(f"{dead},{vhost.amqp_url}")
    assert found is not None
    assert (URL(found.url).host, URL(found.url).port) == (URL(vhost.amqp_url).host, port)


TIMES = 150
WITHIN_S = 0.015
"""About the time that opening takes; the cancellations happen within it."""


async def read_an_inbox(connection: Connection) -> None:
    async with Inbox(connection, bindings=(("amq.topic", "x"),)) as inbox:
        async for _ in inbox:
            pass


async def consume(connection: Connection) -> None:
    async for session in Deliveries(connection, queue="work", prefetch=1).sessions():
        async for _ in session:
            pass


@pytest.mark.parametrize("work", [read_an_inbox, consume])
async def test_a_cancellation_at_any_moment_takes_effect(
    vhost: Vhost, work: Callable[[Connection], Awaitable[None]]
) -> None:
    rng = random.Random(work.__name__)
    async with Connection(vhost.amqp_url, name="test") as connection:
        await (await connection.channel(confirms=False)).queue_declare("work")
        for n in range(TIMES):
            task = asyncio.ensure_future(work(connection))
            await asyncio.sleep(rng.uniform(0, WITHIN_S))
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=60)
            assert done, f"the {n}th never ended"
            assert task.cancelled()


@pytest.mark.every_version
async def test_a_channel_whose_close_is_answered_late_costs_no_connection(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CLOSE_TIMEOUT_S", 0.2)
    at = URL(vhost.amqp_url)
    async with (
        Proxy(at.host or "", at.port or 5672) as line,
        Connection(str(at.with_port(line.port)), name="test") as connection,
    ):
        late, other = await connection.channel(confirms=True), await connection.channel(confirms=True)
        line.freeze(FROM)
        await driver.close(late)
        assert not late.is_closed
        await line.mend()
        await until(lambda: late.is_closed)
        await depths(connection, [])  # a channel that is opened and closed: what the broker was sent before is answered
        assert (connection.openings, other.is_closed) == (1, False)


async def test_a_channel_is_closed_also_if_nothing_can_be_sent_for_a_while(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CLOSE_TIMEOUT_S", 0.05)
    async with Connection(vhost.amqp_url, name="test") as connection:
        channel = await connection.channel(confirms=False)
        sending, full = channel.write_queue, asyncio.Queue[Any](maxsize=1)
        full.put_nowait(None)
        monkeypatch.setattr(channel, "write_queue", full)
        await driver.close(channel)
        full.get_nowait()
        sending.put_nowait(await asyncio.wait_for(full.get(), 60))
        await until(lambda: channel.is_closed)


async def test_leaving_a_connection_while_it_reconnects_takes_effect_at_once(vhost: Vhost) -> None:
    rng = random.Random(0)
    for _ in range(15):
        async with Connection(vhost.amqp_url, name="test") as connection:
            await (await connection.underlying()).close()
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            leaving = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - leaving < 20


MESSAGE = Message(body=b"x")


@pytest.mark.every_version
async def test_while_blocked_nothing_is_published_and_afterwards_everything_is(
    own_broker: PrivateBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Connection(own_broker.amqp_url, name="publish") as connection,
        Connection(own_broker.amqp_url, name="look") as looking,
    ):
        channel = await looking.channel(confirms=False)
        await channel.queue_declare("some", durable=True, arguments={"x-queue-type": "quorum"})
        publisher = Publisher(connection, tracing=Tracing())
        await publisher.publish(MESSAGE, exchange="", routing_key="some")

        async def publish_surely() -> None:
            await publisher.publish_surely(MESSAGE, exchange="", routing_key="some", within_s=60)

        with caplog.at_level(logging.INFO, "lanekeeper"):
            async with memory_alarm(own_broker.amqp_url):
                # the first was sent before the broker announced the alarm; its outcome is unknown
                with pytest.raises(ConfirmUnknown, match="low on memory"):
                    await publisher.publish(MESSAGE, exchange="", routing_key="some", timeout_s=2)
                assert (connection.blocked, looking.blocked) == ("low on memory", None), "who does not publish goes on"
                began_s = time.monotonic()
                with pytest.raises(BrokerBlocked, match="memory or disk alarm") as blocked:
                    await publisher.publish(MESSAGE, exchange="", routing_key="some", timeout_s=0.5)
                assert time.monotonic() - began_s < 10
                assert not blocked.value.maybe_published
                elsewhere: dict[str, Any] = {
                    "store_url": f"sqlite:///{tmp_path}/store.sqlite",
                    "bodies": {"url": tmp_path.as_uri()},
                }
                settings = load(amqp_url=own_broker.amqp_url, **elsewhere)
                wrong = [each async for each in run_checks(settings, simulate=True) if each.well is False]
                assert [each.what for each in wrong] == ["alarm"], "`lanekeeper check` does not blame the user's rights"
                assert "low on memory" in wrong[0].text
                surely = asyncio.create_task(publish_surely())
                with pytest.raises(BrokerBlocked):
                    await publisher.publish_surely(
                        MESSAGE, exchange="", routing_key="some", within_s=30, gives_up_on=(BrokerBlocked,)
                    )
                assert not surely.done()
            ended_s = time.monotonic()
            await asyncio.wait_for(surely, 60)
            assert time.monotonic() - ended_s < 20
            await publisher.publish(MESSAGE, exchange="", routing_key="some")
        assert connection.blocked is None
        assert connection.openings == 1, "the connection was kept"
        alarms = (signals.BROKER_BLOCKED, signals.BROKER_UNBLOCKED)
        found = [each.__dict__ for each in caplog.records if each.name == "lanekeeper"]
        told = [
            each["event"] for each in found if each["event"] in alarms and each["fields"]["connection"] == "publish"
        ]
        assert told == list(alarms)

        async def is_there() -> bool:
            return (await depths(looking, ["some"]))["some"].ready == 4

        await until(
            is_there
        )  # the one before, the one whose outcome is unknown, the one published surely, the one after


async def test_a_missing_right_hidden_by_an_alarm_is_found_when_the_alarm_ends(own_broker: PrivateBroker) -> None:
    async with Connection(own_broker.amqp_url, name="publish") as connection:
        may = WritingRights(connection, (("", "some"),))
        may_not = WritingRights(connection, (("", "some"), ("amq.rabbitmq.trace", "x")))
        async with memory_alarm(own_broker.amqp_url):
            for each in (may, may_not):
                with pytest.raises((BrokerUnreachable, BrokerBlocked)):
                    await each.check()
                assert each.trouble is not None, "nothing is taken until it is known"
            runs = [asyncio.create_task(each.run()) for each in (may, may_not)]
        await until(lambda: may.trouble is None)
        await until(lambda: "ACCESS_REFUSED" in (may_not.trouble or ""))
        for run in runs:
            run.cancel()
