"""Status of real workers: which workers answer, how much waits, and how long the question takes."""

import time

import pytest

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import TopologyMismatch
from service.checks.status import LONGEST_S, Status, look
from service.simulated.options import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.lanes import LANES
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until
from topology.broker.admin.apply import apply
from topology.declaration import declare


async def seen(worker: RunningWorker) -> Status:
    return await look(worker.parts.consuming, lanes=worker.settings.lane_specs(), names=worker.settings.names())


async def test_the_figures_of_two_workers_are_added_up(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url) as worker,
        serving(vhost.amqp_url, works=("critical",)) as other,
        Client(vhost.amqp_url) as client,
    ):
        for n in range(10):
            await client.request({"prompt": f"{n}"}, key="critical.tests.status")
        found: list[Status] = []

        async def both() -> bool:
            found[:] = [await seen(worker)]
            return (found[0].lanes[0].workers, found[0].lanes[0].answered) == (2, 10)

        await until(both)
        assert other.is_well

    critical, normal, _ = found[0].lanes
    assert (critical.consumers, critical.slots, critical.due_slots, critical.answered) == (2, 32, 8, 10)
    assert (normal.workers, normal.consumers, normal.slots, normal.due_slots) == (1, 1, 8, 2)
    assert critical.wait_p50_ms is not None
    assert critical.throughput_per_min == 10


async def test_running_and_waiting_requests_are_shown(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, simulated=SimulatedOptions(latency_ms=60_000), lanes={"batch": {"slots": 2}}) as worker,
        Client(vhost.amqp_url) as client,
    ):
        for n in range(6):
            await client.publish({"prompt": f"{n}"}, key="batch.tests.status")
        await until(lambda: worker.api.running == 2)

        async def all_are_seen() -> bool:
            batch = (await seen(worker)).lanes[2]
            return (batch.running, batch.depth) == (2, 4)

        await until(all_are_seen)


async def test_without_workers_depths_are_shown_without_waiting_for_answers(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="test") as connection:
        await apply(declare(LANES, names=Names(), broker_version=connection.version), await connection.underlying())
        began = time.monotonic()
        found = await look(connection, lanes=LANES, names=Names())

    assert time.monotonic() - began < LONGEST_S / 2
    assert found.workers == ()
    assert [(lane.depth, lane.consumers, lane.running) for lane in found.lanes] == [(0, 0, None)] * 3


async def test_without_a_topology_the_error_says_what_to_run(vhost: Vhost) -> None:
    async with Connection(vhost.amqp_url, name="test") as connection:
        with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
            await look(connection, lanes=LANES, names=Names())


async def test_workers_that_bind_replies_to_users_answer_status_questions(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, reply_to={"bound_to_user": True}) as worker:

        async def it_answers() -> bool:
            return len((await seen(worker)).workers) == 1

        await until(it_answers)
