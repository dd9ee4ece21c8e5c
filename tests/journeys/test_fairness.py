"""Tenants share the slots of a lane: no tenant waits behind another's backlog, with one process or three."""

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiormq.exceptions import DeliveryError

from service.simulated.app import SimulatedAPI, SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.held_calls import HeldCalls
from tests.support.ledger import Ledger
from tests.support.meeting import meeting
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until

LATENCY_MS = 500
FLOOD = 600
"""Requests of one tenant, published before those of the others."""
PUBLISHED_AT_ONCE = 50
WINDOW_S = 10.0
WITHIN_S = 60
READY_S = 120
LANE = "normal"
SIDE_QUEUES = 8
"""More than there are tenants, so that each has its own."""
SLOTS = {LANE: {"slots": 4, "side_queues": SIDE_QUEUES}}
SLOW = SimulatedOptions(latency_ms=LATENCY_MS)


def of(tenant: str, **more: object) -> dict[str, object]:
    return {"x-lane-tenant": tenant, "x-lane-sent-ms": time.time_ns() // 1_000_000, **more}


async def ask(app: Requester, vhost: Vhost, tenant: str, prompt: str, **how: Any) -> str:
    return await app.publish(
        {"prompt": f"{tenant} {prompt}"}, key=f"{LANE}.tests.fair", headers=of(tenant), user_id=vhost.user, **how
    )


async def flood(app: Requester, vhost: Vhost, tenant: str, count: int = FLOOD, **how: Any) -> list[str]:
    async def some(at: int) -> list[str]:
        return [await ask(app, vhost, tenant, f"job {number}", **how) for number in range(at, count, PUBLISHED_AT_ONCE)]

    found = await asyncio.gather(*(some(at) for at in range(min(count, PUBLISHED_AT_ONCE))))
    return [each for part in found for each in part]


async def keep_asking(app: Requester, vhost: Vhost, tenant: str) -> None:
    for number in range(FLOOD):
        await app.final(await ask(app, vhost, tenant, f"asks {number}"), within_s=WITHIN_S)


def calls_of(api: SimulatedAPI, since_s: float) -> Counter[str]:
    return Counter(call.prompt.split(" ")[0] for call in api.calls if call.started_s >= since_s)


@pytest.fixture
async def api() -> AsyncIterator[HeldCalls]:
    async with HeldCalls(SLOW) as started:
        yield started


@pytest.fixture
def environ(vhost: Vhost, api: SimulatedAPI) -> dict[str, str]:
    return environment(
        vhost.amqp_url,
        vhost.management_url,
        ANTHROPIC_BASE_URL=api.base_url,
        LANEKEEPER_SPEAKERS=vhost.user,
        LANEKEEPER_LANES__NORMAL__SLOTS="4",
        LANEKEEPER_LANES__NORMAL__SIDE_QUEUES=str(SIDE_QUEUES),
        LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1000000",
        LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN="1000000000",
        LANEKEEPER_BUDGET__OUTPUT_TOKENS_PER_MIN="1000000000",
        LANEKEEPER_GATEWAY__PORT="0",
    )


async def test_a_single_request_does_not_wait_behind_another_tenants_backlog(vhost: Vhost) -> None:
    slow = SimulatedOptions(latency_ms=2000)  # most of the backlog is left, even if publishing it takes a minute
    async with serving(vhost.amqp_url, simulated=slow, lanes=SLOTS, speakers=(vhost.user,)) as own:
        async with requester(vhost.amqp_url) as app:
            await flood(app, vhost, "large")
            await until(
                lambda: own.parts.lane_slots[LANE].snapshot()["large"]["set_aside"] > FLOOD / 2, within_s=WITHIN_S
            )
            reply = await app.final(await ask(app, vhost, "small", "asks"), within_s=WITHIN_S)
            left = FLOOD - len(own.calls("large"))
        assert reply.status == "ok"
        assert left > FLOOD / 2, "the others of them wait"
        print(f"the single request waited {reply.headers['x-lane-wait-ms']} ms before {left} of another tenant's")
        assert int(reply.headers["x-lane-wait-ms"]) < 20_000, "before: minutes"
        assert reply.headers["x-lane-attempt"] == 1


@pytest.mark.timing
@pytest.mark.parametrize(("processes", "tenants"), [(1, 3), (3, 2)])
async def test_with_n_waiting_tenants_each_gets_at_least_half_of_an_equal_share(
    vhost: Vhost, api: SimulatedAPI, environ: dict[str, str], tmp_path: Path, processes: int, tenants: int
) -> None:
    async with requester(vhost.amqp_url) as app, asyncio.TaskGroup() as group, asyncio.timeout(170):
        workers = [lanekeeper("serve", environ=environ, folder=tmp_path) for _ in range(processes)]
        started = await asyncio.gather(*(worker.__aenter__() for worker in workers))
        asking: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*(worker.ready(within_s=READY_S) for worker in started))
            await flood(app, vhost, "large")
            asking += [
                group.create_task(keep_asking(app, vhost, f"small-{each}"))
                for each in range(tenants - 1)
                for _ in range(4 * processes)
            ]
            seen = {"large", *(f"small-{each}" for each in range(tenants - 1))}
            await until(lambda: seen <= {call.prompt.split(" ")[0] for call in api.calls}, within_s=WITHIN_S)
            since_s = time.monotonic()
            await asyncio.sleep(WINDOW_S)  # the guarantee is given for this many requests
            calls = calls_of(api, since_s)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*(worker.__aexit__(None, None, None) for worker in workers))
    shares = {tenant: count / calls.total() for tenant, count in calls.items()}
    print(f"{tenants} tenants, {processes} processes: {shares}")
    assert len(shares) == tenants
    assert min(shares.values()) >= 1 / (2 * tenants)


async def test_a_tenant_at_its_in_flight_limit_uses_no_further_slot_and_no_attempt_is_counted(vhost: Vhost) -> None:
    fair = {"tenants": {"*": {"in_flight": 1}}}
    async with meeting(vhost.amqp_url, simulated=SLOW, lanes=SLOTS, speakers=(vhost.user,), fair=fair) as (own, app, _):
        asked = [await ask(app, vhost, "capped", f"job {each} [[held]]") for each in range(6)]
        await until(lambda: own.parts.lane_slots[LANE].snapshot().get("capped", {}).get("set_aside", 0) >= 4)
        own.api.release()
        others = [await ask(app, vhost, f"other-{each}", "asks") for each in range(3)]
        for each in [*others, *asked]:
            reply = await app.final(each, within_s=WITHIN_S)
            assert (reply.status, reply.headers["x-lane-attempt"]) == ("ok", 1)
        began = sorted(call.started_s for call in own.calls("capped"))
        pauses = [after - before for before, after in itertools.pairwise(began)]
        assert min(pauses) >= LATENCY_MS / 1000, "one at a time"
        assert {call.outcome for call in own.api.calls} == {"ok"}

        def told() -> tuple[int, ...]:
            capped = own.parts.lane_slots[LANE].snapshot()["capped"]
            return capped["begun"], capped["running"], capped["in_hand"]

        await until(lambda: told() == (6, 0, 0))  # a reply comes before its request is acknowledged


async def test_requests_for_a_full_side_queue_are_refused_and_other_tenants_are_answered(vhost: Vhost) -> None:
    lanes = {LANE: {"slots": 1, "max_length": 5, "side_queues": 2}}
    fair = {"tenants": {"large": {"in_flight": 1}}}
    async with meeting(vhost.amqp_url, lanes=lanes, speakers=(vhost.user,), fair=fair) as (own, app, _):
        asked = [await ask(app, vhost, "large", "first [[held]]")]
        await until(lambda: own.api.running == 1)
        refused: list[str] = []

        async def one_more() -> bool:
            with suppress(DeliveryError):  # the intake is full until its messages have been looked through
                asked.append(await ask(app, vhost, "large", f"more {len(asked)}"))
            refused[:] = [each for each in asked if app.finals(each) and app.finals(each)[0].status == "error"]
            return bool(refused)

        await until(one_more, within_s=WITHIN_S)
        (problem,) = app.finals(refused[0])
        assert problem.code == "too_many_waiting"
        own.api.release()
        small = await app.final(await ask(app, vhost, "small", "asks"), within_s=WITHIN_S)
        assert small.status == "ok"


@pytest.mark.oldest_version
async def test_expiration_continues_while_a_request_is_set_aside(vhost: Vhost) -> None:
    fair = {"tenants": {"capped": {"in_flight": 1}}}
    async with meeting(vhost.amqp_url, lanes=SLOTS, speakers=(vhost.user,), fair=fair) as (own, app, _):
        await ask(app, vhost, "capped", "first [[held]]")
        await until(lambda: own.api.running == 1)
        await ask(app, vhost, "capped", "head")
        await until(lambda: own.parts.lane_slots[LANE].snapshot()["capped"]["set_aside"] == 1)
        await until(lambda: own.parts.lane_slots[LANE].snapshot()["capped"]["in_hand"] == 1)
        expiring = await ask(app, vhost, "capped", "expiring", expiration="1000")
        expired_s = time.monotonic() + 1.1
        await until(lambda: time.monotonic() > expired_s)
        own.api.release()
        reply = await app.final(expiring, within_s=WITHIN_S)
        assert reply.code == "deadline_exceeded"
        assert "after its expiration of 1000 ms" in reply.json["detail"]
        assert not own.calls("expiring")


@pytest.mark.every_version
async def test_a_tenants_priorities_apply_also_to_requests_that_were_set_aside(vhost: Vhost) -> None:
    fair = {"tenants": {"capped": {"in_flight": 1}}}
    async with meeting(vhost.amqp_url, lanes=SLOTS, speakers=(vhost.user,), fair=fair) as (own, app, _):
        asked = [await ask(app, vhost, "capped", "first [[held]]")]
        await until(lambda: own.api.running == 1)
        asked.append(await ask(app, vhost, "capped", "head"))
        await until(lambda: own.parts.lane_slots[LANE].snapshot()["capped"]["in_hand"] == 1)
        asked += [await ask(app, vhost, "capped", f"low {each}", priority=1) for each in range(3)]
        asked.append(await ask(app, vhost, "capped", "high", priority=9))
        await until(lambda: own.parts.lane_slots[LANE].snapshot()["capped"]["set_aside"] >= 5)
        own.api.release()
        for each in asked:
            assert (await app.final(each, within_s=WITHIN_S)).status == "ok"
        prompts = [call.prompt for call in own.api.calls]
        assert prompts.index("capped high") == 2, "after what ran, and the head that was in hand"


async def test_a_worker_that_is_killed_while_it_sets_requests_aside_loses_none(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    ledger = Ledger(vhost.amqp_url)
    async with (
        lanekeeper("serve", environ=environ, folder=tmp_path) as first,
        lanekeeper("serve", environ=environ, folder=tmp_path) as second,
        requester(vhost.amqp_url) as app,
    ):
        await asyncio.gather(first.ready(within_s=READY_S), second.ready(within_s=READY_S))
        async with ledger.writing(), ledger.reading():
            for at in range(0, 60, 20):
                await asyncio.gather(
                    *(ledger.ask(LANE, f"job {n} [[held]]", id=f"job-{n}") for n in range(at, at + 20))
                )

            async def set_aside() -> int:
                return sum([await app.depth(f"lane.{LANE}.side.{each:02d}") for each in range(SIDE_QUEUES)])

            async def has_begun() -> bool:
                """What is set aside may be in the hand of a worker again; then only the intake shows it."""
                return await set_aside() > 0 or await app.depth(f"lane.{LANE}") < 60 - 2 * 4

            await until(has_begun, within_s=WITHIN_S)
            first.send(signal.SIGKILL)
            api.release()
            await until(lambda: not ledger.lost, within_s=WITHIN_S)
        ledger.check()
        assert not second.has_ended
