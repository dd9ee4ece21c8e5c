"""Workers are killed under a Message Batch: all of its requests are answered, each in one batch of the provider."""

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from consumers.settle import FAILPOINT_EXIT_CODE
from consumers.state import open_store
from consumers.state.base import Identity, StoreSpec
from lanekeeper import Client, Final
from lanekeeper.groups import Outcome
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.brokers import Vhost
from tests.support.private_broker import USER, PrivateBroker
from tests.support.processes import environment, lanekeeper
from tests.support.redis import redis_server
from tests.support.serving import HeldCalls
from tests.support.waiting import until

COUNT = 300
BATCHES = {"ENABLED": "true", "COUNT": "100", "WINDOW_S": "1", "FIRST_POLL_S": "0.1"}
DEATHS = ("after_gather_mark", "after_create", "after_results")


def asked(prompt: str) -> dict[str, Any]:
    return {"model": "claude-haiku-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}


@pytest.mark.slow
async def test_three_workers_are_killed_and_every_request_is_answered_and_paid_once(
    vhost: Vhost, tmp_path: Path
) -> None:
    settings = {f"LANEKEEPER_LANES__BATCH__BATCHES__{name}": each for name, each in BATCHES.items()}
    prompts = [f"number {number}" for number in range(COUNT)]
    requests: list[Any] = [{"custom_id": f"r-{number}", "params": asked(each)} for number, each in enumerate(prompts)]
    async with HeldCalls(SimulatedOptions(batches=BatchOptions(processing_s=0.5))) as api:
        environ = environment(vhost, api, **settings)
        dying = [{**environ, "LANEKEEPER_FAILPOINTS": f"{place}:1"} for place in DEATHS]
        async with (
            lanekeeper("serve", environ=dying[0], folder=tmp_path) as first,
            lanekeeper("gateway", environ=environ, folder=tmp_path) as gateway,
        ):
            client = AsyncAnthropic(
                base_url=(await gateway.tells("gateway.ready"))["url"], api_key="any", max_retries=5
            )
            created = await client.messages.batches.create(requests=requests)
            assert await first.ended(within_s=120) == FAILPOINT_EXIT_CODE
            for each in dying[1:]:
                async with lanekeeper("serve", environ=each, folder=tmp_path) as worker:
                    assert await worker.ended(within_s=120) == FAILPOINT_EXIT_CODE
            async with lanekeeper("serve", environ=environ, folder=tmp_path):

                async def has_ended() -> bool:
                    found = await client.messages.batches.retrieve(created.id)
                    return found.processing_status == "ended"

                await until(has_ended, within_s=120)
            lines = [line async for line in await client.messages.batches.results(created.id)]

            assert [line.custom_id for line in lines] == [f"r-{number}" for number in range(COUNT)]
            for line, prompt in zip(lines, prompts, strict=True):
                assert line.result.type == "succeeded"
                assert line.result.message.content[0].text == f"echo: {prompt}"  # type: ignore[union-attr]
            paid = Counter(
                item.asked.prompt for batch in api.batches.all.values() for item in batch.items if item.asked
            )
            assert paid == Counter(prompts)
            assert not api.calls
            await client.close()


@pytest.mark.slow
async def test_with_a_broker_restart_and_a_store_outage_beside_a_flood_nothing_is_lost_or_paid_twice(
    own_broker: PrivateBroker, tmp_path: Path
) -> None:
    """The flood of another tenant is a group over AMQP."""
    settings = {f"LANEKEEPER_LANES__BATCH__BATCHES__{name}": each for name, each in BATCHES.items()}
    prompts, flood = ([f"{whose} {number}" for number in range(COUNT)] for whose in ("mine", "flood"))
    folder = tmp_path / "redis"
    folder.mkdir()
    async with HeldCalls(SimulatedOptions(batches=BatchOptions(processing_s=0.5))) as api:
        with redis_server(folder, "--appendonly", "yes", "--appendfsync", "always") as redis:
            environ = environment(
                own_broker,
                api,
                LANEKEEPER_STORE_URL=redis.url,
                LANEKEEPER_SPEAKERS=USER,
                **settings,
            )
            async with (
                lanekeeper("serve", environ=environ, folder=tmp_path) as worker,
                lanekeeper("gateway", environ=environ, folder=tmp_path) as gateway,
                Client(own_broker.amqp_url, identified=True) as app,
                AsyncAnthropic(
                    base_url=(await gateway.tells("gateway.ready"))["url"], api_key="any", max_retries=5
                ) as sdk,
            ):
                await worker.ready()
                bodies = [asked(each) for each in flood]
                flooding = asyncio.create_task(app.publish_many(bodies, key="batch.flood.x", group="flood", tenant="b"))
                requests: list[Any] = [{"custom_id": f"r-{n}", "params": asked(each)} for n, each in enumerate(prompts)]
                created = await sdk.messages.batches.create(requests=requests)
                await until(lambda: api.batches.stats()["created"] >= 1, within_s=60)
                redis.kill()
                await asyncio.sleep(2)  # so long it is away
                redis.start()
                await until(lambda: api.batches.stats()["requests"].get("succeeded", 0) >= COUNT // 3, within_s=120)
                await own_broker.kill()
                await own_broker.start()
                group = await flooding
                groups = (created.id, None), (group.id, "b")

                outcomes: dict[str, Outcome] = {}
                async with aclosing(app.group(group.id, tenant="b").results()) as results:
                    async for id, outcome in results:
                        assert id not in outcomes
                        outcomes[id] = outcome

                async def has_ended() -> bool:
                    found = await sdk.messages.batches.retrieve(created.id)
                    return found.processing_status == "ended"

                await until(has_ended, within_s=300)
                lines = [line async for line in await sdk.messages.batches.results(created.id)]
                async with open_store(redis.url, namespace="lane", spec=StoreSpec()) as store:
                    told = [await store.group(Identity(tenant or "", id)) for id, tenant in groups]

        assert [line.custom_id for line in lines] == [f"r-{number}" for number in range(COUNT)]
        assert {line.result.type for line in lines} == {"succeeded"}
        assert sorted(outcomes) == sorted(f"flood.{number}" for number in range(COUNT))
        assert all(isinstance(each, Final) for each in outcomes.values())
        items = [item for batch in api.batches.all.values() for item in batch.items]
        assert Counter(item.asked.prompt for item in items if item.asked) == Counter([*prompts, *flood])
        assert not api.calls
        saved_usd = sum(each.saved_usd for each in told if each is not None)
        assert saved_usd == pytest.approx(float(api.ledger.saved_usd), abs=1e-9)
