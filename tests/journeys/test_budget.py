"""A provider's limit is used in the order of the lanes, without causing 429s.

The simulated provider enforces its limits by buckets of its own; it is the judge.
"""

import asyncio
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from service.simulated.app import SimulatedOptions
from service.status import collect_status
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.pictures import picture, png
from tests.support.processes import environment, lanekeeper
from tests.support.redis import redis_server
from tests.support.requester import Requester, requester
from tests.support.serving import HELD, PLENTY, RunningWorker, meeting, serving
from tests.support.waiting import until

MODEL = "claude-sonnet-5-5"
"""One model for all lanes, so that they share an account."""
UNKNOWN: dict[str, float] = {}
TEN_A_SECOND = SimulatedOptions(requests_per_minute=600, burst_s=10, latency_ms=100)
ONE_A_SECOND = SimulatedOptions(requests_per_minute=60, burst_s=10, latency_ms=50)
KNOWN = {**PLENTY, "requests_per_min": 60}
WIDE = {"batch": {"slots": 32}, "normal": {"slots": 32}}


def refused(api: FaultyAPI) -> int:
    return sum(call.status == 429 for call in api.calls)


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "model": MODEL, **more}


async def flood(app: Requester, jobs: int, *, key: str = "batch.tests.flood") -> list[str]:
    return await asyncio.gather(*(app.publish(body(f"job {n}"), key=key, message_id=f"job-{n}") for n in range(jobs)))


async def status_of(running: RunningWorker) -> tuple[str, ...]:
    parts = running.parts
    return (await collect_status(parts.broker.publishing, lanes=parts.lanes, names=parts.broker.names)).waiting


@pytest.mark.timing
async def test_a_flood_leaves_critical_its_share_and_the_provider_refuses_no_call(vhost: Vhost) -> None:
    """Initially nothing is known of the provider's limits; they are learned from its answers."""
    async with meeting(vhost, simulated=TEN_A_SECOND, lanes=WIDE, budget=UNKNOWN) as (running, app, _):
        jobs = await flood(app, 200)
        await until(lambda: len(running.calls("job")) > 100)  # the burst is used up: from here on ten a second
        waits: list[int] = []
        while len(waits) < 20 and sum(not app.finals(each) for each in jobs) >= 20:  # two seconds of the flood are left
            reply = await app.ask(body(f"chat {len(waits)}"))
            assert reply.status == "ok"
            waits.append(int(reply.headers["x-lane-wait-ms"]))
            await asyncio.sleep(0.2)
        for each in jobs:
            assert (await app.final(each)).status == "ok"

        assert len(waits) >= 5
        print(
            f"critical waited p50 {median(waits):.0f} ms, p95 {quantiles(waits, n=20)[-1]:.0f} ms, {len(waits)} chats"
        )
        assert median(waits) < 1000, "behind the flood each would have waited two seconds or more"
        assert refused(running.api) == 0
        assert len(running.api.calls) == 200 + len(waits), "one call for each"


async def test_the_first_burst_of_a_new_worker_is_not_refused_because_of_the_initial_guess(vhost: Vhost) -> None:
    """The initially assumed limit is 50 requests a minute; the first answer announces a thousand."""
    plenty = SimulatedOptions(requests_per_minute=1000, latency_ms=150)
    async with serving(vhost, simulated=plenty, budget=UNKNOWN) as running, requester(vhost) as app:
        text = "a prompt of a usual length " * 100
        asked = [
            await app.publish(body(f"{n} {text}"), headers={"x-lane-deadline-ms": 30_000}, correlation_id=f"{n}")
            for n in range(102)
        ]
        replies = [await app.final(each, within_s=35) for each in asked]

        assert [reply.code for reply in replies if reply.status != "ok"] == []
        assert refused(running.api) == 0


async def test_a_request_that_cannot_be_in_time_is_refused_at_once_with_the_figures_and_without_a_call(
    vhost: Vhost,
) -> None:
    async with (
        serving(vhost, simulated=ONE_A_SECOND, lanes={"normal": {"slots": 128}}, budget=KNOWN) as running,
        requester(vhost) as app,
    ):
        await flood(app, 100, key="normal.tests.flood")  # ninety seconds of work
        await until(lambda: len(running.api.calls) >= 7)
        hasty = await app.ask(body("hasty"), key="normal.tests.x", headers={"x-lane-deadline-ms": 20_000}, within_s=15)
        assert hasty.code == "deadline_exceeded"
        assert "waiting for rpm of anthropic/sonnet" in hasty.json["detail"]
        assert "ms are left" in hasty.json["detail"]
        assert not running.calls("hasty")
        assert (await app.ask(body("urgent"), headers={"x-lane-deadline-ms": 20_000})).status == "ok"
        assert refused(running.api) == 0


@pytest.mark.timing
async def test_when_more_is_asked_than_the_limit_allows_every_call_that_starts_is_answered(vhost: Vhost) -> None:
    """Twice as many requests as the provider allows, and each answer takes a third of the deadline."""
    busy = SimulatedOptions(requests_per_minute=300, burst_s=2, latency_ms=1000)
    async with (
        serving(vhost, simulated=busy, budget={**PLENTY, "requests_per_min": 300, "burst_s": 2}) as running,
        requester(vhost) as app,
    ):
        assert (await app.ask(body("first"))).status == "ok"
        asked = []
        for n in range(120):
            asked.append(await app.publish(body(f"chat {n}"), headers={"x-lane-deadline-ms": 3000}))
            await asyncio.sleep(0.05)
        replies = [await app.final(each) for each in asked]
        ok = sum(reply.status == "ok" for reply in replies)
        called = len(running.calls("chat"))
        print(f"{ok} answered of {called} calls; {len(asked) - ok} refused")
        assert {reply.code for reply in replies if reply.status == "error"} == {"deadline_exceeded"}
        assert ok > 20
        # On a busy machine some are late; if calls began as late as they may, nearly all would be.
        assert called - ok <= 0.25 * called


async def test_the_reason_of_a_wait_is_in_the_event_and_in_the_status(vhost: Vhost) -> None:
    async with meeting(vhost, simulated=ONE_A_SECOND, lanes=WIDE, budget=KNOWN) as (running, app, _):
        await app.read_events()
        await flood(app, 60)
        await until(lambda: any(each.json["event"] == "deferred" for each in app.events))
        told = [each.json for each in app.events if each.json["event"] == "deferred"]
        assert {each["reason"] for each in told} == {"rpm"}
        assert all(each["delay_ms"] >= 1000 for each in told)

        async def waits() -> bool:
            return any("wait for rpm of anthropic/sonnet" in line for line in await status_of(running))

        await until(waits)


FIFTY_THOUSAND = SimulatedOptions(input_tokens_per_minute=50_000)
PICTURES: dict[str, Any] = {
    "simulated": FIFTY_THOUSAND,
    "budget": {**PLENTY, "input_tokens_per_min": 50_000},
    "lanes": {"batch": {"slots": 4}},
}


def look_at(prompt: str) -> dict[str, object]:
    content = [picture(png(1600, 1200, size=600_000)), {"type": "text", "text": f"{prompt} {HELD}"}]
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": content}]}


async def test_three_pictures_in_batch_run_at_once_and_delay_no_critical_chat(vhost: Vhost) -> None:
    async with serving(vhost, **PICTURES) as running, requester(vhost) as app:
        assert (await app.ask(body("first"))).status == "ok"  # it tells how much the provider's bucket holds
        looks = [await app.publish(look_at(f"picture {n}"), key="batch.tests.look") for n in range(3)]
        await until(lambda: running.api.running == 3)

        assert (await app.ask(body("chat"))).status == "ok"
        assert running.api.running == 3
        running.api.release()
        for each in looks:
            assert (await app.final(each)).json["usage"]["input_tokens"] < 3000
        assert refused(running.api) == 0


async def test_two_processes_with_one_redis_share_one_budget(vhost: Vhost, tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with FaultyAPI(TEN_A_SECOND) as api:
            environ = environment(
                vhost,
                api,
                LANEKEEPER_LOG_LEVEL="debug",
                LANEKEEPER_STORE_URL=redis.url,
                LANEKEEPER_LANES__BATCH__SLOTS="16",
                LANEKEEPER_BUDGET__REQUESTS_PER_MIN="600",
            )
            async with (
                lanekeeper("serve", environ=environ, folder=tmp_path) as one,
                lanekeeper("serve", environ=environ, folder=tmp_path) as other,
                requester(vhost) as app,
            ):
                await asyncio.gather(one.ready(), other.ready())
                jobs = await flood(app, 180)
                for each in jobs:
                    assert (await app.final(each)).status == "ok"

                answered = [len(worker.told("request.answered")) for worker in (one, other)]
                assert min(answered) > 20, "both took their part"
                assert refused(api) == 0
                assert len(api.calls) == 180
                print(answered, len(api.calls))
                times = sorted(call.started_s for call in api.calls)
                assert times[-1] - times[0] > 7, "a hundred at once, then ten a second"
