"""Our client with a worker and a real broker: answers, parts, problems, a lane that is full, a connection that is cut,
what an application finds on standard error; and the status of real workers."""

import asyncio
import logging
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiormq
import pytest

from lanekeeper import Client, ClientMisused, NoReply, PublishRefused, ReplyLost
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import TopologyMismatch
from lanekeeper.replies import Problem
from lanekeeper.requests import Options
from service.simulated.app import SimulatedOptions
from service.status import Status, collect_status
from tests.support.brokers import Vhost, close_connection
from tests.support.defaults import LANES
from tests.support.private_broker import PrivateBroker
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import STARTED_S, until
from topology.broker.admin import apply
from topology.declaration import declare


@asynccontextmanager
async def at_home(url: str, **how: Any) -> AsyncIterator[Client]:
    async with serving(url, **how), Client(url) as client:
        yield client


async def disconnected(client: Client, vhost: Vhost) -> None:
    """Wait until the client has lost its connection."""
    assert client.amqp is not None
    loss = client.amqp.connection.loss
    await close_connection(vhost, "lanekeeper client")
    await loss


async def test_a_client_that_is_closed_or_of_another_event_loop_says_so_at_once(vhost: Vhost) -> None:
    async def fails(client: Client) -> None:
        async with asyncio.timeout(5):
            with pytest.raises(ClientMisused):
                await client.publish({"prompt": "x"}, key="normal.tests.client")
            with pytest.raises(ClientMisused):
                await client.result("id-1", wait_s=30)

    async with at_home(vhost.amqp_url) as client:
        await asyncio.to_thread(asyncio.run, fails(client))
        waiting = asyncio.create_task(client.result("id-1", wait_s=600))
        await asyncio.sleep(0)
    await fails(client)
    async with asyncio.timeout(20):
        with pytest.raises(ClientMisused):
            await waiting


async def test_an_error_of_a_publish_names_the_id_to_publish_it_again_under(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        with pytest.raises(TopologyMismatch) as refused, patch.object(client._transport, "_names", Names("not-there")):
            await client.publish({"prompt": "x"}, key="normal.tests.client")
        id = refused.value.message_id
        assert id is not None
        assert (await client.request({"prompt": "x"}, key="normal.tests.client", message_id=id)).request_id == id


async def test_without_an_answer_in_the_callers_time_an_error_is_raised_and_the_request_forgotten(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url, simulated=SimulatedOptions(latency_ms=1000)) as client:
        with pytest.raises(NoReply, match=r"within 0\.2 s"):
            await client.request({"prompt": "slow"}, key="critical.tests.client", timeout_s=0.2)


async def test_a_stream_whose_connection_is_lost_raises_at_once_and_the_next_request_is_answered(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:

        async def read() -> None:
            async for _ in client.stream({"prompt": "slow [[latency: 60s]]"}, key="critical.tests.client"):
                pass

        reading = asyncio.create_task(read())
        await until(lambda: worker.calls("slow"))
        await close_connection(vhost, "lanekeeper client")

        with pytest.raises(ReplyLost, match="ask again under the same id"):
            await asyncio.wait_for(reading, 60)
        assert (await client.request({"prompt": "again"}, key="critical.tests.client")).text == "echo: again"


@pytest.mark.parametrize("options", [{}, {"message_id": "mine"}])
async def test_an_answer_whose_connection_was_lost_is_fetched_by_its_id(vhost: Vhost, options: Options) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        asked = asyncio.create_task(
            client.request({"prompt": "slow [[held]]"}, key="critical.tests.client", timeout_s=60, **options)
        )
        await until(lambda: worker.calls("slow"))
        await disconnected(client, vhost)
        worker.api.release()

        assert (await asked).text.startswith("echo: slow")
        assert len(worker.calls("slow")) == 1


async def test_after_a_lost_connection_a_conflict_of_ids_is_still_raised(vhost: Vhost) -> None:
    async with serving(vhost, lanes={"normal": {"slots": 1}}) as worker, Client(vhost.amqp_url) as client:
        await client.request({"prompt": "one"}, key="critical.tests.client", message_id="same")
        await client.publish({"prompt": "[[held]]"}, key="normal.tests.client")
        await until(lambda: worker.api.running == 1)
        asked = asyncio.create_task(
            client.request({"prompt": "two"}, key="normal.tests.client", message_id="same", timeout_s=60)
        )
        await disconnected(client, vhost)
        worker.api.release()

        with pytest.raises(Problem, match="idempotency_conflict"):
            await asked


async def test_without_a_worker_fetching_a_result_times_out_and_a_cancellation_is_kept_at_once(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanekeeper.over_amqp.ANSWERED_WITHIN_S", 0.3)
    async with Connection(vhost.amqp_url, name="test") as connection:
        topology = declare(LANES, names=Names(), broker_version=connection.version)
        await apply(topology, await connection.underlying())
        async with Client(vhost.amqp_url) as client:
            with pytest.raises(NoReply, match="no worker answered"):
                await client.result("id-1")
            monkeypatch.setattr("lanekeeper.over_amqp.ANSWERED_WITHIN_S", 3600)
            with pytest.raises(NoReply, match="no worker runs; it is recorded as soon as one runs"):
                await client.cancel("id-1")

        async def depth() -> int:
            return (await depths(connection, ["lane.control"]))["lane.control"].ready

        async def only_the_cancellation_is_left() -> bool:
            return await depth() == 1

        await until(only_the_cancellation_is_left)


async def test_the_number_of_workers_of_a_lane_can_be_read(vhost: Vhost) -> None:
    async with serving(vhost, works=("critical",)), Client(vhost.amqp_url) as client:

        async def consumers(lane: str) -> int | None:
            found = await client.depth(lane)
            return None if found is None else found.consumers

        async def is_counted() -> bool:  # the broker counts a new consumer a moment later
            return await consumers("critical") == 1

        await until(is_counted)
        assert [await consumers(lane) for lane in ("batch", "nolane")] == [0, None]


async def test_a_client_can_be_left_at_any_moment(vhost: Vhost) -> None:
    for n in range(60):
        async with asyncio.timeout(60), Client(vhost.amqp_url):
            await asyncio.sleep(n / 3000)  # also while it connects


async def test_without_a_topology_the_error_says_at_once_what_to_run(vhost: Vhost) -> None:
    async with Client(vhost.amqp_url) as client:
        began = time.monotonic()
        with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
            await client.publish({"prompt": "x"}, key="batch.tests.client")
        with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
            await client.result("id-1", wait_s=30)
        assert time.monotonic() - began < 15


KEY = "batch.tests.full"


async def fill(client: Client) -> None:
    """Publish until the lane refuses; a quorum queue notices late that it is full."""
    for n in range(50):
        await client.publish({"prompt": f"{n}"}, key=KEY)


async def test_a_caller_waits_for_a_place_as_long_as_it_chooses(vhost: Vhost) -> None:
    async with (
        serving(vhost, works=("critical",), lanes={"batch": {"max_length": 2}}),
        Client(vhost.amqp_url) as client,
        Connection(vhost.amqp_url, name="test") as connection,
    ):
        with pytest.raises(PublishRefused, match=r"the lane is full: lane\.batch") as refused:
            await fill(client)
        assert refused.value.retry_after_s > 0

        patient = asyncio.create_task(client.publish({"prompt": "a"}, key=KEY, message_id="a", full_within_s=120))
        usual = asyncio.create_task(client.publish({"prompt": "b"}, key=KEY))
        with pytest.raises(PublishRefused):
            await client.publish({"prompt": "c"}, key=KEY, full_within_s=0)
        assert not usual.done()
        with pytest.raises(PublishRefused):
            await usual
        assert not patient.done()

        channel = await connection.channel(confirms=False, timeout_s=5)
        await channel.queue_purge("lane.batch")
        assert await patient == "a"


APPLICATION = """
import asyncio, logging, sys
from lanekeeper import Client

class Opened(logging.Handler):
    def emit(self, record):
        if "broker.connected" in record.getMessage():
            print("connected", flush=True)

async def main():
    async with Client(sys.argv[1]):
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

if sys.argv[2] == "configured":
    logging.basicConfig(level=logging.WARNING)
heard = logging.getLogger("lanekeeper")
heard.setLevel(logging.INFO)
heard.addHandler(Opened())
asyncio.run(main())
"""


async def test_a_restart_of_the_broker_prints_no_traceback_with_or_without_configured_logging(
    own_broker: PrivateBroker,
) -> None:
    root = str(Path(__file__).parents[2])
    said = {}
    processes = {
        how: await asyncio.create_subprocess_exec(
            sys.executable, "-c", APPLICATION, own_broker.amqp_url, how, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=root
        )
        for how in ("silent", "configured")
    }
    for process in processes.values():
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readuntil(b"ready\n"), STARTED_S)
    await own_broker.kill()
    await own_broker.start()
    for how, process in processes.items():
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readuntil(b"connected\n"), STARTED_S)
        _, err = await asyncio.wait_for(process.communicate(b"\n"), STARTED_S)
        said[how] = err.decode()
    assert said["silent"] == ""
    lines = said["configured"].splitlines()
    assert any("broker.lost" in line for line in lines)
    assert not [line for line in lines if ":lanekeeper:" not in line]


async def test_aiormqs_own_log_lines_are_kept_for_the_applications_other_connections(
    vhost: Vhost, caplog: pytest.LogCaptureFixture
) -> None:
    async with Connection(vhost.amqp_url, name="ours"):
        with caplog.at_level(logging.WARNING), pytest.raises(aiormq.exceptions.AMQPConnectionError):
            await aiormq.connect("amqp://guest:guest@127.0.0.1:1/")
    assert [record.name for record in caplog.records] == ["aiormq.connection"]


async def seen(worker: RunningWorker) -> Status:
    return await collect_status(
        worker.parts.broker.consuming, lanes=worker.settings.lane_specs(), names=worker.settings.names()
    )


async def test_without_workers_depths_are_shown_without_waiting_for_answers(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.status.LONGEST_S", 3600.0)
    async with Connection(vhost.amqp_url, name="test") as connection:
        await apply(declare(LANES, names=Names(), broker_version=connection.version), await connection.underlying())
        async with asyncio.timeout(60):
            found = await collect_status(connection, lanes=LANES, names=Names())

    assert found.workers == ()
    assert [(lane.depth, lane.consumers, lane.running) for lane in found.lanes] == [(0, 0, None)] * 3


async def test_workers_that_bind_replies_to_users_answer_status_questions(vhost: Vhost) -> None:
    async with serving(vhost, reply_to={"bound_to_user": True}) as worker:

        async def it_answers() -> bool:
            return len((await seen(worker)).workers) == 1

        await until(it_answers)
