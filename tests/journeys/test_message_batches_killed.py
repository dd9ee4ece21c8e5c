"""Workers are killed under a Message Batch: all of its requests are answered, each in one batch of the provider."""

from collections import Counter
from pathlib import Path

import pytest
from anthropic import AsyncAnthropic

from consumers.settle import FAILPOINT_EXIT_CODE
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.brokers import Vhost
from tests.support.processes import environment, lanekeeper
from tests.support.serving import HeldCalls
from tests.support.waiting import until

COUNT = 300
BATCHES = {"ENABLED": "true", "COUNT": "100", "WINDOW_S": "1", "FIRST_POLL_S": "0.1"}
DEATHS = ("after_gather_mark", "after_create", "after_results")


@pytest.mark.slow
async def test_three_workers_are_killed_and_every_request_is_answered_and_paid_once(
    vhost: Vhost, tmp_path: Path
) -> None:
    settings = {f"LANEKEEPER_LANES__BATCH__BATCHES__{name}": each for name, each in BATCHES.items()}
    prompts = [f"number {number}" for number in range(COUNT)]
    requests = [
        {
            "custom_id": f"r-{number}",
            "params": {
                "model": "claude-haiku-5-5",
                "max_tokens": 50,
                "messages": [{"role": "user", "content": prompt}],
            },
        }
        for number, prompt in enumerate(prompts)
    ]
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
            created = await client.messages.batches.create(requests=requests)  # type: ignore[arg-type]  # TypedDicts
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
