"""A worker dies between two steps of a request's way into a batch and back: another one goes on. No request is lost,
none is in two batches, and none is answered by another's result."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from consumers.batches import collect
from consumers.settle import FAILPOINT_EXIT_CODE
from lanekeeper.contract import names as n
from service.config.settings import ProviderSettings
from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI, hang
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.serving import HeldCalls, serving
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


@pytest.mark.slow
@pytest.mark.parametrize("place", ["after_submit_mark", "after_create", "after_results"])
async def test_a_worker_dies_at_each_step_of_a_batch_of_openais(vhost: Vhost, tmp_path: Path, place: str) -> None:
    settings = {f"LANEKEEPER_LANES__BATCH__BATCHES__{name}": each for name, each in BATCHES.items()}
    chats = {f"chat-{number}": {"messages": [{"role": "user", "content": f"chat {number}"}]} for number in range(20)}
    vectors = {f"vector-{number}": {"input": f"vector {number}"} for number in range(20)}
    simulated = SimulatedOptions(batches=BatchOptions(processing_s=1))
    async with FaultyAPI(simulated) as api, requester(vhost.amqp_url) as app:
        environ = environment(
            vhost,
            LANEKEEPER_PROVIDERS__OAI__KIND="openai",
            LANEKEEPER_PROVIDERS__OAI__BASE_URL=f"{api.base_url}/v1",
            LANEKEEPER_PROVIDERS__OAI__API_KEY="sk-simulated",
            **settings,
        )
        dying = {**environ, "LANEKEEPER_FAILPOINTS": f"{place}:1"}
        async with lanekeeper("serve", environ=dying, folder=tmp_path) as first:
            await first.ready()
            for asked, model, dialect in (
                (chats, "gpt-4o", n.OPENAI_CHAT),
                (vectors, "text-embedding-3-small", n.OPENAI_EMBEDDINGS),
            ):
                how: dict[str, Any] = {"key": "batch.tests.sum", "headers": {n.DIALECT: dialect}}
                publishing = (
                    app.publish({"model": model, **body}, message_id=id, correlation_id=id, **how)
                    for id, body in asked.items()
                )
                await asyncio.gather(*publishing)
            assert await first.ended(within_s=60) == FAILPOINT_EXIT_CODE
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as second:
            await second.ready()
            await until(lambda: all(app.finals(id) for id in (*chats, *vectors)), within_s=120)
            batched = Counter(
                item.asked.prompt
                for batch in api.batches.all.values()
                for item in batch.items
                if item.asked is not None
            )
            assert batched == Counter(id.replace("-", " ") for id in (*chats, *vectors))
            assert not api.calls
            for id in chats:
                told = {reply.json["choices"][0]["message"]["content"] for reply in app.finals(id)}
                assert told == {f"echo: {id.replace('-', ' ')}"}
            for id in vectors:
                assert {reply.json["object"] for reply in app.finals(id)} == {"list"}
            await until(lambda: app.holds(0, "lane.tickets", "lane.batches", "lane.batch", "lane.batch.due"))


class HeldAfterUpload(FaultyAPI):
    """The first batch of OpenAI's API is not created, because its worker dies when the file is there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.uploaded: asyncio.Event | None = None

    async def _openai(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if (uploaded := self.uploaded) is not None and (request.method, request.path) == ("POST", "/v1/batches"):
            self.uploaded = None
            uploaded.set()
            await hang()
        return await super()._openai(request, request_id)


@pytest.mark.slow
async def test_a_file_whose_batch_was_not_created_is_uploaded_again(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker waits as long as the call of the first one may still create the batch."""
    monkeypatch.setattr(collect, "FENCE_S", 3.0)
    lane = {"batches": {"enabled": True, "count": 5, "window_s": 30, "first_poll_s": 0.1}}
    async with HeldAfterUpload() as api, requester(vhost.amqp_url) as app:
        provider = {"kind": "openai", "base_url": f"{api.base_url}/v1", "api_key": "sk-simulated"}
        settings: dict[str, Any] = {
            "lanes": {"batch": lane},
            "providers": {"oai": ProviderSettings.model_validate(provider)},
        }
        uploaded = api.uploaded = asyncio.Event()
        ids = [f"r-{number}" for number in range(5)]
        async with serving(vhost, **settings):
            for id in ids:
                body = {"model": "gpt-4o", "messages": [{"role": "user", "content": id}]}
                headers = {n.DIALECT: n.OPENAI_CHAT}
                await app.publish(body, key="batch.tests.sum", message_id=id, correlation_id=id, headers=headers)
            await asyncio.wait_for(uploaded.wait(), 60)
        assert not api.batches.all
        async with serving(vhost, **settings):
            await until(lambda: all(app.finals(id) for id in ids))
            for id in ids:
                assert {reply.json["choices"][0]["message"]["content"] for reply in app.finals(id)} == {f"echo: {id}"}
            assert [len(batch.items) for batch in api.batches.all.values()] == [5]
            assert not api.calls
