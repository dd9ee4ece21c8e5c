"""Our client as users made by `topology export`: they may declare nothing, and still get their answers."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import aiormq
import pytest
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from lanekeeper import Client, Final
from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.connections import close_connection
from tests.support.processes import environment, lanekeeper, run
from tests.support.serving import serving
from tests.support.users import Broker, imported_users
from tests.support.waiting import until

pytestmark = pytest.mark.every_version


@pytest.fixture
async def users(vhost: Vhost) -> AsyncIterator[Broker]:
    async with imported_users(vhost) as it:
        yield it


async def test_an_application_can_send_and_stream(users: Broker, vhost: Vhost) -> None:
    key = f"normal.{users.app}.chat"
    async with serving(vhost.amqp_url, declares=False), Client(users.url("application")) as client:
        asked = [client.request({"prompt": f"number {n}"}, key=key) for n in range(20)]
        answers = await asyncio.gather(*asked)
        came = [each async for each in client.stream({"prompt": "three rivers"}, key=key)]

    assert [each.text for each in answers] == [f"echo: number {n}" for n in range(20)]
    assert isinstance(came[-1], Final)
    assert len(came) > 2


async def test_a_client_can_cancel_and_fetch(users: Broker, vhost: Vhost) -> None:
    key = f"critical.{users.users['client'].name}.chat"
    async with serving(vhost.amqp_url, declares=False) as running, Client(users.url("client")) as client:
        slow = await client.publish({"prompt": "slow [[latency: 60s]]"}, key=key)
        await until(lambda: running.calls("slow"))
        assert await client.cancel(slow) == "told"
        quick = await client.publish({"prompt": "quick"}, key=key)
        assert (await client.result(quick, wait_s=60)).text == "echo: quick"


async def test_an_application_without_the_right_to_fetch_is_answered_after_it_lost_its_connection(
    users: Broker, vhost: Vhost
) -> None:
    slow = SimulatedOptions(latency_ms=8000)
    async with (
        serving(vhost.amqp_url, declares=False, simulated=slow) as running,
        Client(users.url("application")) as client,
    ):
        asked = asyncio.create_task(client.request({"prompt": "slow"}, key=f"normal.{users.app}.chat", timeout_s=60))
        await until(lambda: running.calls("slow"))
        await close_connection(vhost, "lanekeeper client")

        assert (await asked).text == "echo: slow"
        assert len(running.calls("slow")) == 1, "the provider is not called again"


async def test_apply_creates_a_worker_and_a_client_on_an_empty_broker(vhost: Vhost, tmp_path: Path) -> None:
    mark = secrets.token_hex(4)  # users belong to the whole broker, which other tests share
    worker, app = f"worker-{mark}", f"cli-{mark}"
    users = ("--user", f"{worker}:worker", "--user", f"{app}:client:critical", "--passwords", "passwords")
    try:
        for password in ("first", "second"):  # applied again: the password is now the one in the file
            (tmp_path / "passwords").write_text(f"{worker}:{password}\n{app}:{password}\n")
            environ = environment(vhost.amqp_url, vhost.management_url)
            code, lines = await run("topology", "apply", *users, environ=environ, folder=tmp_path)
            assert (code, lines[-1]) == (0, f"users: {worker} (worker), {app} (client)")
        url = URL(vhost.amqp_url).with_password("second")
        working = environment(str(url.with_user(worker)))

        async with (
            lanekeeper("consume", "--simulate", "--port", "0", environ=working, folder=tmp_path) as process,
            Client(str(url.with_user(app)), identified=True) as client,
        ):
            await process.ready()
            answer = await client.request({"prompt": "three rivers"}, key=f"critical.{app}.chat")
        assert answer.text == "echo: three rivers"

        async with await aiormq.connect(str(url.with_user(worker))) as connection:
            with pytest.raises(ChannelAccessRefused, match="access"):
                await (await connection.channel()).queue_declare("lane.mine", durable=True)
            with pytest.raises(ChannelAccessRefused, match="access"):
                await (await connection.channel()).basic_get(f"lane.reply.{app}")
            channel = await connection.channel()
            with pytest.raises(ChannelAccessRefused, match="access"):
                await channel.basic_publish(b"{}", exchange="lane.requests", routing_key="critical.a.b")
    finally:
        for name in (worker, app):
            vhost.api("DELETE", f"users/{name}")
