"""What goes over the wire is what `/asyncapi.json` and `/openapi.json` describe."""

import asyncio
import re
from typing import Any

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from service.gateway.access import hash_of
from tests.support.gate import gate
from tests.support.made_up_calls import make_up
from tests.support.requester import Got, requester
from tests.support.serving import serving
from tests.support.waiting import until

KEY = "lane-key"


class AsyncAPI:
    """Compares messages with the document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.messages = document["components"]["messages"]
        self.seen: set[str] = set()

    def see(self, name: str, got: Got, body: Any = None) -> None:
        """Raises if the message does not fit."""
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


async def fetched(url: str, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url + path) as got:
        return await got.json()


async def test_every_message_over_amqp_fits_the_document(vhost) -> None:
    lanes = {"critical": {"max_attempts": 2}}
    async with (
        serving(vhost.amqp_url, lanes=lanes) as worker,
        gate(worker.settings) as url,
        requester(vhost.amqp_url) as app,
    ):
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

        api.see_answer(await app.control({"cancel": "nobody"}, key="cancel"))
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
        await until(
            lambda: {"started", "retrying", "completed", "failed", "dead"} <= {e.json["event"] for e in app.events}
        )
        for got in app.events:
            api.see(f"event{got.json['event'].capitalize()}", got)

        assert api.seen >= {"part", "answer", "error", "accepted", "pending", "refused", "deadLetter"}


async def test_every_answer_over_http_fits_the_document(vhost) -> None:
    said = {"messages": [{"role": "user", "content": "hello"}]}
    counted = {**said, "model": "claude-sonnet-5-5"}
    failing = {"messages": [{"role": "user", "content": "[[fault: invalid]]"}]}
    named = {"id": "r-1"}
    calls: list[tuple[int, str, str, dict[str, str], Any, dict[str, str]]] = [
        (200, "post", "/v1/messages", {}, said, {}),
        (200, "post", "/v1/messages", {}, {**said, "stream": True}, {}),
        (400, "post", "/v1/messages", {}, {}, {}),
        (400, "post", "/v1/messages", {}, failing, {}),
        (401, "post", "/v1/messages", {}, said, {"x-api-key": "other"}),
        (403, "post", "/v1/messages", {}, said, {"x-lane-name": "batch"}),
        (202, "post", "/v1/requests", {}, said, {"Idempotency-Key": "r-1"}),
        (409, "post", "/v1/requests", {}, failing, {"Idempotency-Key": "r-1"}),
        (400, "post", "/v1/requests", {}, said, {"x-lane-delay-ms": "soon"}),
        (401, "post", "/v1/requests", {}, said, {"x-api-key": "other"}),
        (202, "post", "/v1/requests", {}, failing, {"Idempotency-Key": "r-2"}),
        (200, "get", "/v1/requests/{id}", named, None, {"wait": "20s"}),
        (200, "get", "/v1/requests/{id}", {"id": "r-2"}, None, {"wait": "20s"}),
        (400, "get", "/v1/requests/{id}", named, None, {"wait": "long"}),
        (404, "get", "/v1/requests/{id}", {"id": "r-9"}, None, {}),
        (200, "get", "/v1/requests/{id}/events", named, None, {}),
        (204, "get", "/v1/requests/{id}/events", named, None, {"Last-Event-ID": "the last"}),
        (404, "get", "/v1/requests/{id}/events", {"id": "r-9"}, None, {}),
        (200, "delete", "/v1/requests/{id}", named, None, {}),
        (404, "delete", "/v1/requests/{id}", {"id": "r-9"}, None, {}),
        (200, "post", "/v1/messages/count_tokens", {}, counted, {}),
        (400, "post", "/v1/messages/count_tokens", {}, {**counted, "messages": []}, {}),
        (200, "get", "/v1/models", {}, None, {}),
        (200, "get", "/v1/models/{id}", {"id": "claude-sonnet-5-5"}, None, {}),
        (404, "get", "/v1/models/{id}", {"id": "claude-nobody"}, None, {}),
        (426, "get", "/v1/ws", {}, None, {}),
        (200, "get", "/healthz", {}, None, {}),
        (200, "get", "/readyz", {}, None, {}),
        (200, "get", "/openapi.json", {}, None, {}),
        (200, "get", "/asyncapi.json", {}, None, {}),
    ]
    keys = {hash_of(KEY): {"tenant": "crm", "lanes": ["normal"]}}
    user = vhost.amqp_url.split("//")[1].split(":")[0]
    async with (
        serving(vhost.amqp_url, speakers=(user,)) as worker,
        gate(worker.settings, keys=keys) as url,
        aiohttp.ClientSession(headers={"x-api-key": KEY}) as session,
    ):
        document = await fetched(url, "/openapi.json")
        paths, last = set(document["paths"]), ["0"]
        for status, method, path, where, body, more in calls:
            wait = {"wait": more["wait"]} if "wait" in more else {}
            headers = {name: value for name, value in more.items() if name != "wait"}
            if "Last-Event-ID" in headers:
                headers["Last-Event-ID"] = last[0]
            asked = session.request(method, url + path.format(**where), json=body, headers=headers, params=wait)
            async with asked as got:
                assert got.status == status, (method, path, await got.text())
                described = document["paths"][path][method]["responses"][str(status)]
                for name, header in described.get("headers", {}).items():
                    assert name in got.headers or not header.get("required"), (method, path, name)
                if (content := described.get("content")) is not None:
                    schema = {**content[got.content_type]["schema"], "components": document["components"]}
                    found = await got.json() if got.content_type.endswith("json") else await got.text()
                    Draft202012Validator(schema).validate(found)
                    last = re.findall(r"^id: (\d+)$", str(found), re.MULTILINE)[-1:] or last
            paths.discard(path)
        assert not paths


@pytest.mark.slow
async def test_made_up_calls_through_the_lanes_are_answered_as_the_document_says(vhost) -> None:
    paths = {"/v1/messages", "/v1/requests", "/v1/requests/{id}"}
    async with serving(vhost.amqp_url, retry={"base_s": 0.05, "cap_s": 0.1}) as worker, gate(worker.settings) as url:
        assert await asyncio.to_thread(make_up, url, paths=paths, examples=10) > len(paths)
