"""A cluster of three loses its leaders one after the other: no confirmed request is lost, and stalls are short.

Each test has a cluster of its own, two workers as processes, and applications that ask all the time. What is measured
is printed (`-s`), and bounded.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.faults.checker import Called, Disturbed, History, Verdict, check
from tests.faults.ground import Crew
from tests.faults.load import Load, Mix
from tests.faults.nodes import Cluster, Node, cluster
from tests.faults.unanswered import all_answered
from tests.support.engine import Unavailable
from tests.support.faulty_api import FaultyAPI
from tests.support.processes import environment, run

RATE = 20.0
"""Requests a second; low, because the brokers share two cores and the load is not what is measured."""
MIX = Mix(
    lanes={"critical": 0.6, "normal": 0.4}, latency_s=(0.05, 0.3), delayed=0.0, refused=0.0, twice=0.0, conflicting=0.0
)
BEFORE_S = 3.0
"""Time with a load before and after a fault."""
AFTER_S = 6.0
ANSWERED_S = 60.0

STALL_S = 10.0
"""When a node ends, its peers know at once. Nothing waits until its silence is noticed, or until a publish has had no
confirm for `CONFIRM_TIMEOUT_S`; on a quiet machine it takes less than two seconds."""
FROZEN_S = 20.0
"""A node that hangs is recognised only by its silence, which takes RabbitMQ's other members 7 to 12 s."""
HUNG_STALL_S = 40.0
"""Two publishes without a confirm (`CONFIRM_TIMEOUT_S`), and as much again for a busy machine. Answers that waited on a
channel that hangs would take 65 s."""


@dataclass
class Service:
    """Two workers on a cluster, with a load."""

    broker: Cluster
    api: FaultyAPI
    crew: Crew
    load: Load
    history: History

    @asynccontextmanager
    async def disturbed(self, title: str, code: str) -> AsyncIterator[None]:
        """Note that a node's connections end meanwhile, and with them the work on what came over them."""
        began_s = time.monotonic()
        yield
        found = Disturbed(
            at_s=began_s, healed_s=time.monotonic(), code=code, title=title, against="a node", in_flight=0
        )
        self.history.events.append(found)

    def calls(self) -> list[Called]:
        return [
            Called(
                at_s=call.started_s, ended_s=call.ended_s, identity=call.prompt.partition(" ")[0], outcome=call.outcome
            )
            for call in self.api.calls
        ]

    async def verdict(self) -> Verdict:
        assert await all_answered(self, within_s=ANSWERED_S)
        return check([*self.history.events, *self.calls()])


@pytest.fixture
async def broker() -> AsyncIterator[Cluster]:
    try:
        async with cluster() as started:
            yield started
    except Unavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@asynccontextmanager
async def at_work(broker: Cluster, nodes: Sequence[Node], folder: Path) -> AsyncIterator[Service]:
    """Workers and applications with the URLs of these nodes; the topology is declared already."""
    urls = [each.amqp_url for each in nodes]
    history = History()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(FaultyAPI())
        environ = environment(",".join(urls), api, LANEKEEPER_MANAGEMENT_URL=nodes[0].management_url)
        crew = await stack.enter_async_context(Crew([environ, environ], folder=folder))
        await crew.ready()
        load = Load(urls, history, rng=random.Random(1), rate=RATE, mix=MIX)
        await stack.enter_async_context(load)
        yield Service(broker, api, crew, load, history)


async def declared(broker: Cluster, folder: Path) -> Node:
    """Declare everything; returns the leader of the critical lane."""
    environ = environment(broker)
    assert (await run("topology", "apply", environ=environ, folder=folder))[0] == 0
    return await broker.leader_of("lane.critical")


def told(what: str, verdict: Verdict, **more: float) -> None:
    stalls = ", ".join(f"{lane} {stall.lasted_s:.2f} s" for lane, stall in sorted(verdict.stalls.items()))
    others = "".join(f", {name} {value:.2f} s" for name, value in more.items())
    print(
        f"\n{what}: {verdict.confirmed} confirmed, {verdict.lost} lost, {verdict.answered_twice} answered twice, "
        f"{verdict.repeated_calls} calls repeated; longest stall {stalls}{others}"
    )


def longest_stall_s(verdict: Verdict) -> float:
    return max(stall.lasted_s for stall in verdict.stalls.values())


async def test_after_a_leader_is_killed_answers_stop_only_for_a_moment_and_no_request_is_lost(
    broker: Cluster, tmp_path: Path
) -> None:
    leader = await declared(broker, tmp_path)
    async with at_work(broker, broker.others(leader), tmp_path) as service:
        async with service.load.asking():
            await asyncio.sleep(BEFORE_S)
            async with service.disturbed("leader killed", "B3"):
                await leader.kill()
            await asyncio.sleep(AFTER_S)
        verdict = await service.verdict()

    told("leader killed", verdict)
    assert verdict.violations == ()
    assert longest_stall_s(verdict) < STALL_S


async def test_clients_and_workers_of_a_killed_node_continue_at_another(broker: Cluster, tmp_path: Path) -> None:
    leader = await declared(broker, tmp_path)
    nodes = (leader, *broker.others(leader))  # workers connect to the first node that answers
    async with at_work(broker, nodes, tmp_path) as service:
        async with service.load.asking():
            await asyncio.sleep(BEFORE_S)
            async with service.disturbed("leader killed", "B3"):
                await leader.kill()
            await asyncio.sleep(AFTER_S)
            await leader.start()
        verdict = await service.verdict()
        crashes = service.crew.crashes

    told("leader killed under its workers", verdict)
    assert verdict.violations == ()
    assert crashes == []


async def test_a_leader_that_hangs_blocks_its_lane_only_until_another_is_elected(
    broker: Cluster, tmp_path: Path
) -> None:
    """Neither do answers wait behind a dead letter that is published to this leader just then."""
    leader = await declared(broker, tmp_path)
    await broker.move_leader("lane.dead", leader)
    async with at_work(broker, broker.others(leader), tmp_path) as service:
        service.load.mix = replace(MIX, oversized=0.0)
        async with service.load.asking():
            await asyncio.sleep(BEFORE_S)
            async with service.disturbed("leader frozen", "B4"):
                await leader.pause()
                service.load.mix = replace(MIX, refused=0.1)  # the first dead letters: see docs/facts.md, section 4
                await asyncio.sleep(FROZEN_S)
                await leader.unpause()
            await asyncio.sleep(BEFORE_S)
        verdict = await service.verdict()

    told("leader frozen", verdict)
    assert verdict.violations == ()
    assert longest_stall_s(verdict) < HUNG_STALL_S


async def test_a_rolling_restart_loses_no_request(broker: Cluster, tmp_path: Path) -> None:
    await declared(broker, tmp_path)
    async with at_work(broker, broker.nodes, tmp_path) as service:
        began_s = time.monotonic()
        async with service.load.asking():
            for node in broker.nodes:
                async with service.disturbed("node restarted", "B5"):
                    await node.drain()
                    await node.restart()
                    await broker.whole()
        verdict = await service.verdict()
        crashes = service.crew.crashes

    told("rolling restart", verdict, all_three=time.monotonic() - began_s)
    assert verdict.violations == ()
    assert crashes == []
    assert longest_stall_s(verdict) < STALL_S
