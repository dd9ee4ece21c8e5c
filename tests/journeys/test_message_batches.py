"""Anthropic's Message Batches through the gateway, by the calls of Anthropic's own SDK."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.messages import MessageBatch

from service.gateway.access import hash_of
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.brokers import Vhost
from tests.support.gate import call, gate
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

MODEL = "claude-haiku-5-5"
KEYS = {
    hash_of("lane-one"): {"tenant": "crm", "name": "one"},
    hash_of("lane-two"): {"tenant": "crm", "name": "two"},
    hash_of("lane-other"): {"tenant": "other"},
}


def asked(prompt: str = "hello", **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": prompt}], **extra}


def some(count: int, prompt: str = "hello") -> list[Any]:
    return [{"custom_id": f"r-{number}", "params": asked(f"{prompt} {number}")} for number in range(count)]


@asynccontextmanager
async def door(
    vhost: Vhost, *, batches: bool = True, processing_s: float = 0.2, **spec: Any
) -> AsyncIterator[tuple[RunningWorker, str]]:
    lane = {"slots": 32, "batches": {"enabled": batches, "window_s": 0.2, "first_poll_s": 0.1}}
    simulated = SimulatedOptions(batches=BatchOptions(processing_s=processing_s))
    async with (
        serving(vhost, lanes={"batch": lane}, simulated=simulated, speakers=(vhost.user,)) as worker,
        gate(worker, **spec) as url,
    ):
        yield worker, url


def sdk(url: str, key: str = "lane-one", **options: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0, **options)


async def ended(client: AsyncAnthropic, batch: MessageBatch) -> MessageBatch:
    found = batch

    async def has_ended() -> bool:
        nonlocal found
        found = await client.messages.batches.retrieve(batch.id)
        return found.processing_status == "ended"

    await until(has_ended, within_s=30)
    return found


async def results(client: AsyncAnthropic, batch: MessageBatch) -> dict[str, Any]:
    return {each.custom_id: each.result async for each in await client.messages.batches.results(batch.id)}


def counts(batch: MessageBatch) -> Mapping[str, object]:
    return {kind: number for kind, number in batch.request_counts.to_dict().items() if number}


async def test_a_batch_is_answered_like_by_the_api(vhost: Vhost) -> None:
    async with door(vhost) as (worker, url), sdk(url) as client:
        created = await client.messages.batches.create(requests=some(20))
        assert created.id.startswith("msgbatch_")
        assert created.processing_status == "in_progress"
        assert counts(created) == {"processing": 20}
        assert created.results_url is None

        batch = await ended(client, created)
        found = await results(client, batch)

        assert counts(batch) == {"succeeded": 20}
        assert batch.ended_at is not None
        assert batch.ended_at >= batch.created_at
        assert list(found) == [f"r-{number}" for number in range(20)]
        assert all(each.type == "succeeded" for each in found.values())
        assert "hello 7" in found["r-7"].message.content[0].text
        assert worker.api.batches.stats()["requests"] == {
            "succeeded": 20
        }  # in the provider's batches, at half the price
        assert not worker.api.calls


async def test_what_failed_is_told_by_its_line_and_counted(vhost: Vhost) -> None:
    async with door(vhost) as (_, url), sdk(url) as client:
        requests = [
            *some(1),
            {"custom_id": "wrong", "params": asked("[[fault: invalid]]")},
            {"custom_id": "nobody", "params": {**asked(), "model": "claude-nobody"}},
        ]
        batch = await ended(client, await client.messages.batches.create(requests=requests))
        found = await results(client, batch)

        assert counts(batch) == {"succeeded": 1, "errored": 2}
        assert found["wrong"].type == "errored"
        assert found["wrong"].error.error.type == "invalid_request_error"
        assert found["nobody"].error.error.type == "not_found_error"


async def test_without_batches_at_the_provider_it_runs_live_and_says_so(vhost: Vhost) -> None:
    async with door(vhost, batches=False) as (worker, url), sdk(url) as client:
        made = await client.messages.batches.with_raw_response.create(requests=some(5))
        batch = await ended(client, await made.parse())

        assert made.headers["x-lane-batched"] == "live"
        assert counts(batch) == {"succeeded": 5}
        assert len(worker.api.calls) == 5


async def test_each_caller_sees_its_own_in_pages(vhost: Vhost) -> None:
    async with (
        door(vhost, keys=KEYS) as (_, url),
        sdk(url) as one,
        sdk(url, "lane-two") as two,
        sdk(url, "lane-other") as other,
    ):
        mine = [(await one.messages.batches.create(requests=some(1))).id for _ in range(3)]
        await two.messages.batches.create(requests=some(1))

        newest = await one.messages.batches.list(limit=2)
        assert [each.id for each in newest.data] == mine[:0:-1]
        assert newest.has_more
        assert [each.id async for each in one.messages.batches.list(limit=2)] == mine[::-1]
        before = await one.messages.batches.list(before_id=mine[0], limit=1)
        assert [each.id for each in before.data] == [mine[1]]
        assert not (await other.messages.batches.list()).data
        for stranger in (two, other):
            with pytest.raises(anthropic.NotFoundError):
                await stranger.messages.batches.retrieve(mine[0])
            with pytest.raises(anthropic.NotFoundError):
                await stranger.messages.batches.cancel(mine[0])


async def test_a_cancelled_batch_ends_with_what_was_not_begun_and_can_be_deleted(vhost: Vhost) -> None:
    async with door(vhost, processing_s=60) as (worker, url), sdk(url) as client:
        created = await client.messages.batches.create(requests=some(10))
        await until(lambda: worker.api.batches.stats()["processing"] >= 1, within_s=20)
        with pytest.raises(anthropic.BadRequestError, match="cannot be deleted"):
            await client.messages.batches.delete(created.id)
        with pytest.raises(anthropic.NotFoundError, match="no results"):
            await client.get(f"/v1/messages/batches/{created.id}/results", cast_to=object)

        cancelled = await client.messages.batches.cancel(created.id)
        assert cancelled.cancel_initiated_at is not None
        batch = await ended(client, created)

        assert counts(batch) == {"canceled": 10}
        assert {each.type for each in (await results(client, batch)).values()} == {"canceled"}
        with pytest.raises(anthropic.BadRequestError, match="cannot be canceled"):
            await client.messages.batches.cancel(created.id)
        deleted = await client.messages.batches.delete(created.id)
        assert deleted.type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(created.id)
        await until(lambda: worker.api.batches.stats()["processing"] == 0, within_s=20)


async def test_the_same_batch_again_is_the_same_and_paid_once(vhost: Vhost) -> None:
    async with door(vhost) as (worker, url), sdk(url) as client:
        key = {"Idempotency-Key": "k-1"}
        first = await client.messages.batches.create(requests=some(3), extra_headers=key)
        again = await client.messages.batches.create(requests=some(3), extra_headers=key)
        with pytest.raises(anthropic.ConflictError):
            await client.messages.batches.create(requests=some(4), extra_headers=key)
        another = await client.messages.batches.create(requests=some(3))
        await ended(client, first)
        await ended(client, another)

        assert again.id == first.id != another.id
        assert worker.api.batches.stats()["requests"] == {"succeeded": 6}


async def test_a_packed_batch_and_one_of_another_lane_are_answered(vhost: Vhost) -> None:
    async with door(vhost) as (worker, url), sdk(url) as client:
        packed = gzip.compress(json.dumps({"requests": some(3)}).encode())
        got = await call("POST", f"{url}/v1/messages/batches", packed, content_encoding="gzip", x_lane_name="normal")
        batch = await ended(client, MessageBatch.model_validate(got.body))

        assert counts(batch) == {"succeeded": 3}
        assert got.headers["x-lane-batched"] == "live"
        assert len(worker.api.calls) == 3
        for header in ("x-lane-delay-ms", "x-lane-group", "x-lane-stream"):
            wrong = await call("POST", f"{url}/v1/messages/batches", packed, **{header: "1000"})
            assert wrong.status == 400, header


async def test_a_gateway_that_dies_while_it_publishes_leaves_nothing(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are in the lane, but none runs."""
    monkeypatch.setattr("service.gateway.batches.LEASE_MS", 3000)
    async with door(vhost, batches=False) as (worker, url), sdk(url) as client:
        async with gate(worker) as dying:
            sealing = asyncio.Event()

            async def never(*_: Any) -> None:
                sealing.set()
                await asyncio.Event().wait()

            with monkeypatch.context() as patched:
                patched.setattr("consumers.state.groups.Groups.seal_group", never)
                patched.setattr("consumers.state.groups.Groups.discard_group", never)
                async with sdk(dying, timeout=60) as caller:
                    creating = asyncio.create_task(
                        caller.messages.batches.create(requests=some(10), extra_headers={"Idempotency-Key": "k"})
                    )
                    await sealing.wait()
                    creating.cancel()
        assert not (await client.messages.batches.list()).data

        again: MessageBatch | None = None

        async def created() -> bool:
            nonlocal again
            with suppress(anthropic.ConflictError):  # while the other gateway may still be creating it
                again = await client.messages.batches.create(requests=some(10), extra_headers={"Idempotency-Key": "k"})
            return again is not None

        await until(created, within_s=20)
        assert not worker.api.calls
        assert again is not None

        assert counts(await ended(client, again)) == {"succeeded": 10}
        assert len(worker.api.calls) == 10
