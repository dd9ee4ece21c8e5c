"""The topology is watched: every deleted object is reported, and `serve` declares it again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from lanekeeper.telemetry import signals
from tests.support.brokers import Vhost
from tests.support.connections import close_connection
from tests.support.lanes import LANES
from tests.support.waiting import until
from topology.broker import admin as watching
from topology.broker.admin import TopologyWatch, apply, verify
from topology.broker.management import Management, discover
from topology.declaration import Topology, declare

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
async def declared(vhost: Vhost) -> AsyncIterator[Declared]:
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
async def test_a_deleted_queue_is_reported_once_until_it_is_back(declared: Declared, often: None) -> None:
    with capture_logs() as logs:
        async with declared.watched() as watch:
            await declared.delete_queue("lane.delay.03")
            watch.check_soon()
            await until(mentions(watch, "lane.delay.03 is missing", COMMAND))
            assert watch.hindrance == watch.trouble, "what is to be retried would go nowhere"
            await asyncio.sleep(0.6)
            await apply(declared.topology, await declared.connection.underlying())
            await until(lambda: watch.trouble is None)
    told = [each for each in logs if each["event"] == signals.QUEUE_DELETED]
    assert [(each["log_level"], each["queues"]) for each in told] == [("error", ["lane.delay.03"])]


async def test_a_process_that_declares_recreates_a_deleted_queue_and_reports_it(
    declared: Declared, often: None
) -> None:
    with capture_logs() as logs:
        async with declared.watched(declares=True) as watch:
            await declared.delete_queue("lane.critical")
            watch.check_soon()
            await until(lambda: any(each["event"] == signals.TOPOLOGY_APPLIED for each in logs))
            await until(lambda: watch.trouble is None)
    assert any(each["event"] == signals.QUEUE_DELETED and each["queues"] == ["lane.critical"] for each in logs)
    assert not (await verify(declared.topology, None, await declared.connection.underlying())).missing
    assert await declared.is_bound()


@pytest.mark.oldest_version
async def test_a_removed_binding_is_noticed_through_the_management_api(declared: Declared, often: None) -> None:
    async with declared.watched() as watch:
        await declared.unbind()
        await until(mentions(watch, "lane.requests → queue lane.critical", "is missing", COMMAND))
        assert watch.hindrance is None
        await apply(declared.topology, await declared.connection.underlying())
        await until(lambda: watch.trouble is None)


async def test_a_process_that_declares_restores_bindings_even_if_it_cannot_see_them(
    declared: Declared, often: None
) -> None:
    declared.has_management = False
    async with declared.watched(declares=True) as watch:
        await declared.unbind()
        await until(declared.is_bound)
        assert watch.trouble is None


async def test_after_a_reconnect_the_topology_is_unknown_until_it_was_checked(declared: Declared) -> None:
    async with declared.watched() as watch:
        seen: list[str] = []

        async def note() -> None:
            while True:
                if watch.trouble is not None:
                    seen.append(watch.trouble)
                await asyncio.sleep(0)

        noting = asyncio.create_task(note())
        await close_connection(declared.vhost, declared.vhost.name)
        await until(lambda: declared.connection.openings == 2)
        await until(lambda: watch.trouble is None)
        noting.cancel()
        await asyncio.wait([noting])
    assert seen[0] == "not verified since the connection was lost"
