"""Our own client as users that `topology export` made: they may declare nothing, and are answered all the same."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.client import AccessRefused, Client, Final
from service.simulated.options import SimulatedOptions
from tests.support.connections import close_connection
from tests.support.house import house
from tests.support.users import Broker, imported_users
from tests.support.waiting import until


@pytest.fixture
async def users(vhost) -> AsyncIterator[Broker]:
    async with imported_users(vhost) as it:
        yield it


async def test_an_application_asks_and_streams(users: Broker, vhost) -> None:
    key = f"normal.{users.app}.chat"
    async with house(vhost.amqp_url, declares=False), Client(users.url("application")) as client:
        asked = [client.request({"prompt": f"number {n}"}, key=key) for n in range(20)]
        answers = await asyncio.gather(*asked)
        came = [each async for each in client.stream({"prompt": "three rivers"}, key=key)]

    assert [each.text for each in answers] == [f"echo: number {n}" for n in range(20)]
    assert isinstance(came[-1], Final)
    assert len(came) > 2


async def test_a_client_cancels_and_fetches(users: Broker, vhost) -> None:
    key = f"critical.{users.users['client'].name}.chat"
    async with house(vhost.amqp_url, declares=False) as home, Client(users.url("client")) as client:
        slow = await client.publish({"prompt": "slow [[latency: 60s]]"}, key=key)
        await until(lambda: home.calls("slow"))
        assert await client.cancel(slow) == "told"
        quick = await client.publish({"prompt": "quick"}, key=key)
        assert (await client.result(quick, wait_s=10)).text == "echo: quick"


async def test_an_application_that_may_not_fetch_is_answered_after_a_loss_of_its_connection(
    users: Broker, vhost
) -> None:
    slow = SimulatedOptions(latency_ms=8000)
    async with (
        house(vhost.amqp_url, declares=False, simulated=slow) as home,
        Client(users.url("application")) as client,
    ):
        asked = asyncio.create_task(client.request({"prompt": "slow"}, key=f"normal.{users.app}.chat", timeout_s=30))
        await until(lambda: home.calls("slow"))
        await close_connection(vhost, "lanekeeper client")

        assert (await asked).text == "echo: slow"
        assert len(home.calls("slow")) == 1, "the provider is not called again"


async def test_a_refused_cancellation_costs_no_answer(users: Broker, vhost) -> None:
    async with (
        house(vhost.amqp_url, declares=False) as home,
        Client(users.url("application")) as client,
    ):
        key = f"normal.{users.app}.chat"
        asked = asyncio.create_task(client.request({"prompt": "slow [[latency: 1s]]"}, key=key))
        await until(lambda: home.calls("slow"))
        with pytest.raises(AccessRefused):
            await client.cancel("anything")

        assert (await asked).text.startswith("echo: slow")
        assert len(home.calls("slow")) == 1
