"""Requests of a lane with batches, from the requester's side: answered in the provider's batches, each by its own
result, whatever becomes of the others and of the batch."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from service.config.flows import PipelineSettings
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions, SimulatedBatch
from tests.support.brokers import Vhost, close_connection
from tests.support.requester import Got, Requester, requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

KEY = "batch.tests.sum"


def batching(
    vhost: Vhost,
    *,
    options: BatchOptions | None = None,
    speakers: tuple[str, ...] = (),
    pipelines: Mapping[str, PipelineSettings] | None = None,
    **batches: Any,
) -> AbstractAsyncContextManager[RunningWorker]:
    """A worker whose batch lane is batched: after half a second, unless `batches` says otherwise."""
    lane = {"slots": 64, "batches": {"enabled": True, "window_s": 0.5, "first_poll_s": 0.1, **batches}}
    simulated = SimulatedOptions(batches=options or BatchOptions(processing_s=0.5), seed=1)
    given: dict[str, Any] = {} if pipelines is None else {"pipelines": pipelines}
    return serving(vhost, lanes={"batch": lane}, simulated=simulated, speakers=speakers, **given)


async def ask(app: Requester, prompts: Mapping[str, str], **how: Any) -> dict[str, str]:
    """The correlation ids of requests, each by its id."""
    asked = [app.publish({"prompt": prompt}, key=KEY, message_id=id, **how) for id, prompt in prompts.items()]
    return dict(zip(prompts, await asyncio.gather(*asked), strict=True))


async def outcomes(app: Requester, asked: Mapping[str, str]) -> dict[str, Got]:
    """The only final reply to each."""
    found = {id: await app.final(correlation_id) for id, correlation_id in asked.items()}
    assert all(len(app.finals(each)) == 1 for each in asked.values())
    return found


def made(worker: RunningWorker) -> list[SimulatedBatch]:
    return list(worker.api.batches.all.values())


def end(batch: SimulatedBatch) -> None:
    """Let all its requests be answered, and the batch end, when it is asked for next."""
    batch.ends_s = 0
    for item in batch.items:
        item.done_s = 0


async def test_three_hundred_requests_are_one_batch_and_each_gets_its_own_answer(vhost: Vhost) -> None:
    prompts = {f"r-{number}": f"number {number}" for number in range(300)}
    async with batching(vhost, window_s=30, count=300) as worker, requester(vhost.amqp_url) as app:
        found = await outcomes(app, await ask(app, prompts))
        assert {id: reply.text for id, reply in found.items()} == {id: f"echo: {text}" for id, text in prompts.items()}
        assert {reply.headers["x-lane-attempt"] for reply in found.values()} == {1}
        assert [len(batch.items) for batch in made(worker)] == [300]
        assert not worker.api.calls
        await until(lambda: app.holds(0, "lane.batches", "lane.tickets", "lane.batch", "lane.batch.due"))


async def test_five_in_a_hundred_fail_and_five_expire_and_every_publisher_gets_its_own(vhost: Vhost) -> None:
    """What expired in the batch is run live; what is wrong is refused as it would be live."""
    faults = dict.fromkeys(range(0, 100, 20), "[[fault: invalid]]")
    faults |= dict.fromkeys(range(7, 100, 20), "[[fault: expired]]")
    prompts = {f"r-{number}": f"number {number} {faults.get(number, '')}".strip() for number in range(100)}
    async with batching(vhost, count=100, window_s=30) as worker:
        async with requester(vhost.amqp_url) as app, requester(vhost.amqp_url) as other:
            await app.read_dead()
            mine = {id: prompt for id, prompt in prompts.items() if int(id[2:]) % 2}
            theirs = {id: prompt for id, prompt in prompts.items() if id not in mine}
            asked = await asyncio.gather(ask(app, mine), ask(other, theirs))
            found = {**await outcomes(app, asked[0]), **await outcomes(other, asked[1])}
            for number in range(100):
                reply = found[f"r-{number}"]
                if "invalid" in faults.get(number, ""):
                    assert (reply.code, reply.json["status"]) == ("provider_rejected", 400)
                else:
                    assert reply.text == f"echo: {prompts[f'r-{number}']}"
            await until(lambda: len(app.dead) == 5)
        assert [len(batch.items) for batch in made(worker)] == [100]
        assert len(worker.api.calls) == 5
        assert all("expired" in call.prompt for call in worker.api.calls)


async def test_one_invalid_request_among_five_hundred_fails_alone(vhost: Vhost) -> None:
    async with batching(vhost, count=500, window_s=30) as worker, requester(vhost.amqp_url) as app:
        asked = await ask(app, {f"r-{number}": f"number {number}" for number in range(499)})
        wrong = await app.publish({"messages": [{"role": "robot", "content": "hi"}]}, key=KEY)
        assert (await app.final(wrong)).code == "provider_rejected"
        assert {reply.status for reply in (await outcomes(app, asked)).values()} == {"ok"}
        assert [len(batch.items) for batch in made(worker)] == [500]


@pytest.mark.parametrize("fault", ["too_large x2", "invalid x2"])
async def test_a_batch_that_is_refused_as_a_whole_is_split(vhost: Vhost, fault: str) -> None:
    async with batching(vhost, count=8, window_s=30) as worker, requester(vhost.amqp_url) as app:
        worker.api.batches.fail("create", fault)
        prompts = {f"r-{number}": f"number {number}" for number in range(8)}
        found = await outcomes(app, await ask(app, prompts))
        assert {id: reply.text for id, reply in found.items()} == {id: f"echo: {text}" for id, text in prompts.items()}
        assert sorted(len(batch.items) for batch in made(worker)) == [2, 2, 4]
        assert not worker.api.calls


async def test_a_batch_that_vanished_is_run_live(vhost: Vhost) -> None:
    async with batching(vhost, count=5, window_s=30) as worker, requester(vhost.amqp_url) as app:
        worker.api.batches.fail("retrieve", "vanish")
        found = await outcomes(app, await ask(app, {f"r-{number}": f"number {number}" for number in range(5)}))
        assert {reply.status for reply in found.values()} == {"ok"}
        assert len(worker.api.calls) == 5


async def test_a_result_that_is_no_json_costs_its_request_an_attempt(vhost: Vhost) -> None:
    async with batching(vhost, count=5, window_s=1) as worker, requester(vhost.amqp_url) as app:
        prompts = {f"r-{number}": f"number {number}" for number in range(4)} | {"broken": "[[fault: broken_json x1]]"}
        found = await outcomes(app, await ask(app, prompts))
        assert {reply.status for reply in found.values()} == {"ok"}
        assert {id: reply.headers["x-lane-attempt"] for id, reply in found.items()} == {
            **dict.fromkeys(prompts, 1),
            "broken": 2,
        }
        assert [len(batch.items) for batch in made(worker)] == [5, 1]
        assert not worker.api.calls


async def test_an_error_that_may_pass_is_retried_by_its_class(vhost: Vhost) -> None:
    async with batching(vhost, count=2, window_s=1) as worker, requester(vhost.amqp_url) as app:
        prompts = {"well": "hello", "overloaded": "[[fault: overloaded x1]] again"}
        found = await outcomes(app, await ask(app, prompts))
        assert {id: reply.headers["x-lane-attempt"] for id, reply in found.items()} == {"well": 1, "overloaded": 2}
        assert [len(batch.items) for batch in made(worker)] == [2, 1]


async def cancel(app: Requester, id: str) -> None:
    assert (await app.control({"cancel": id}, key="cancel")).control == "accepted"


async def test_one_request_of_a_batch_is_cancelled(vhost: Vhost) -> None:
    options = BatchOptions(processing_s=3600)
    async with batching(vhost, options=options, count=3, window_s=30) as worker, requester(vhost.amqp_url) as app:
        asked = await ask(app, {f"r-{number}": f"number {number}" for number in range(3)})
        await until(lambda: made(worker))
        await cancel(app, "r-1")
        assert (await app.final(asked["r-1"])).code == "cancelled"
        await until(lambda: worker.parts.collector.requests_waiting == 2)
        (batch,) = made(worker)
        assert batch.cancelled_s is None
        end(batch)
        assert (await app.final(asked["r-0"])).status == (await app.final(asked["r-2"])).status == "ok"
        assert worker.parts.collector.counts["answered_late"] == 1
        assert not worker.api.calls


async def test_if_all_its_requests_are_cancelled_the_batch_is(vhost: Vhost) -> None:
    options = BatchOptions(processing_s=3600)
    async with batching(vhost, options=options, count=3, window_s=30) as worker, requester(vhost.amqp_url) as app:
        asked = await ask(app, {f"r-{number}": f"number {number}" for number in range(3)})
        await until(lambda: made(worker))
        for id in asked:
            await cancel(app, id)
        assert {reply.code for reply in (await outcomes(app, asked)).values()} == {"cancelled"}
        await until(lambda: made(worker)[0].cancelled_s is not None)
        assert not worker.api.calls


async def test_a_request_is_run_live_when_its_deadline_comes_near_and_its_later_answer_is_dropped(vhost: Vhost) -> None:
    options = BatchOptions(processing_s=3600)
    limits: dict[str, Any] = {"count": 2, "window_s": 30, "least_s": 60.0, "promote_s": 55.0}
    async with batching(vhost, options=options, **limits) as worker, requester(vhost.amqp_url) as app:
        patient = await ask(app, {"patient": "no hurry"})
        hurried = await ask(app, {"hurried": "soon"}, headers={"x-lane-deadline-ms": 62_000})
        assert (await app.final(hurried["hurried"])).text == "echo: soon"
        assert [call.prompt for call in worker.api.calls] == ["soon"]
        counts = worker.parts.collector.counts
        assert (counts["promoted"], counts["answered_late"]) == (1, 0)
        (batch,) = made(worker)
        end(batch)
        assert (await app.final(patient["patient"])).text == "echo: no hurry"
        await until(lambda: counts["answered_late"] == 1)
        assert len(app.finals(hurried["hurried"])) == 1
        assert len(worker.api.calls) == 1


async def test_the_same_id_of_two_tenants_gets_two_answers(vhost: Vhost) -> None:
    async with batching(vhost, count=2, window_s=30, speakers=(vhost.user,)) as worker, requester(vhost) as app:
        for tenant in ("ann", "bob"):
            headers = {"x-lane-tenant": tenant}
            await app.publish(
                {"prompt": tenant},
                key=KEY,
                message_id="one",
                user_id=vhost.user,
                correlation_id=tenant,
                headers=headers,
            )
        assert [(await app.final(tenant)).text for tenant in ("ann", "bob")] == ["echo: ann", "echo: bob"]
        assert [len(batch.items) for batch in made(worker)] == [2]


async def test_a_batch_that_is_still_created_when_its_channel_is_lost_is_not_created_again(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process gets the ticket again, while its first call goes on at the provider."""
    async with batching(vhost, count=5, window_s=30) as worker, requester(vhost.amqp_url) as app:
        create, creating = worker.api.batches._create, list[asyncio.Task[SimulatedBatch]]()

        async def late(*given: Any) -> SimulatedBatch:
            await asyncio.sleep(12)
            return await create(*given)

        async def goes_on(*given: Any) -> SimulatedBatch:
            creating.append(asyncio.create_task(late(*given)))
            return await asyncio.shield(creating[-1])

        monkeypatch.setattr(worker.api.batches, "_create", goes_on)
        asked = await ask(app, {f"r-{number}": f"number {number}" for number in range(5)})
        await until(lambda: creating)
        await close_connection(vhost, "lanekeeper consume")
        assert {reply.status for reply in (await outcomes(app, asked)).values()} == {"ok"}
        assert [len(batch.items) for batch in made(worker)] == [5]
        assert not worker.api.calls


async def test_items_of_a_cancelled_pipeline_are_in_no_batch(vhost: Vhost) -> None:
    each = {"name": "each", "each": "input", "prompt": "about {{ item }}", "lane": "batch"}
    flows = {"many": PipelineSettings.model_validate({"steps": [each]})}
    async with batching(vhost, pipelines=flows, window_s=600, count=21) as worker, requester(vhost.amqp_url) as app:
        asked = await app.publish(list(range(20)), key=KEY, headers={"x-lane-pipeline": "many"}, message_id="p-1")
        await until(lambda: worker.parts.gatherer.in_hand == 20)
        assert (await app.control({"cancel": "p-1"}, key="cancel")).control == "accepted"
        assert (await app.final(asked)).code == "cancelled"
        assert (await app.ask({"prompt": "another"}, key=KEY)).text == "echo: another"
        assert [len(batch.items) for batch in made(worker)] == [1]
        assert not worker.api.calls


async def test_items_of_a_cancelled_pipeline_leave_their_batch_which_is_cancelled(vhost: Vhost) -> None:
    each = {"name": "each", "each": "input", "prompt": "about {{ item }}", "lane": "batch"}
    flows = {"many": PipelineSettings.model_validate({"steps": [each]})}
    options = BatchOptions(processing_s=3600)
    async with batching(vhost, options=options, pipelines=flows, count=20) as worker, requester(vhost) as app:
        asked = await app.publish(list(range(20)), key=KEY, headers={"x-lane-pipeline": "many"}, message_id="p-1")
        await until(lambda: made(worker))
        assert (await app.control({"cancel": "p-1"}, key="cancel")).control == "accepted"
        assert (await app.final(asked)).code == "cancelled"
        await until(lambda: all(batch.cancelled_s is not None for batch in made(worker)))
        assert not worker.api.calls
