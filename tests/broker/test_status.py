"""Status of real workers: which workers answer, how much waits, and how long the question takes."""

import time

import pytest

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import TopologyMismatch
from service.status import LONGEST_S, Status, look
from tests.support.brokers import Vhost
from tests.support.lanes import LANES
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until
from topology.broker.admin import apply
from topology.declaration import declare


async def seen(worker: RunningWorker) -> Status:
    return await look(worker.parts.broker.consuming, lanes=worker.settings.lane_specs(), names=worker.settings.names())


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
