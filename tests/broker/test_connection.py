"""The supervised connection: errors are one clear line, and a lost connection is opened again."""

import asyncio
from collections.abc import Callable

import pytest
from yarl import URL

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable, TopologyMismatch
from tests.support.brokers import Vhost
from tests.support.connections import close_connection
from tests.support.waiting import until
from topology.broker import management
from topology.broker.consume import Inbox


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
