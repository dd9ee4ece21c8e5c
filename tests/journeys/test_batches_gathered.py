"""Requests on their way into a provider's batch: which of them go there, which run live, and that those that wait there
hold up nobody, are counted, told and paused like others."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from consumers.batches import gather
from consumers.spending import PERIODS
from consumers.state.base import DAY_S, Period, StoreUnavailable
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from service.config.flows import HandlerSettings, PipelineSettings
from service.config.settings import CapSettings, CapsSettings
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from service.status import collect_status
from tests.journeys.test_batches import KEY, ask, made, outcomes
from tests.journeys.test_brake import Operator
from tests.support.brokers import Vhost
from tests.support.redis import redis_server
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

LONG: dict[str, Any] = {"window_s": 600.0}
HUNDRED = {f"r-{number}": f"number {number}" for number in range(100)}
ECHO = "tests.support.functions:echo"


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """The setting of a store of either kind."""
    if request.param == "sqlite":
        yield {}
        return
    with redis_server(tmp_path) as redis:
        yield {"store_url": SecretStr(redis.url)}


def lanes(**batches: Any) -> dict[str, Any]:
    return {"batch": {"slots": 4, "batches": {"enabled": True, "first_poll_s": 0.1, **batches}}}


async def test_what_is_gathered_holds_no_slot_and_live_requests_pass_it(vhost: Vhost) -> None:
    async with serving(vhost, lanes=lanes(**LONG)) as worker, requester(vhost) as app:
        asked = await ask(app, HUNDRED)
        await until(lambda: worker.parts.gatherer.in_hand == 100)
        live = await app.ask({"prompt": "now"}, key=KEY, headers={"x-lane-no-batch": True})
        assert live.text == "echo: now"
        assert not any(app.finals(each) for each in asked.values())
        assert [call.prompt for call in worker.api.calls] == ["now"]


async def test_what_cannot_wait_runs_live(vhost: Vhost) -> None:
    handlers = {"echo": HandlerSettings(run=ECHO)}
    async with serving(vhost, lanes=lanes(**LONG), handlers=handlers) as worker, requester(vhost) as app:
        large = "h" * 300_000
        lives = [
            await app.publish({"prompt": "no batch"}, key=KEY, headers={"x-lane-no-batch": "true"}),
            await app.publish({"prompt": "stream"}, key=KEY, headers={"x-lane-stream": True}),
            await app.publish({"prompt": "soon"}, key=KEY, headers={"x-lane-deadline-ms": 3_600_000}),
            await app.publish({"prompt": large}, key=KEY),
            await app.publish({"prompt": "other lane"}, key="normal.tests.sum"),
            await app.publish(21, key=KEY, message_type="echo"),
        ]
        for each in lives:
            assert (await app.final(each)).status == "ok"
        expected = ["hhhhhhhhhh", "no batch", "other lane", "soon", "stream"]
        assert sorted(call.prompt[:10] for call in worker.api.calls) == expected
        assert worker.parts.gatherer.in_hand == 0


async def test_however_many_workers_there_are_batches_are_full(vhost: Vhost, store: dict[str, Any]) -> None:
    options = SimulatedOptions(batches=BatchOptions(processing_s=0.2))
    ours: dict[str, Any] = {"lanes": lanes(count=50, **LONG), "simulated": options, **store}
    async with (
        serving(vhost, **ours) as one,
        serving(vhost, base_url=one.api.base_url, **ours) as other,
        requester(vhost) as app,
    ):
        found = await outcomes(app, await ask(app, HUNDRED))
        assert {id: reply.text for id, reply in found.items()} == {id: f"echo: {text}" for id, text in HUNDRED.items()}
        assert sorted(len(batch.items) for batch in made(one)) == [50, 50]
        gathered = one.parts.gatherer.counts["gathered"], other.parts.gatherer.counts["gathered"]
        assert sorted(gathered) == [0, 100]


async def test_what_a_worker_gathers_when_it_stops_is_gathered_by_the_next(vhost: Vhost) -> None:
    async with requester(vhost) as app:
        async with serving(vhost, lanes=lanes(**LONG)) as first:
            asked = await ask(app, HUNDRED)
            await until(lambda: first.parts.gatherer.in_hand == 100)
        assert await app.depth("lane.batches") == 100
        async with serving(vhost, lanes=lanes(count=100, **LONG)) as second:
            assert {reply.status for reply in (await outcomes(app, asked)).values()} == {"ok"}
            assert [len(batch.items) for batch in made(second)] == [100]
        assert not first.api.calls
        assert not made(first)


async def test_a_group_whose_ticket_failed_once_loses_no_request_to_a_group_that_is_gathered_meanwhile(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = serving(vhost, lanes=lanes(count=10, **LONG))
    async with ours as worker, requester(vhost) as app:
        fails, gather_in_store = [StoreUnavailable("away")], worker.parts.store.gather

        async def once(*args: Any, **kwargs: Any) -> Any:
            if fails:
                raise fails.pop()
            return await gather_in_store(*args, **kwargs)

        monkeypatch.setattr(worker.parts.store, "gather", once)
        first = await ask(app, {f"a-{number}": f"a {number}" for number in range(10)})
        await until(lambda: not fails)
        second = [
            await app.publish(
                {"prompt": f"b {number}", "model": "claude-sonnet-5-5"}, key=KEY, message_id=f"b-{number}"
            )
            for number in range(10)
        ]
        for each in second:
            assert (await app.final(each)).status == "ok"
        assert {reply.status for reply in (await outcomes(app, first)).values()} == {"ok"}
        assert sorted(len(batch.items) for batch in made(worker)) == [10, 10]


async def test_a_tenant_that_varies_its_betas_makes_no_batches_without_end_and_its_neighbours_batch_is_full(
    vhost: Vhost,
) -> None:
    ours = serving(vhost, lanes=lanes(count=100, window_s=25), speakers=(vhost.user,))
    async with ours as worker, requester(vhost) as app:
        how: dict[str, Any] = {"key": KEY, "user_id": vhost.user}

        async def published(tenant: str, number: int, **headers: Any) -> str:
            return await app.publish({"prompt": tenant}, headers={"x-lane-tenant": tenant, **headers}, **how)

        mixed = [
            each
            for number in range(100)
            for each in (
                published("ann", number),
                published("flood", number, **{"anthropic-beta": f"beta-{number}"}),
                published("flood", number, **{"anthropic-beta": f"beta-{number + 100}"}),
            )
        ]
        for each in await asyncio.gather(*mixed):
            assert (await app.final(each)).status == "ok"
        sizes = sorted(len(batch.items) for batch in made(worker))
        assert sizes[-1] == 100, "ann's"
        assert set(sizes[:-1]) == {1}
        assert len(sizes) - 1 <= 2 * gather.GROUPS_PER_TENANT, "in two windows"
        assert len(worker.api.calls) == 200 - len(sizes) + 1


async def test_a_gathered_request_of_a_newer_version_waits_in_its_lane(vhost: Vhost) -> None:
    """As a worker of that version publishes it, in a rolling upgrade. Here it can read it when the field is gone."""
    async with serving(vhost, lanes=lanes(**LONG)) as worker, requester(vhost) as app:
        await app.read_dead()
        body, tail = b'{"prompt": "newer"}', b'{"for": "the provider"}'
        batch = {"provider": "anthropic", "deadline_ms": 2**42, "params_bytes": len(tail), "urgency": 1}
        headers = {"x-lane-batch": json.dumps(batch), "x-lane-routing-key": KEY, "x-lane-attempt": 0}
        await app.publish(body + tail, key="lane.batches", exchange="", headers=headers, message_id="newer")
        await until(lambda: app.holds(0, "lane.batches"))
        await app.read_events()
        await until(lambda: "deferred" in app.events_of("newer"), within_s=120)
        assert worker.is_well
        assert not app.dead
        assert not worker.api.calls


async def test_a_request_published_twice_is_in_one_batch_and_both_get_its_answer(
    vhost: Vhost, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "AGAIN_MS", 200)
    options = SimulatedOptions(batches=BatchOptions(processing_s=1))
    ours = serving(vhost, lanes=lanes(window_s=0.5), simulated=options, **store)
    async with ours as worker, requester(vhost) as app:
        first, repeat = [await app.publish({"prompt": "once"}, key=KEY, message_id="r-1") for _ in range(2)]
        await until(lambda: made(worker))
        late = await app.publish({"prompt": "once"}, key=KEY, message_id="r-1")

        texts = {(await app.final(each)).text for each in (first, repeat, late)}
        assert texts == {"echo: once"}
        assert [len(batch.items) for batch in made(worker)] == [1]
        assert not worker.api.calls
        assert worker.parts.gatherer.counts["repeated"] >= 2
        await until(lambda: app.holds(0, "lane.batches", "lane.tickets", "lane.batch", "lane.batch.due"))


async def test_a_request_with_another_body_under_the_id_of_one_in_a_batch_is_a_conflict(vhost: Vhost) -> None:
    async with serving(vhost, lanes=lanes(**LONG)) as worker, requester(vhost) as app:
        await app.publish({"prompt": "one"}, key=KEY, message_id="r-1")
        await until(lambda: worker.parts.gatherer.in_hand == 1)
        other = await app.ask({"prompt": "another"}, key=KEY, message_id="r-1")
        assert other.code == "idempotency_conflict"


async def test_a_deadline_that_comes_near_while_nobody_gathers_is_met_by_a_live_call(vhost: Vhost) -> None:
    async with requester(vhost) as app:
        async with serving(vhost, lanes=lanes(least_s=60.0, promote_s=30.0, **LONG)) as first:
            near = await app.publish({"prompt": "near"}, key=KEY, headers={"x-lane-deadline-ms": 3_600_000})
            far = await app.publish({"prompt": "far"}, key=KEY)
            await until(lambda: first.parts.gatherer.in_hand == 2)
        async with serving(vhost, lanes=lanes(window_s=0.2, promote_s=7000.0)) as second:
            assert (await app.final(near)).text == "echo: near"
            assert (await app.final(far)).text == "echo: far"
            assert [call.prompt for call in second.api.calls] == ["near"]
            assert [len(batch.items) for batch in made(second)] == [1]


async def test_what_was_gathered_is_run_live_where_batches_are_switched_off(vhost: Vhost) -> None:
    async with requester(vhost) as app:
        async with serving(vhost, lanes=lanes(**LONG)) as first:
            asked = await ask(app, HUNDRED)
            await until(lambda: first.parts.gatherer.in_hand == 100)
        async with serving(vhost) as second:
            assert {reply.status for reply in (await outcomes(app, asked)).values()} == {"ok"}
            assert len(second.api.calls) == 100


async def test_what_an_operator_pauses_is_not_put_into_a_batch(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    ours = lanes(count=10, **LONG)
    async with serving(vhost, lanes=ours) as worker, requester(vhost) as app:
        few = {f"r-{number}": f"number {number}" for number in range(9)}
        asked = await ask(app, few)
        await until(lambda: worker.parts.gatherer.in_hand == 9)
        await operator.does("pause", "--lane", "batch", "--who", "ann")
        await until(lambda: worker.parts.brake.of("lane", "batch"))
        assert not made(worker)
        tenth = await app.publish({"prompt": "other"}, key="batch.other.sum", message_id="tenth")
        assert await app.depth("lane.batch") <= 1  # it waits in its lane

        await operator.does("resume", "--lane", "batch")
        assert (await app.final(tenth)).status == "ok"
        assert {reply.status for reply in (await outcomes(app, asked)).values()} == {"ok"}
        assert not worker.api.calls
        assert sum(len(batch.items) for batch in made(worker)) == 10


async def test_what_was_gathered_of_a_paused_tenant_goes_back_to_its_lane(vhost: Vhost, tmp_path: Path) -> None:
    operator = Operator(vhost, tmp_path)
    ours = serving(vhost, lanes=lanes(count=4, **LONG), speakers=(vhost.user,))
    async with ours as worker, requester(vhost) as app:
        how: dict[str, Any] = {"key": KEY, "user_id": vhost.user}
        ann = [
            await app.publish({"prompt": f"ann {number}"}, headers={"x-lane-tenant": "ann"}, **how)
            for number in range(2)
        ]
        await until(lambda: worker.parts.gatherer.in_hand == 2)
        await operator.does("pause", "--tenant", "ann", "--who", "ann")
        await until(lambda: worker.parts.brake.of("tenant", "ann"))
        bob = [
            await app.publish({"prompt": f"bob {number}"}, headers={"x-lane-tenant": "bob"}, **how)
            for number in range(2)
        ]
        for each in bob:
            assert (await app.final(each)).status == "ok"
        assert worker.parts.gatherer.counts["paused"] == 2
        assert not any(app.finals(each) for each in ann)
        await operator.does("resume", "--tenant", "ann")
        more = [await app.publish({"prompt": f"more {number}"}, **how) for number in range(2)]
        for each in (*ann, *more):
            assert (await app.final(each)).status == "ok"
        assert sorted(len(batch.items) for batch in made(worker)) == [2, 4]
        assert not worker.api.calls


async def test_what_waits_in_batches_is_told(vhost: Vhost) -> None:
    options = SimulatedOptions(batches=BatchOptions(processing_s=3600))
    async with (
        serving(vhost, lanes=lanes(count=100, **LONG), simulated=options) as worker,
        requester(vhost) as app,
        Connection(vhost.amqp_url, name="status") as connection,
    ):
        await app.read_events()
        await ask(app, HUNDRED)
        await until(lambda: made(worker))
        await ask(app, {"more": "more"})
        await until(lambda: worker.parts.gatherer.in_hand == 1)

        async def told() -> bool:
            found = await collect_status(connection, lanes=worker.settings.lane_specs(), names=Names())
            return found.in_batches == 101 and found.batches.get("gathered") == 100

        await until(told)
        state = (await app.control({"result": "more"}, key="result")).json
        assert (state["status"], state["step"]) == ("waiting", "waiting for a batch")
        await until(lambda: "deferred" in app.events_of("more"))
        (event,) = [each.json for each in app.events if each.json["id"] == "more"]
        assert (event["reason"], event["attempt"]) == ("batch", 0)


async def test_a_request_that_is_cancelled_while_it_waits_to_be_gathered_is_in_no_batch(vhost: Vhost) -> None:
    async with serving(vhost, lanes=lanes(count=2, **LONG)) as worker, requester(vhost) as app:
        cancelled = await app.publish({"prompt": "cancelled"}, key=KEY, message_id="r-1")
        await until(lambda: worker.parts.gatherer.in_hand == 1)
        assert (await app.control({"cancel": "r-1"}, key="cancel")).control == "accepted"
        other = await app.publish({"prompt": "other"}, key=KEY, message_id="r-2")
        assert (await app.final(cancelled)).code == "cancelled"
        assert (await app.final(other)).text == "echo: other"


async def test_what_waits_in_batches_counts_against_the_cap_of_the_day(
    vhost: Vhost, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    today = Period(DAY_S, 1, 2**50)  # it does not end
    monkeypatch.setitem(PERIODS, "day", lambda _: today)
    caps = CapsSettings(lanes={"batch": CapSettings(requests=3, usd=1)})
    options = SimulatedOptions(batches=BatchOptions(processing_s=0.5))
    ours = serving(vhost, lanes=lanes(count=3, **LONG), simulated=options, caps=caps, **store)
    async with ours as worker, requester(vhost) as app:
        found = await outcomes(app, await ask(app, {f"r-{number}": f"number {number}" for number in range(5)}))
        assert sorted(reply.status or "" for reply in found.values()) == ["error"] * 2 + ["ok"] * 3
        assert {reply.code for reply in found.values() if reply.status == "error"} == {"deadline_exceeded"}
        assert [len(batch.items) for batch in made(worker)] == [3]
        assert not worker.api.calls
        spent = worker.parts.budgeting.spending.totals()["lane"]["batch"]
        assert spent.requests == 3
        assert spent.saved_usd == pytest.approx(spent.usd)

        async def is_corrected() -> bool:
            taken = await worker.parts.store.take("cap lane batch usd", 0, limit=1, period=today)
            return taken.used == pytest.approx(spent.usd)

        await until(is_corrected)


async def test_the_step_of_a_pipeline_is_answered_in_a_batch(vhost: Vhost) -> None:
    steps = [
        {"name": "first", "prompt": "about {{ input }}", "lane": "batch"},
        {"name": "second", "prompt": "again {{ first }}", "lane": "normal"},
    ]
    ours = serving(
        vhost,
        lanes=lanes(window_s=0.2),
        pipelines={"two": PipelineSettings.model_validate({"steps": steps})},
    )
    async with ours as worker, requester(vhost) as app:
        headers = {"x-lane-pipeline": "two", "x-lane-deadline-ms": 86_400_000}
        reply = await app.ask("rivers", key=KEY, headers=headers)
        assert reply.text == "echo: again echo: about rivers"
        assert [[item.asked and item.asked.prompt for item in batch.items] for batch in made(worker)] == [
            ["about rivers"]
        ]
        assert [call.prompt for call in worker.api.calls] == ["again echo: about rivers"]


async def test_a_full_batch_queue_is_waited_for(vhost: Vhost) -> None:
    """It is never an error, and nothing more is submitted until there is room."""
    options = BatchOptions(processing_s=3600)
    limits: dict[str, Any] = {"budget": {"batch_requests": 3, "requests_per_min": 1e6}}
    ours = serving(vhost, lanes=lanes(count=2, **LONG), simulated=SimulatedOptions(batches=options), **limits)
    async with ours as worker, requester(vhost) as app:
        asked = await ask(app, {f"r-{number}": f"number {number}" for number in range(4)})
        await until(lambda: made(worker) and worker.parts.gatherer.counts["gathered"] == 4)
        (batch,) = made(worker)
        await asyncio.sleep(0.5)  # in which the other would be submitted if it did not wait
        assert made(worker) == [batch]
        batch.ends_s = 0
        for item in batch.items:
            item.done_s = 0
        await until(lambda: len(made(worker)) == 2, within_s=120)
        for item in made(worker)[1].items:
            item.done_s = 0
        made(worker)[1].ends_s = 0
        assert {reply.status for reply in (await outcomes(app, asked)).values()} == {"ok"}
