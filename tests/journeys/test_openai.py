"""OpenAI's client at the gateway: what it meets there with only its base URL changed, also when gateway and worker are
killed. `./dev judges` compares many more calls with those at the API itself."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseErrorEvent
from pydantic import SecretStr

from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.processes import Running, environment, lanekeeper, run
from tests.support.serving import HeldCalls, RunningWorker, serving
from tests.support.waiting import until

MODEL = "gpt-5.5"
EXAMPLE = Path(__file__).parents[2] / "examples/python/background.py"


def said(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}]


def sdk(url: str, key: str = "any", **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60, **options})


@asynccontextmanager
async def served(vhost: Vhost, **spec: Any) -> AsyncIterator[tuple[RunningWorker, HeldCalls, str]]:
    """A worker and a gateway, with one server as provider of both kinds."""
    async with HeldCalls() as api:
        key, url = SecretStr("sk-openai"), SecretStr(f"{api.base_url}/v1")
        providers = {"openai": {"kind": "openai", "api_key": key, "base_url": url}}
        made = serving(vhost, base_url=api.base_url, providers=providers, speakers=(vhost.user,))
        async with made as worker, gate(worker, **spec) as url_:
            try:
                yield worker, api, url_
            finally:
                api.release()


async def test_only_the_base_url_is_changed(vhost: Vhost) -> None:
    async with served(vhost) as (_, api, url), sdk(url) as client, sdk(api.base_url) as direct:
        chunks = await client.chat.completions.create(model=MODEL, messages=said("in pieces"), stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert ("".join(text), len(text) > 3) == ("echo: in pieces", True)
        whole = await client.chat.completions.with_raw_response.create(model=MODEL, messages=said("whole"), n=2)
        assert [each.message.content for each in whole.parse().choices] == ["echo: whole"] * 2
        assert (whole.headers["x-lane-name"], whole.headers["x-lane-provider"]) == ("normal", "openai")
        async with client.responses.stream(model=MODEL, input="a response") as stream:
            assert (await stream.get_final_response()).output_text == "echo: a response"
        found = await client.embeddings.create(model="text-embedding-3-small", input=["a", "b"])
        same = await direct.embeddings.create(model="text-embedding-3-small", input=["a", "b"])
        assert [each.embedding for each in found.data] == [each.embedding for each in same.data]
        assert [model.id async for model in client.models.list()] == [model.id async for model in direct.models.list()]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nobody", messages=said("x"))
        with pytest.raises(openai.NotFoundError, match="call the API itself"):
            await client.moderations.create(input="x")


async def test_both_dialects_wait_in_one_lane_and_each_gets_its_own_answer(vhost: Vhost) -> None:
    async with (
        served(vhost) as (_, _, url),
        sdk(url) as one,
        AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as other,
    ):
        asked = [
            *(one.chat.completions.create(model=MODEL, messages=said(f"one {number}")) for number in range(5)),
            *(
                other.messages.create(model="claude-sonnet-5-5", max_tokens=50, messages=said(f"other {number}"))
                for number in range(5)
            ),
        ]
        answers: list[Any] = await asyncio.gather(*asked)

        assert [each.choices[0].message.content for each in answers[:5]] == [f"echo: one {n}" for n in range(5)]
        assert [each.content[0].text for each in answers[5:]] == [f"echo: other {n}" for n in range(5)]
        with pytest.raises(openai.BadRequestError, match=r"anthropic\.messages"):
            await one.chat.completions.create(
                model=MODEL, messages=said([{"type": "tool_result", "tool_use_id": "t", "content": "x"}])
            )


async def test_while_a_streamed_call_waits_it_gets_comments(vhost: Vhost) -> None:
    body = {"model": MODEL, "messages": said("slow [[held]]"), "stream": True}
    async with served(vhost, ping_every_s=0.2) as (_, api, url), aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=body) as got:
            assert await got.content.readuntil(b"\n\n") == b": waiting\n\n"
            api.release()
            text = (await got.read()).decode()
        assert text.endswith("data: [DONE]\n\n")


async def test_an_error_in_the_middle_ends_a_stream_and_one_before_is_retried_unnoticed(vhost: Vhost) -> None:
    async with served(vhost) as (_, _, url), sdk(url) as client:
        chunks = await client.chat.completions.create(
            model=MODEL, messages=said("[[fault: overloaded x1]] later"), stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]).endswith("later")
        chunks = await client.chat.completions.create(
            model=MODEL, messages=said("[[latency: 3s]] [[fault: error_mid_stream]] broken"), stream=True
        )
        with pytest.raises(openai.APIError, match="overloaded_error in the middle"):
            _ = [chunk async for chunk in chunks]
        events = await client.responses.create(
            model=MODEL, input="[[latency: 3s]] [[fault: error_mid_stream]] broken", stream=True
        )
        *begun, last = [event async for event in events]
        assert isinstance(last, ResponseErrorEvent)
        assert (last.message, last.code) == ("overloaded_error in the middle", "server_error")
        assert last.sequence_number == begun[-1].sequence_number + 1


async def ended(client: AsyncOpenAI, id: str) -> Response:
    while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):  # noqa: ASYNC110  an application polls
        await asyncio.sleep(0.05)
    return found


async def test_a_response_in_the_background_is_polled_followed_cancelled_and_deleted(vhost: Vhost) -> None:
    keys = {hash_of("crm"): {"tenant": "crm"}, hash_of("shop"): {"tenant": "shop"}}
    async with served(vhost, keys=keys) as (_, api, url), sdk(url, "crm") as client, sdk(url, "shop") as stranger:
        begun = await client.responses.create(model=MODEL, input="story [[held]]", background=True)
        assert begun.status in ("queued", "in_progress")
        assert (begun.background, begun.model, begun.output) == (True, MODEL, [])
        await api.until(lambda: api.running == 1)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.retrieve(begun.id)
        api.release("story")
        found = await ended(client, begun.id)
        assert (found.id, found.output_text) == (begun.id, "echo: story [[held]]")
        following = await client.responses.create(model=MODEL, input="next", previous_response_id=begun.id)
        assert following.previous_response_id is not None
        assert following.previous_response_id != begun.id
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(begun.id)

        refused = await client.responses.create(model=MODEL, input="[[fault: invalid]]", background=True)
        failed = await ended(client, refused.id)
        assert failed.error is not None
        assert (failed.status, "its prompt asked for that" in failed.error.message) == ("failed", True)

        slow = await client.responses.create(model=MODEL, input="slow [[held]]", background=True)
        await api.until(lambda: api.running == 1)
        assert (await client.responses.cancel(slow.id)).status == "cancelled"
        assert (await ended(client, slow.id)).status == "cancelled"


async def test_a_stream_in_the_background_goes_on_where_its_client_stopped(vhost: Vhost) -> None:
    async with served(vhost) as (_, _, url), sdk(url) as client:
        prompt = "[[latency: 1s]] in pieces"
        events: list[Any] = []
        async with await client.responses.create(model=MODEL, input=prompt, background=True, stream=True) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 5:
                    break
        id = events[0].response.id
        again = await client.responses.retrieve(id, stream=True, starting_after=events[-1].sequence_number)
        events += [event async for event in again]

        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert (events[0].type, events[-1].type, text) == ("response.created", "response.completed", f"echo: {prompt}")
        assert events[-1].response.id == id
        from_the_start = await client.responses.retrieve(id, stream=True)
        assert [event.sequence_number async for event in from_the_start] == numbers
        with pytest.raises(openai.BadRequestError):
            await client.get(f"/responses/{id}?stream=true&starting_after=x", cast_to=object)


async def test_the_example_prints_a_response_in_the_background_and_again(vhost: Vhost) -> None:
    async def printed(*line: str) -> list[str]:
        environ = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "any"}
        process = await asyncio.create_subprocess_exec(sys.executable, EXAMPLE, *line, env=environ, stdout=PIPE)
        out, _ = await process.communicate()
        return out.decode().splitlines()

    async with served(vhost) as (_, _, url):
        id, text = await printed("a story")
        assert text == "echo: a story"
        assert await printed("--id", id) == [id, text]


async def test_a_submitted_request_may_be_in_openais_dialect(vhost: Vhost) -> None:
    async with served(vhost) as (_, _, url), aiohttp.ClientSession() as session:
        headers = {"x-lane-dialect": "openai.chat"}
        body = {"model": MODEL, "messages": said("submitted")}
        async with session.post(f"{url}/v1/requests", json=body, headers=headers) as got:
            status_url = (await got.json())["status_url"]
        async with session.get(f"{url}{status_url}?wait=30s") as got:
            result = (await got.json())["result"]
        assert result["choices"][0]["message"]["content"] == "echo: submitted"
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as got:
            assert (got.status, "the path says it" in (await got.json())["error"]["message"]) == (400, True)


async def test_a_response_in_the_background_survives_the_death_of_gateway_and_worker(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with HeldCalls() as api:
        environ = environment(
            vhost,
            api,
            LANEKEEPER_PROVIDERS__OPENAI__KIND="openai",
            LANEKEEPER_PROVIDERS__OPENAI__BASE_URL=f"{api.base_url}/v1",
            LANEKEEPER_PROVIDERS__OPENAI__API_KEY="sk-openai",
        )

        assert (await run("topology", "apply", environ=environ, folder=tmp_path))[0] == 0

        async def kill(*processes: Running) -> None:
            for each in processes:
                each.send(signal.SIGKILL)
                await each.ended()

        async with (
            lanekeeper("consume", environ=environ, folder=tmp_path) as worker,
            lanekeeper("gateway", environ=environ, folder=tmp_path) as first,
        ):
            await worker.ready()
            async with sdk((await first.tells("gateway.ready"))["url"]) as client:
                begun = await client.responses.create(model=MODEL, input="story [[held]]", background=True)
                await until(lambda: api.running == 1)
            await kill(worker, first)
        api.release()
        async with (
            lanekeeper("consume", environ=environ, folder=tmp_path) as worker,
            lanekeeper("gateway", environ=environ, folder=tmp_path) as second,
        ):
            await worker.ready()
            async with sdk((await second.tells("gateway.ready"))["url"]) as client:
                found = await ended(client, begun.id)
                assert (found.status, found.output_text) == ("completed", "echo: story [[held]]")
