"""A worker dies between two steps of a request's way into a batch and back: another one goes on. No request is lost,
none is in two batches, and none is answered by another's result."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from consumers.settle import FAILPOINT_EXIT_CODE
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.brokers import Vhost
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.serving import HeldCalls
from tests.support.waiting import until

COUNT = 100
"""More than go back to their lane at a time."""
BATCHES = {
    "ENABLED": "true",
    "COUNT": str(COUNT),
    "WINDOW_S": "2",
    "FIRST_POLL_S": "0.1",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "after_publish",
        "after_ack",
        "after_gather_mark",
        "after_ticket",
        "after_submit_mark",
        "after_create",
        "after_submitted",
        "after_result",
        "after_results",
    ],
)
async def test_a_worker_dies_at_each_step_of_a_batch(vhost: Vhost, tmp_path: Path, place: str) -> None:
    settings = {f"LANEKEEPER_LANES__BATCH__BATCHES__{name}": each for name, each in BATCHES.items()}
    simulated = SimulatedOptions(batches=BatchOptions(processing_s=1))
    async with HeldCalls(simulated) as api, requester(vhost.amqp_url) as app:
        environ = environment(vhost, api, **settings)
        dying = {**environ, "LANEKEEPER_FAILPOINTS": f"{place}:1"}
        prompts = [f"number-{number}" for number in range(COUNT)]
        async with lanekeeper("serve", environ=dying, folder=tmp_path) as first:
            await first.ready()
            publishing = [
                app.publish({"prompt": prompt}, key="batch.tests.sum", message_id=prompt, correlation_id=prompt)
                for prompt in prompts
            ]
            await asyncio.gather(*publishing)
            assert await first.ended() == FAILPOINT_EXIT_CODE
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as second:
            await second.ready()
            await until(lambda: all(app.finals(prompt) for prompt in prompts), within_s=120)
            batched = Counter(
                item.asked.prompt
                for batch in api.batches.all.values()
                for item in batch.items
                if item.asked is not None
            )
            assert batched == Counter(prompts)
            assert not api.calls
            for prompt in prompts:
                assert {reply.text for reply in app.finals(prompt)} == {f"echo: {prompt}"}
            await until(lambda: app.holds(0, "lane.tickets", "lane.batches", "lane.batch", "lane.batch.due"))
