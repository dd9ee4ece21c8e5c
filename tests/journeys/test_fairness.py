"""Tenants share the slots of a lane, with one process or three: none waits behind another's backlog. A flood in one
lane delays no higher lane, inside a lane higher priorities go first, and after trouble a lane has as many slots as
before."""

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from aiormq.exceptions import DeliveryError

from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Ledger, Requester, requester
from tests.support.serving import HeldCalls, meeting, serving
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


def calls_of(api: FaultyAPI, since_s: float) -> Counter[str]:
    return Counter(call.prompt.split(" ")[0] for call in api.calls if call.started_s >= since_s)


@pytest.fixture
async def api() -> AsyncIterator[HeldCalls]:
    async with HeldCalls(SLOW) as started:
        yield started


@pytest.fixture
def environ(vhost: Vhost, api: FaultyAPI) -> dict[str, str]:
    return environment(
        vhost,
        api,
        LANEKEEPER_SPEAKERS=vhost.user,
        LANEKEEPER_LANES__NORMAL__SLOTS="4",
        LANEKEEPER_LANES__NORMAL__SIDE_QUEUES=str(SIDE_QUEUES),
        LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1000000",
        LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN="1000000000",
        LANEKEEPER_BUDGET__OUTPUT_TOKENS_PER_MIN="1000000000",
    )


async def test_a_single_request_does_not_wait_behind_another_tenants_backlog(vhost: Vhost) -> None:
    slow = SimulatedOptions(latency_ms=2000)  # most of the backlog is left, even if publishing it takes a minute
    async with serving(vhost, simulated=slow, lanes=SLOTS, speakers=(vhost.user,)) as own:
        async with requester(vhost) as app:
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
    vhost: Vhost, api: FaultyAPI, environ: dict[str, str], tmp_path: Path, processes: int, tenants: int
) -> None:
    async with requester(vhost) as app, asyncio.TaskGroup() as group, asyncio.timeout(170):
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
    async with meeting(vhost, simulated=SLOW, lanes=SLOTS, speakers=(vhost.user,), fair=fair) as (own, app, _):
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
    async with meeting(vhost, lanes=lanes, speakers=(vhost.user,), fair=fair) as (own, app, _):
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
    async with meeting(vhost, lanes=SLOTS, speakers=(vhost.user,), fair=fair) as (own, app, _):
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
    async with meeting(vhost, lanes=SLOTS, speakers=(vhost.user,), fair=fair) as (own, app, _):
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
        requester(vhost) as app,
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


JOBS = 300
CHATS = 30
"""Requests in each of the two higher lanes."""
CHAT_LATENCY_MS = 300
BLOCK = "[[latency: 90s]] in the way"
"""Has the only slot until it is cancelled, when the others have been published."""
SMALL = {"slots": 1, "side_queues": 0}
"""One slot, and nothing is set aside, so that the order of calls is the lane's order."""


def sent() -> dict[str, int]:
    return {"x-lane-sent-ms": time.time_ns() // 1_000_000}


@pytest.mark.timing
async def test_higher_lanes_do_not_wait_for_a_flood_in_the_batch_lane(vhost: Vhost) -> None:
    async with (
        serving(
            vhost.amqp_url, simulated=SimulatedOptions(latency_ms=CHAT_LATENCY_MS), lanes={"batch": {"slots": 12}}
        ) as worker,
        requester(vhost) as app,
    ):
        flood = await asyncio.gather(
            *(app.publish({"prompt": f"job {n}"}, key="batch.tests.flood", headers=sent()) for n in range(JOBS))
        )
        await until(lambda: worker.api.running == 12)

        chats: dict[str, list[str]] = {"critical": [], "normal": []}
        for n in range(CHATS):
            for lane, asked in chats.items():
                asked.append(await app.publish({"prompt": f"{lane} {n}"}, key=f"{lane}.tests.chat", headers=sent()))
            await asyncio.sleep(0.05)  # a pause as between messages that people type; it waits for nothing
        waits = {lane: [await wait_of(app, each) for each in asked] for lane, asked in chats.items()}
        left = sum(not app.finals(each) for each in flood)
        waits["batch"] = [await wait_of(app, each) for each in flood]

        p50 = {lane: median(each) for lane, each in waits.items()}
        p95 = {lane: sorted(each)[int(len(each) * 0.95)] for lane, each in waits.items()}
        for lane, each in waits.items():
            print(f"{lane}: waited p50 {p50[lane]}, p95 {p95[lane]}, max {max(each)} ms")
        assert left > JOBS / 4, "the chats were answered among the flood, not after it"
        assert p95["batch"] > 3000, "the flood was one"
        # in proportion, because a busy machine makes all of them wait
        assert p50["critical"] * 10 < p95["batch"]
        assert p50["normal"] * 5 < p95["batch"]
        assert max(p95["critical"], p95["normal"]) * 2 < p95["batch"]
        asked_twice = [
            prompt for prompt, calls in Counter(call.prompt for call in worker.api.calls).items() if calls > 1
        ]
        assert not asked_twice
        assert {len(app.finals(each)) for each in [*flood, *chats["critical"], *chats["normal"]]} == {1}


async def wait_of(app: Requester, asked: str) -> int:
    """How long a request waited, according to its reply; checks that the reply is to this request."""
    reply = await app.final(asked)
    assert reply.status == "ok", reply
    return int(reply.headers["x-lane-wait-ms"])


@pytest.mark.parametrize(("stuck", "free"), [("critical", "batch"), ("batch", "critical")])
async def test_requests_of_a_stuck_lane_never_use_another_lanes_own_slots(vhost: Vhost, stuck: str, free: str) -> None:
    """However urgent the stuck lane is, the others continue with their own slots."""
    lanes = {"critical": {"slots": 2}, "normal": {"slots": 2}, "batch": {"slots": 2}}
    async with serving(vhost, lanes=lanes) as worker, requester(vhost) as app:
        held = [
            await app.publish({"prompt": f"held {n} [[latency: 90s]]"}, key=f"{stuck}.tests.x", message_id=f"held-{n}")
            for n in range(6)
        ]
        await until(lambda: worker.api.running == 2)
        for n in range(5):
            assert (await app.ask({"prompt": f"free {n}"}, key=f"{free}.tests.x")).status == "ok"
        assert len(worker.calls("held")) == 2
        assert not any(app.finals(each) for each in held)
        for n in range(6):
            await app.control({"cancel": f"held-{n}"}, key="cancel")


@pytest.mark.every_version
@pytest.mark.parametrize("shuffled", [False, True], ids=["low first", "mixed"])
async def test_inside_a_lane_higher_priorities_go_first(vhost: Vhost, shuffled: bool) -> None:
    """Strictly from 4.3 on and before 4.0. From 4.0 to 4.2 there are two classes, and the higher one gets the larger
    share."""
    priorities = [n % 10 for n in range(40)] if shuffled else sorted(n % 10 for n in range(40))
    async with serving(vhost, lanes={"normal": SMALL}) as worker, requester(vhost) as app:
        await app.publish({"prompt": BLOCK}, key="normal.tests.x", priority=9, message_id="block")
        await until(lambda: worker.api.running == 1)
        asked = [
            await app.publish({"prompt": f"p{priority} n{n:02d}"}, key="normal.tests.x", priority=priority)
            for n, priority in enumerate(priorities)
        ]
        await app.control({"cancel": "block"}, key="cancel")
        for each in asked:
            assert (await app.final(each)).status == "ok"

        worked = [call.prompt for call in worker.api.calls][1:]
        strictly = sorted(worked, key=lambda words: (-int(words[1]), words))
        if is_strict(vhost.version):
            assert worked == strictly
        else:
            places = {words: place for place, words in enumerate(worked)}
            high = [place for words, place in places.items() if int(words[1]) > 4]
            low = [place for words, place in places.items() if int(words[1]) <= 4]
            assert sum(high) / len(high) < sum(low) / len(low) - 5
            for of_class in (sorted(high), sorted(low)):
                in_class = [worked[place] for place in of_class]
                assert in_class == sorted(in_class, key=lambda words: words[-2:]), "first in, first out in a class"


@pytest.mark.every_version
async def test_a_missing_priority_counts_as_4_or_0(vhost: Vhost) -> None:
    """4 in a quorum intake, 0 in a classic one: docs/facts.md, section 1."""
    async with serving(vhost, lanes={"normal": SMALL}) as worker, requester(vhost) as app:
        await app.publish({"prompt": BLOCK}, key="normal.tests.x", priority=9, message_id="block")
        await until(lambda: worker.api.running == 1)
        asked = [await app.publish({"prompt": "unsaid"}, key="normal.tests.x")]
        asked += [await app.publish({"prompt": f"said {p}"}, key="normal.tests.x", priority=p) for p in (1, 3, 5, 6)]
        await app.control({"cancel": "block"}, key="cancel")
        for each in asked:
            await app.final(each)

        worked = [call.prompt for call in worker.api.calls][1:]
        if not is_strict(vhost.version):
            assert worked.index("unsaid") < worked.index("said 1"), "of the lower class, and first in it"
        elif vhost.version.startswith("3."):
            assert worked == ["said 6", "said 5", "said 3", "said 1", "unsaid"]
        else:
            assert worked == ["said 6", "said 5", "unsaid", "said 3", "said 1"]


def is_strict(version: str) -> bool:
    return not version.startswith(("4.0", "4.1", "4.2"))


KEPT_SLOTS = 4
TENANTS = ("a", "b", "c", "d")
BACKLOG = 100
"""At least so many requests wait, however many are answered between two cuts."""
CUTS = 30


async def test_closed_connections_cost_a_lane_no_slots(vhost: Vhost) -> None:
    lanes = {"batch": {"slots": KEPT_SLOTS, "side_queues": 8}}
    quick = SimulatedOptions(latency_ms=150)
    async with meeting(vhost, simulated=quick, lanes=lanes, speakers=(vhost.user,)) as (own, app, _):

        async def ask(tenant: str, prompt: str) -> str:
            sent_ms = time.time_ns() // 1_000_000
            headers = {"x-lane-tenant": tenant, "x-lane-sent-ms": sent_ms}
            return await app.publish({"prompt": prompt}, key="batch.tests.slots", headers=headers, user_id=vhost.user)

        numbers = count()
        for _ in range(CUTS):
            while (number := next(numbers)) < len(own.api.calls) + BACKLOG:
                await ask(TENANTS[number % len(TENANTS)], f"job {number}")
            before = len(own.api.calls)
            connection = await own.parts.broker.consuming.underlying()
            await connection.underlay.close()
            await until(lambda before=before: len(own.api.calls) >= before + 2 * KEPT_SLOTS)
        held = [await ask(tenant, "[[held]]") for tenant in TENANTS * 2]
        await until(lambda: len(own.calls("[[held]]")) == KEPT_SLOTS, within_s=120)
        own.api.release()
        for each in held:
            assert (await app.final(each)).status == "ok"
        await until(lambda: own.parts.lane_slots["batch"].running == 0, within_s=120)
