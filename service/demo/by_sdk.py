"""The demo's act over HTTP: Anthropic's SDK, with only its address changed, makes calls while batch jobs wait."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from anthropic import AnthropicError, AsyncAnthropic, DefaultAsyncHttpxClient

from consumers.capacity.activity import quantile
from consumers.state.following import FollowedStore
from lanekeeper import Client
from lanekeeper.contract.names import LANE_NAME
from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.demo.working import ANSWER_WITHIN_S, answer_of
from service.gateway.app import Gateway, client_for
from service.gateway.server import Server
from topology.lanes import BATCH, CRITICAL

JOBS = 120
"""The number of batch jobs, which are published before the SDK's first call."""
CALLS = 10
"""How many streamed calls the SDK makes in each of the lanes critical and batch."""
CALL_EVERY_S = 0.05
PROMPT = "call {number} of the SDK, and some words to stream"


@dataclass(frozen=True, slots=True)
class BySdk:
    """The results of the demo's act in which Anthropic's SDK calls the gateway while batch jobs wait."""

    jobs: int
    """How many batch jobs were answered."""
    first_ms: dict[str, Sequence[int]]
    """For each lane: the times in ms that its calls waited for the first piece of the answer. Calls whose answer was
    not right are left out."""

    @property
    def is_well(self) -> bool:
        return self.jobs == JOBS and all(len(values) == CALLS for values in self.first_ms.values())

    def wait_ms(self, lane: str, share: float) -> int:
        return quantile(sorted(self.first_ms[lane]), share) or 0


async def run(settings: Settings, client: Client, store: FollowedStore) -> BySdk:
    """Run the demo's act with Anthropic's SDK, on a gateway that uses the broker and the store of the running
    worker."""
    with_gateway = settings.model_copy(update={"gateway": GatewaySettings(port=0)})
    async with client_for(with_gateway) as publishing:
        routes = Gateway(with_gateway, publishing, store)
        async with (
            aclosing(routes),
            Server(routes.reasons, host=with_gateway.gateway.host, port=0, routes=routes) as server,
            AsyncAnthropic(
                api_key="any", base_url=server.url, http_client=DefaultAsyncHttpxClient(trust_env=False)
            ) as sdk,
            asyncio.TaskGroup() as group,
        ):
            jobs = [
                group.create_task(answer_of(client, f"job {number} beside the SDK", key=f"{BATCH.name}.demo.sdk"))
                for number in range(JOBS)
            ]
            calls: dict[str, list[asyncio.Task[int | None]]] = {CRITICAL.name: [], BATCH.name: []}
            for number in range(CALLS):
                await asyncio.sleep(CALL_EVERY_S)
                for lane, tasks in calls.items():
                    tasks.append(group.create_task(_first_ms(sdk, lane, number)))
    return BySdk(
        jobs=sum(job.result() is not None for job in jobs),
        first_ms={
            lane: [found for task in tasks if (found := task.result()) is not None] for lane, tasks in calls.items()
        },
    )


async def _first_ms(sdk: AsyncAnthropic, lane: str, number: int) -> int | None:
    """Make one streamed call with Anthropic's SDK. Returns the time to the first piece of the answer in ms; None if the
    answer is not right."""
    loop = asyncio.get_running_loop()
    began_s, first_s, text = loop.time(), None, PROMPT.format(number=number)
    try:
        async with sdk.messages.stream(
            model="claude-haiku-5-5",
            max_tokens=100,
            messages=[{"role": "user", "content": text}],
            extra_headers={LANE_NAME: lane},
            timeout=ANSWER_WITHIN_S,
        ) as stream:
            answer = ""
            async for piece in stream.text_stream:
                first_s = first_s or loop.time()
                answer += piece
    except AnthropicError:
        return None
    return round(1000 * (first_s - began_s)) if first_s is not None and text in answer else None
