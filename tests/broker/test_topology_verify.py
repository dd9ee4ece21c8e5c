"""Verifying a broker: completely with the management API; without it, only that the objects exist."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from lanekeeper.contract.problems import BrokerError, BrokerUnreachable
from tests.support.brokers import Vhost
from topology.broker import management as management_module
from topology.broker.admin import apply, verify
from topology.broker.management import Management, discover, is_same_broker
from topology.declaration import Binding, Topology

pytestmark = pytest.mark.usefixtures("few_delay_levels")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    """A server that is no management API; its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


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

    async def other(request: web.Request) -> web.Response:
        return web.json_response({"rabbitmq_version": "4.3.6", "cluster_name": "rabbit@elsewhere"})

    async with answering(other) as url:
        found = await verify(declared, replace(management, url=url), connection)
        assert await discover("amqp://guest:guest@127.0.0.1/", url) is not None

    assert (found.seen, found.differences) == ("existence", ())
    assert "is another broker's" in str(found.note)


@pytest.fixture
def port_of_api(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the default port be that of the test's broker: the real port is rarely free."""
    monkeypatch.setattr(management_module, "PORT", URL(vhost.management_url).port)


async def test_the_api_is_found_at_the_amqp_host(
    vhost: Vhost, connection: AbstractConnection, port_of_api: None
) -> None:
    found = await discover(vhost.amqp_url, connection=connection)

    assert found is not None
    assert is_same_broker(await found.cluster_name(), connection)


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

    async def curious(request: web.Request) -> web.Response:
        heads.append(str(request.headers))
        return web.Response(status=401, headers={"www-authenticate": "Basic realm=Printer"})

    async with answering(curious) as url:
        monkeypatch.setattr(management_module, "PORT", URL(url).port)
        monkeypatch.setattr(management_module, "TLS_PORT", URL(url).port)
        assert await discover(f"{scheme}://app:secret@127.0.0.1/") is None

    assert len(heads) == (1 if scheme == "amqp" else 0)  # credentials of an amqps URL are not sent without TLS
    assert not any("authorization" in head.lower() for head in heads)


async def test_credentials_are_not_sent_after_a_redirect() -> None:
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=302, headers={"location": "/stolen"})

    async with answering(elsewhere) as url:
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

    async def too_late(request: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    async with answering(too_late) as url:
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
