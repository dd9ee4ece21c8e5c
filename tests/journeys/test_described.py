"""What goes over the wire is what `/asyncapi.json` and `/openapi.json` describe."""

import asyncio
from typing import Any

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.made_up_calls import make_up
from tests.support.requester import Got, requester
from tests.support.serving import serving
from tests.support.waiting import until


class AsyncAPI:
    def __init__(self, document: dict[str, Any]) -> None:
        self.messages = document["components"]["messages"]
        self.seen: set[str] = set()

    def see(self, name: str, got: Got, body: Any = None) -> None:
        described = self.messages[name]
        Draft202012Validator(described["headers"]).validate(dict(got.headers))
        Draft202012Validator(described["payload"]).validate(got.json if body is None else body)
        if name != "deadLetter":
            assert got.properties.content_type == described["contentType"]
        self.seen.add(name)

    def see_reply(self, got: Got) -> None:
        kinds = {"ok": "answer", "error": "error", None: "part"}
        self.see(kinds[got.status], got)

    def see_answer(self, got: Got) -> None:
        """An answer to a control message."""
        if got.control is None:
            self.see_reply(got)
        else:
            self.see({"error": "refused"}.get(got.control, got.control), got)


async def test_every_message_over_the_websocket_fits_the_document(vhost: Vhost) -> None:
    async with (
        serving(vhost) as worker,
        gate(worker) as url,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{url}/v1/ws") as ws,
    ):
        document = await fetched(url, "/asyncapi.json")
        found: list[dict[str, Any]] = []

        def see(message: dict[str, Any]) -> None:
            name = f"socket{message['type'].capitalize()}"
            payload = document["components"]["messages"][name]["payload"]
            Draft202012Validator({**payload, "components": document["components"]}).validate(message)

        async def say(**message: Any) -> None:
            see(message)
            await ws.send_json(message)

        async def hear(type: str, *kinds: str) -> None:
            async with asyncio.timeout(60):
                while not found or found[-1]["type"] != type or (kinds and found[-1]["kind"] not in kinds):
                    found.append(await ws.receive_json())
                    see(found[-1])

        stream = {"prompt": "in pieces [[fault: cut x1]]", "stream": True}
        await say(type="submit", id="a", body=stream, headers={"x-lane-name": "normal"}, ref="r")
        await hear("entry", "completed")
        await say(type="submit", body={"prompt": "never [[fault: invalid]]"}, subscribe=True)
        await hear("entry", "failed")
        await say(type="submit", id="c", body={"prompt": "later"}, headers={"x-lane-delay-ms": "60000"})
        await hear("submitted")
        await say(type="cancel", id="c", ref="s")
        await hear("entry", "cancelled")
        for type, after in (("subscribe", {"after": 1}), ("unsubscribe", {})):
            await say(type=type, id="c", **after)
            await hear(f"{type}d")
        await say(type="subscribe", id="nobody")
        await hear("problem")
        await say(type="cancel", id="a")
        await hear("cancelling")

        types = {each["type"] for each in found}
        kinds = {each["kind"] for each in found if each["type"] == "entry"}
        assert types == {"submitted", "subscribed", "unsubscribed", "cancelling", "entry", "problem"}
        assert kinds >= {"queued", "started", "event", "retrying", "restart", "completed", "failed", "cancelled"}


async def fetched(url: str, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url + path) as got:
        return await got.json()


async def test_every_message_over_amqp_fits_the_document(vhost: Vhost) -> None:
    lanes = {"critical": {"max_attempts": 2}}
    async with serving(vhost, lanes=lanes) as worker, gate(worker) as url, requester(vhost) as app:
        api = AsyncAPI(await fetched(url, "/asyncapi.json"))
        await app.read_events()
        await app.read_dead()
        request = api.messages["request"]
        sent: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"prompt": "streamed [[fault: cut x1]] in many pieces"}, {"x-lane-stream": True}),
            (
                {"prompt": "delayed [[fault: server_error x1]]"},
                {"x-lane-delay-ms": "100", "x-lane-deadline-ms": 20_000},
            ),
            ({"prompt": "never [[fault: server_error]]"}, {}),
            ({"messages": [{"role": "user", "content": "refused [[fault: invalid]]"}], "more": 1}, {"x-other": 1}),
            ({"prompt": "late"}, {"x-lane-deadline-ms": 1, "x-lane-sent-ms": 1}),
        ]
        for number, (body, headers) in enumerate(sent):
            Draft202012Validator(request["headers"]).validate(headers)
            Draft202012Validator(request["payload"]).validate(body)
            await app.ask(body, headers=headers, message_id=f"r-{number}")
        wrong = {"prompt": 1}
        assert not Draft202012Validator(request["payload"]).is_valid(wrong)
        await app.ask(wrong, message_id="wrong")

        await app.ask(sent[0][0], message_id="r-0")
        api.see_answer(await app.control({"cancel": "nobody"}, key="cancel"))
        await app.ask({"prompt": "late"}, message_id="nobody")
        api.see_answer(await app.control({"cancel": "r-0"}, key="cancel"))
        api.see_answer(await app.control({"result": "r-0"}, key="result"))
        api.see_answer(await app.control({"result": "r-2"}, key="result"))
        api.see_answer(await app.control({"result": "somebody"}, key="result"))
        api.see_answer(await app.control({"result": ""}, key="result"))
        for got in (each for replies in app.replies.values() for each in replies if each.control is None):
            api.see_reply(got)
        await until(lambda: app.dead_of("wrong") and app.dead_of("r-2") and app.dead_of("r-3"))
        for got in app.dead:
            api.see("deadLetter", got)
        seen = {"deferred", "started", "retrying", "completed", "failed", "dead", "replayed", "cancelled"}
        await until(lambda: {each.json["event"] for each in app.events} >= seen)
        for got in app.events:
            api.see(f"event{got.json['event'].capitalize()}", got)

        assert api.seen >= {"part", "answer", "error", "accepted", "pending", "refused", "deadLetter"}


async def test_bodies_of_handlers_and_pipelines_fit_the_documents(vhost: Vhost) -> None:
    handlers = {"echo": {"run": "tests.support.functions:echo"}}
    pipelines = {"p": {"steps": [{"name": "s", "handler": "echo"}]}}
    async with (
        serving(vhost, handlers=handlers, pipelines=pipelines) as worker,
        gate(worker) as url,
        requester(vhost) as app,
        aiohttp.ClientSession() as session,
    ):
        api = AsyncAPI(await fetched(url, "/asyncapi.json"))
        for properties in ({"message_type": "echo"}, {"headers": {"x-lane-pipeline": "p"}}):
            Draft202012Validator(api.messages["flowRequest"]["payload"]).validate([1])
            api.see("flowAnswer", await app.ask([1], **properties))
        opened = await fetched(url, "/openapi.json")
        described = {"components": opened["components"]}
        content = opened["paths"]["/v1/requests"]["post"]["requestBody"]["content"]
        Draft202012Validator({**content["application/json"]["schema"], **described}).validate([1])
        async with session.post(f"{url}/v1/requests", json=[1], headers={"x-lane-type": "echo"}) as got:
            path = (await got.json())["status_url"]
        status = await fetched(url, f"{path}?wait=20s")
        assert status["result"] == {"echo": [1]}
        Draft202012Validator({"$ref": "#/components/schemas/Status", **described}).validate(status)


@pytest.mark.slow
async def test_made_up_calls_through_the_lanes_are_answered_as_the_document_says(vhost: Vhost) -> None:
    paths = {"/v1/messages", "/v1/requests", "/v1/requests/{id}", "/v1/chat/completions", "/v1/responses/{id}"}
    async with serving(vhost, retry={"base_s": 0.05, "cap_s": 0.1}) as worker, gate(worker) as url:
        assert await asyncio.to_thread(make_up, url, paths=paths, examples=10) > len(paths)
