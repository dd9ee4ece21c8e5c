"""Requests in both dialects, OpenAI's and Anthropic's, go through the same lanes, each to providers of its own."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import SecretStr

from lanekeeper import Client, Part
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract import names as n
from service.config.settings import ProviderSettings, Settings
from service.deadletters import DeadLetters, Filter, LetterEdit
from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import gate
from tests.support.requester import Got, Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until

CHAT = {n.DIALECT: n.OPENAI_CHAT}
RESPONSES = {n.DIALECT: n.OPENAI_RESPONSES}
EMBEDDINGS = {n.DIALECT: n.OPENAI_EMBEDDINGS}


def openai(api: FaultyAPI, **more: Any) -> ProviderSettings:
    return ProviderSettings.model_validate(
        {"kind": "openai", "base_url": f"{api.base_url}/v1", "api_key": "sk-simulated", **more}
    )


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], **more}


async def test_each_dialect_is_answered_by_its_provider_byte_for_byte(vhost: Vhost) -> None:
    async with FaultyAPI() as api, serving(vhost, providers={"oai": openai(api)}) as worker, requester(vhost) as app:
        raw = json.dumps(chat("hello", max_completion_tokens=50, n=2, logprobs=None), indent=1).encode()
        told, other, made, vector = await asyncio.gather(
            app.ask(raw, headers=CHAT),
            app.ask({"prompt": "hello"}),
            app.ask({"model": "gpt-5.5", "input": "hello"}, headers=RESPONSES),
            app.ask({"model": "text-embedding-3-small", "input": "hello"}, headers=EMBEDDINGS),
        )

        assert told.json["choices"][0]["message"]["content"] == "echo: hello"
        assert [got.headers["x-lane-provider"] for got in (told, other, made, vector)] == [
            "oai", "anthropic", "oai", "oai"
        ]  # fmt: skip
        assert (told.headers["x-lane-model"], told.headers["x-lane-stop-reason"]) == ("gpt-4o", "stop")
        assert other.text == "echo: hello"
        assert made.json["object"] == "response"
        assert len(vector.json["data"]) == 1
        assert raw in [call.body for call in api.calls]
        assert len(worker.api.calls) == 1


async def parts_of(app: Requester, id: str) -> tuple[list[dict[str, Any]], Got]:
    await until(lambda: any(got.status for got in app.replies[id]))
    *parts, final = app.replies[id]
    return [part.json for part in parts], final


@pytest.mark.parametrize("asks", [True, False], ids=["usage wanted", "usage not wanted"])
async def test_a_chat_stream_has_the_usage_only_if_the_caller_asked_for_it(vhost: Vhost, asks: bool) -> None:
    async with FaultyAPI() as api, serving(vhost, providers={"oai": openai(api)}) as worker, requester(vhost) as app:
        body = chat("one two three", stream=True, **({"stream_options": {"include_usage": True}} if asks else {}))
        await app.publish(body, headers={**CHAT, n.STREAM: True}, message_id="s-1", correlation_id="s-1")
        events, final = await parts_of(app, "s-1")

        assert [event["usage"] for event in events if event.get("usage")] == ([final.json["usage"]] if asks else [])
        assert all("usage" in event for event in events) is asks
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        assert text == "echo: one two three"
        assert final.json["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert final.json["object"] == "chat.completion"
        assert worker.parts.budgeting.registry.calls["oai", "oai/gpt-4o", "gpt-4o"].uncached > 0


async def test_the_dialects_have_budgets_of_their_own(vhost: Vhost) -> None:
    """OpenAI's limit of tokens counts input and output together."""
    slow = SimulatedOptions(requests_per_minute=60)
    async with (
        FaultyAPI(slow) as api,
        serving(vhost, providers={"oai": openai(api)}) as worker,
        requester(vhost) as app,
    ):
        await app.ask(chat("learn the limits"), headers=CHAT)
        accounts = {name: account for name, account, _ in worker.parts.budgeting.budgets.known()}
        limits = accounts["oai/gpt-4o"].per_minute()
        assert limits.requests == 60
        assert limits.input_tokens == limits.output_tokens

        await app.ask({"prompt": "hello"})
        accounts = {name: account for name, account, _ in worker.parts.budgeting.budgets.known()}
        assert accounts["anthropic/sonnet-5-5"].per_minute().requests != 60


async def test_a_body_in_the_wrong_dialect_is_told_which_one_it_looks_like(vhost: Vhost) -> None:
    async with FaultyAPI() as api, serving(vhost, providers={"oai": openai(api)}), requester(vhost) as app:
        as_messages = await app.ask(chat("hello", max_completion_tokens=5))
        as_chat = await app.ask({**chat("hello"), "system": "Be kind."}, headers=CHAT)
        unknown = await app.ask(chat("hello"), headers={n.DIALECT: "openai.chats"})

        assert {got.code for got in (as_messages, as_chat, unknown)} == {"invalid_request"}
        assert "looks like openai.chat (POST /v1/chat/completions)" in as_messages.json["detail"]
        assert "looks like anthropic.messages" in as_chat.json["detail"]
        assert "openai.chat, openai.embeddings" in unknown.json["detail"]


async def test_a_request_fails_over_only_to_providers_of_its_dialect(vhost: Vhost) -> None:
    async with (
        FaultyAPI() as down,
        FaultyAPI() as spare,
        serving(vhost, providers={"a": openai(down), "b": openai(spare)}) as worker,
        requester(vhost) as app,
    ):
        reply = await app.ask(chat("hello [[fault: overloaded]]"), headers=CHAT)
        # both simulated APIs fail at the marker; none of Anthropic's providers was called
        assert reply.status == "error"
        assert len(down.calls) > 0
        assert len(spare.calls) > 0
        assert not worker.api.calls
        # the dialect stays with the request through retries, and in the dead letter
        assert len(down.calls) + len(spare.calls) > 2
        await app.read_dead()
        await until(lambda: bool(app.dead))
        assert app.dead[0].headers[n.DIALECT] == n.OPENAI_CHAT


async def test_the_client_sends_and_reads_openais_dialects_over_amqp_and_http(vhost: Vhost) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        (chat("hello"), n.OPENAI_CHAT),
        ({"model": "gpt-5.5", "input": "hello"}, n.OPENAI_RESPONSES),
    ]
    async with FaultyAPI() as api, serving(vhost, providers={"oai": openai(api)}) as worker, gate(worker) as gateway:
        for url in (vhost.amqp_url, gateway):
            async with Client(url) as client:
                for body, dialect in asked:
                    reply = await client.request(body, key="normal.tests.ask", dialect=dialect)
                    parts = [
                        part
                        async for part in client.stream(body, key="normal.tests.ask", dialect=dialect)
                        if isinstance(part, Part)
                    ]
                    assert (reply.text, "".join(part.text for part in parts)) == ("echo: hello", "echo: hello")


async def test_without_a_provider_of_the_dialect_the_request_is_refused(vhost: Vhost) -> None:
    async with serving(vhost), requester(vhost) as app:
        reply = await app.ask(chat("hello"), headers=CHAT)

        assert reply.code == "forbidden_model"
        assert "speaks openai.chat" in reply.json["detail"]


async def test_embeddings_are_gathered_and_each_asker_gets_its_own(vhost: Vhost) -> None:
    """A wrong one among them takes nothing from the others."""
    lanes = {"normal": {"slots": 32, "gather_embeddings": 32, "gather_window_s": 0.5}}
    async with (
        FaultyAPI() as api,
        serving(vhost, lanes=lanes, providers={"oai": openai(api)}) as worker,
        requester(vhost) as app,
    ):
        texts: list[Any] = [f"text number {nth} {'x' * nth}" for nth in range(20)]

        async def embed(given: Any) -> Got:
            body = {"model": "text-embedding-3-small", "input": given, "encoding_format": "base64"}
            return await app.ask(body, headers=EMBEDDINGS, key="normal.tests.embed")

        alone = [(await embed(text)).json["data"][0] for text in texts[:2]]
        before = len(api.calls)
        gathered = await asyncio.gather(*map(embed, texts))
        calls = len(api.calls) - before

        assert calls <= 10, "a busy machine may spread them over several windows"
        assert [got.json["data"][0] for got in gathered[:2]] == alone
        assert all(len(got.json["data"]) == 1 for got in gathered)
        tokens = [got.json["usage"]["prompt_tokens"] for got in gathered]
        assert tokens[0] < tokens[-1]

        *well, wrong = await asyncio.gather(*map(embed, [*texts[:5], [{}]]))
        assert [got.status for got in well] == ["ok"] * 5
        assert wrong.code == "provider_rejected"
        assert worker.parts.budgeting.registry.calls


async def test_a_dead_letter_is_replayed_with_another_model_of_its_dialect(vhost: Vhost) -> None:
    chosen = Filter(ids=frozenset({"x"}))
    async with FaultyAPI() as api, serving(vhost, providers={"oai": openai(api)}) as worker, requester(vhost) as app:
        body = chat("[[fault: invalid x1]] hi")
        asked = await app.publish(body, headers=CHAT, message_id="x", key="normal.shop.ask")
        assert (await app.final(asked)).code == "provider_rejected"
        async with Connection(vhost.amqp_url, name="operator") as connection:
            letters = DeadLetters(Settings(amqp_url=SecretStr(vhost.amqp_url)), connection)
            await until(lambda: app.holds(1, "lane.dead"))
            assert (await letters.replay(chosen, LetterEdit(model="claude-haiku-5-5"))).replayed == 1
            refused = (await until(lambda: app.finals(asked)[1:]))[0]
            assert (refused.code, refused.json["status"]) == ("provider_rejected", 404)
            await until(lambda: app.holds(1, "lane.dead"))
            assert (await letters.replay(chosen, LetterEdit(model="gpt-5.4-mini"))).replayed == 1
            answered = (await until(lambda: app.finals(asked)[2:]))[0]
        assert answered.json["choices"][0]["message"]["content"] == "echo: [[fault: invalid x1]] hi"
        assert [call.model for call in api.calls] == ["gpt-4o", "claude-haiku-5-5", "gpt-5.4-mini"]
        assert not worker.api.calls, "it is of another dialect"
