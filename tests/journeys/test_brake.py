"""What an operator pauses waits in the broker, everything else goes on, and after the pause all of it is answered."""

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from consumers.slots import pausing
from service.simulated.app import SimulatedOptions
from tests.journeys.test_gateway import body
from tests.journeys.test_providers import chain, health, status
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import gate
from tests.support.processes import environment, run
from tests.support.requester import Got, Requester, requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until
from topology.lanes import BATCH, NORMAL

SLOW = SimulatedOptions(latency_ms=200)
FEW = {"batch": {"slots": 2}}
HAIKU, SONNET = BATCH.model, NORMAL.model


class Operator:
    def __init__(self, vhost: Vhost, folder: Path) -> None:
        self._environ, self._folder = environment(vhost), folder

    async def does(self, *line: str, code: int = 0) -> str:
        ended, lines = await run(*line, environ=self._environ, folder=self._folder)
        assert ended == code, lines
        return "\n".join(lines)

    async def lists(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(await self.does("pauses", "--json"))
        return found


def of(tenant: str, vhost: Vhost, **headers: Any) -> dict[str, Any]:
    return {"user_id": vhost.user, "headers": {"x-lane-tenant": tenant, **headers}}


async def all_are_answered(app: Requester, asked: list[str]) -> None:
    for each in asked:
        reply: Got = await app.final(each)
        assert (reply.status, reply.headers["x-lane-attempt"]) == ("ok", 1)


async def starts_in(seconds: float, words: str, *workers: RunningWorker) -> int:
    """How many calls for prompts with these words begin in this time."""
    before = sum(len(worker.calls(words)) for worker in workers)
    await asyncio.sleep(seconds)
    return sum(len(worker.calls(words)) for worker in workers) - before


async def test_a_paused_lane_waits_in_its_queue_while_others_go_on_and_then_all_is_answered(
    vhost: Vhost, tmp_path: Path
) -> None:
    operator = Operator(vhost, tmp_path)
    async with (
        serving(vhost, simulated=SLOW, lanes=FEW) as one,
        serving(vhost, simulated=SLOW, lanes=FEW) as other,
        requester(vhost) as app,
    ):
        asked = [await app.publish({"prompt": f"job {n} [[held]]"}, key="batch.crm.enrich") for n in range(150)]
        await until(lambda: one.calls("job") and other.calls("job"))

        told = await operator.does("pause", "--lane", "batch", "--why", "the provider's bill", "--who", "ann")
        assert told.startswith("lane batch is paused since ")
        assert ": the provider's bill [" in told
        await asyncio.sleep(1)  # within which every worker has seen it
        for worker in (one, other):
            worker.api.release()
        assert await starts_in(1.5, "job", one, other) == 0

        answered = sum(bool(app.finals(each)) for each in asked)
        assert 0 < answered < 150, "what ran has ended, and nothing else"
        await until(lambda: app.holds(150 - answered, "lane.batch", "lane.batch.side.00"))
        await all_are_answered(app, [await app.publish({"prompt": "chat"}) for _ in range(5)])
        assert (one.is_well, other.is_well) == (True, True)
        code, ready = (await health(one))["/readyz"]
        assert (code, ready["reasons"]["lane batch"]) == (200, "paused by an operator")
        assert "lane batch is paused since " in await operator.does("status")
        assert [(pause["kind"], pause["name"], pause["who"]) for pause in (await status(one)).pauses] == [
            ("lane", "batch", "ann")
        ]

        assert (await operator.does("resume", "--lane", "batch")).startswith("resumed: lane batch was paused from ")
        await all_are_answered(app, asked)
        assert len(one.calls("job")) + len(other.calls("job")) == 150
        assert await operator.does("resume", "--lane", "batch") == "it was not paused"
        assert await operator.does("pauses") == "nothing is paused"


async def test_a_paused_tenant_waits_with_its_attempts_unchanged_and_others_pass(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    async with serving(vhost, lanes=FEW, speakers=(vhost.user,)) as worker, requester(vhost) as app:
        await app.read_events()
        await operator.does("pause", "--tenant", "crm", "--why", "a loop")
        key = "batch.jobs.enrich"
        flood = [await app.publish({"prompt": f"crm {n}"}, key=key, **of("crm", vhost)) for n in range(50)]
        others = [await app.publish({"prompt": f"shop {n}"}, key=key, **of("shop", vhost)) for n in range(10)]
        await all_are_answered(app, others)
        assert worker.calls("crm") == []

        async def is_shown() -> bool:
            lanes = {lane.lane: lane for lane in (await status(worker)).lanes}
            return (lanes["batch"].delayed_for or {}).get("paused", {}).get("count") == 50

        await until(is_shown)
        events = [each.json for each in app.events if each.json["event"] == "paused"]
        assert [(each["kind"], each["name"], each["why"]) for each in events] == [("tenant", "crm", "a loop")] * 50

        (pause,) = await operator.lists()
        began_s = time.monotonic()
        await operator.does("resume", pause["id"])
        await all_are_answered(app, flood)
        assert time.monotonic() - began_s < 30


async def test_a_request_whose_deadline_passes_during_a_pause_is_told_so(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    async with serving(vhost, lanes=FEW) as worker, requester(vhost) as app:
        await operator.does("pause", "--app", "crm", "--why", "a loop")
        await operator.does("pause", "--lane", "batch", "--why", "the bill")
        await until(lambda: all(pool.is_paused for pool in worker.parts.pools if "batch" in pool.queue))
        began_s = time.monotonic()
        soon = {"x-lane-deadline-ms": 1500, "x-lane-sent-ms": time.time_ns() // 1_000_000}
        in_lane = await app.publish({"prompt": "job"}, key="batch.jobs.x", headers=soon)
        late = await app.ask({"prompt": "chat"}, key="critical.crm.x", headers=soon)
        for reply, what in ((late, "app crm"), (await app.final(in_lane), "lane batch")):
            assert reply.code == "deadline_exceeded"
            assert f"; {what} was paused by an operator at 20" in reply.json["detail"]
        assert 1.4 < time.monotonic() - began_s < 15
        assert not worker.api.calls


@pytest.mark.every_version
async def test_in_a_paused_lane_what_is_late_is_answered_and_what_is_not_waits_in_order(
    vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the intake and in the queue of what comes back from a delay, however often the queues are looked at."""
    monkeypatch.setattr(pausing, "LATE_EVERY_S", 0.01)
    operator = Operator(vhost, tmp_path)
    async with serving(vhost, lanes={"batch": {"slots": 1}}) as worker, requester(vhost) as app:
        sent = {"x-lane-sent-ms": time.time_ns() // 1_000_000}

        async def publish(words: str, **headers: int) -> str:
            return await app.publish({"prompt": words}, key="batch.jobs.x", headers={**sent, **headers})

        late = [await publish("late", **{"x-lane-delay-ms": 3000, "x-lane-deadline-ms": 1000}) for _ in range(5)]
        await app.control({"pause": {"kind": "lane", "name": "batch"}}, key="pause", user_id=vhost.user)
        pools = [pool for pool in worker.parts.pools if pool.queue.startswith("lane.batch")]
        await until(lambda: all(pool.is_paused for pool in pools))
        kept = [await publish(f"job {n:02}") for n in range(20)]
        late += [await publish("late", **{"x-lane-deadline-ms": 4000}) for _ in range(40)]
        for each in late:
            assert (await app.final(each)).code == "deadline_exceeded"
        assert not any(map(app.finals, kept))
        await operator.does("resume", "--lane", "batch")
        await all_are_answered(app, kept)
        asked = [call.prompt for call in worker.api.calls]
        assert len(asked) == 20
        if tuple(map(int, vhost.version.split(".")[:2])) >= (4, 3):  # before, a part of them was put off
            assert asked == sorted(asked)


async def test_a_pause_with_a_time_ends_by_itself(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    async with serving(vhost, lanes=FEW), requester(vhost) as app:
        began_s = time.monotonic()
        for what in ("--lane=batch", f"--model={SONNET}"):
            await operator.does("pause", what, "--for", "8s")
        ends = {pause["name"]: datetime.fromisoformat(pause["until"]) for pause in await operator.lists()}
        assert ends.keys() == {"batch", SONNET}
        asked = [await app.publish({"prompt": "hi"}, key=f"{lane}.jobs.x") for lane in ("batch", "normal")]
        await until(lambda: any(map(app.finals, asked)), within_s=30)
        assert datetime.now(UTC) >= min(ends.values())
        await all_are_answered(app, asked)
        assert datetime.now(UTC) >= max(ends.values())
        assert time.monotonic() - began_s < 30
        assert await operator.lists() == []


async def test_what_is_paused_before_a_worker_starts_does_not_start(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    async with serving(vhost) as worker, requester(vhost) as app:
        await operator.does("pause", "--lane", "batch")
        await until(lambda: all(pool.is_paused for pool in worker.parts.pools if "batch" in pool.queue))
        asked = [await app.publish({"prompt": f"job {n}"}, key="batch.jobs.x") for n in range(20)]
    # no worker runs: the broker keeps what the operator asks for
    await operator.does("pause", "--lane", "normal", code=1)
    async with serving(vhost, waits=False) as worker, requester(vhost) as app:
        asked += [await app.publish({"prompt": f"job {n}"}, key="normal.jobs.x") for n in range(20)]
        await until(lambda: worker.is_well)
        assert await starts_in(1.5, "job", worker) == 0
        assert {pause["name"] for pause in await operator.lists()} == {"batch", "normal"}
        await operator.does("resume", "--lane", "batch")
        await operator.does("resume", "--lane", "normal")
        await until(lambda: len(worker.calls("job")) == 40)


async def test_a_paused_model_waits_and_what_a_paused_provider_cannot_get_goes_to_the_next(
    vhost: Vhost, tmp_path: Path
) -> None:
    operator = Operator(vhost, tmp_path)
    async with FaultyAPI() as spare, serving(vhost, **chain(spare)) as worker, requester(vhost) as app:
        await operator.does("pause", "--provider", "anthropic")
        await until(lambda: worker.parts.brake.pauses)
        assert (await app.ask({"prompt": "elsewhere"})).headers["x-lane-provider"] == "spare"
        await operator.does("pause", "--model", HAIKU)
        asked = await app.publish({"prompt": "waits"}, key="batch.jobs.x")
        assert (await app.ask({"prompt": "passes"}, key="normal.jobs.x")).headers["x-lane-provider"] == "spare"
        assert len(spare.calls) == 2
        await operator.does("resume", "--model", HAIKU)
        await all_are_answered(app, [asked])
        assert not worker.api.calls
        await operator.does("pause", "--provider", "antropic", code=1)


async def test_over_http_a_lane_is_paused_and_its_waiting_requests_say_so(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, aiohttp.ClientSession() as session:
        wanted = {"kind": "lane", "name": "normal", "why": "maintenance"}
        async with session.post(f"{url}/v1/pauses", json=wanted) as got:
            pause = await got.json()
        await until(lambda: all(pool.is_paused for pool in worker.parts.pools if "normal" in pool.queue))
        async with session.post(f"{url}/v1/requests", json=body("hi")) as got:
            status_url = url + (await got.json())["status_url"]
        async with session.get(status_url) as got:
            told = await got.json()
        assert (told["status"], "position" in told) == ("queued", False)
        assert told["paused"] == {"kind": "lane", "since": pause["since"], "why": "maintenance"}
        async with session.delete(f"{url}/v1/pauses/{pause['id']}") as got:
            assert got.status == 200
        async with session.get(f"{status_url}?wait=30s") as got:
            assert (await got.json())["status"] == "completed"


async def test_only_operators_may_pause(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    wanted = {"pause": {"kind": "tenant", "name": "crm"}}
    async with serving(vhost, control={"operators": ("ops",)}) as worker, requester(vhost) as app:
        for user in (None, vhost.user):
            assert (await app.control(wanted, key="pause", user_id=user)).code == "forbidden_control"
        await operator.does("pause", "--lane", "batch", code=1)
        await operator.does("pauses", code=1)
        assert worker.parts.brake.pauses == {}
        assert worker.parts.control.answers.refused == 4
