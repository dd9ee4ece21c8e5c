"""What goes over the wire is what `/asyncapi.json` and `/openapi.json` describe."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from lanekeeper import Client, ControlRefused
from tests.support.brokers import Vhost
from tests.support.described_calls import (
    KEY,
    KEYS,
    SAID,
    Described,
    refused_by_the_provider,
    refused_without_a_broker,
)
from tests.support.gate import gate
from tests.support.made_up_calls import make_up
from tests.support.requester import Got, requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

MESSAGES = "/v1/messages"
UPGRADE = {
    "connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip
UNANSWERED = {
    ("post", MESSAGES, 415): "a provider's refusal, and the simulated one has none like it",
    ("post", MESSAGES, 422): "the same",
    ("delete", "/v1/requests/{id}", 529): "the broker would have to refuse a control message",
}
"""Documented statuses that no call here is answered with, and why."""


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


async def test_every_message_over_the_websocket_fits_the_document(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url) as worker,
        gate(worker.settings) as url,
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
            """Read until such a message."""
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


async def test_every_answer_over_http_fits_the_document_and_every_status_is_answered(vhost: Vhost) -> None:
    user = vhost.amqp_url.split("//")[1].split(":")[0]
    async with (
        serving(vhost.amqp_url, speakers=(user,), bodies={"answers_over_bytes": 4096}) as worker,
        gate(worker.settings, keys=KEYS) as url,
        aiohttp.ClientSession(headers={"x-api-key": KEY}) as session,
    ):
        api = Described(await fetched(url, "/openapi.json"))
        call = partial(api.call, session, url)
        await answered(call)
        async with session.ws_connect(f"{url}/v1/ws"):
            api.seen.add(("get", "/v1/ws", 101))
        await refused_where_it_is_full(api, worker)
        await refused_by_a_worker(call, worker)
        await refused_because_it_is_lost(call, worker)
    await refused_without_a_broker(api)
    await refused_by_the_provider(api)
    assert api.unseen == UNANSWERED.keys()


async def answered(call: Callable[..., Coroutine[Any, Any, str]]) -> None:
    """What ends well, and what the gateway refuses by itself."""
    messages, requests, one, events = MESSAGES, "/v1/requests", "/v1/requests/{id}", "/v1/requests/{id}/events"
    failing = {"messages": [{"role": "user", "content": "[[fault: invalid]]"}]}
    for path in ("/healthz", "/readyz", "/openapi.json", "/asyncapi.json", "/v1/models"):
        await call("get", path, 200)
    await call("get", "/v1/models/{id}", 200, id="claude-sonnet-5-5")
    await call("get", "/v1/models/{id}", 404, id="claude-nobody")
    await call("get", "/v1/ws", 426)
    await call("post", f"{messages}/count_tokens", 200)
    await call("post", f"{messages}/count_tokens", 400, json={**SAID, "messages": []})
    await call("post", messages, 200)
    await call("post", messages, 200, json={**SAID, "stream": True})
    await call("post", messages, 400, json={})
    await call("post", messages, 403, headers={"x-lane-name": "batch"})
    await call("post", requests, 202, headers={"Idempotency-Key": "r-1"})
    for path in (messages, requests):
        await call("post", path, 409, json=failing, headers={"Idempotency-Key": "r-1"})
    await call("post", requests, 400, headers={"x-lane-delay-ms": "soon"})
    await call("post", requests, 202, json=failing, headers={"Idempotency-Key": "r-2"})
    for id in ("r-1", "r-2"):
        await call("get", one, 200, id=id, params={"wait": "20s"})
    await call("get", one, 400, params={"wait": "long"})
    numbers = re.findall(r"^id: (\d+)$", await call("get", events, 200), re.MULTILINE)
    await call("get", events, 204, headers={"Last-Event-ID": numbers[-1]})
    await call("get", events, 400, headers={"Last-Event-ID": "last"})
    await call("delete", one, 200)
    for method, path in (("get", one), ("get", events), ("delete", one)):
        await call(method, path, 404, id="r-9")


async def refused_because_it_is_lost(call: Callable[..., Coroutine[Any, Any, str]], worker: RunningWorker) -> None:
    """An answer that was stored beside the broker, and is not there any more."""
    asked = {**prompt("large [[tokens: 2000]]"), "max_tokens": 2000}
    await call("post", MESSAGES, 200, json=asked, headers={"Idempotency-Key": "lost"})
    remove_answers(worker.settings.bodies_url)
    await call("post", MESSAGES, 410, json=asked, headers={"Idempotency-Key": "lost"})
    for path in ("/v1/requests/{id}", "/v1/requests/{id}/events"):
        await call("get", path, 410, id="lost")


def remove_answers(url: str | None) -> None:
    for each in Path((url or "").removeprefix("file://")).glob("answer-*"):
        each.unlink()


async def refused_by_a_worker(call: Callable[..., Coroutine[Any, Any, str]], worker: RunningWorker) -> None:
    """How a request ends that is not answered."""
    named = {"Idempotency-Key": "r-3"}
    running = asyncio.create_task(call("post", MESSAGES, 499, json=prompt("cancelled [[latency: 60s]]"), headers=named))
    await until(lambda: worker.calls("cancelled"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "cancel", _too_many)
        await call("delete", "/v1/requests/{id}", 429, id="r-3")
    await call("delete", "/v1/requests/{id}", 202, id="r-3")
    await running
    late = {"x-lane-deadline-ms": "500"}
    await call("post", MESSAGES, 504, json=prompt("late [[latency: 60s]]"), headers=late)
    for fault, status in (("invalid", 400), ("not_found", 404), ("billing", 402), ("spend_limit", 429), ("html", 502)):
        await call("post", MESSAGES, status, json=prompt(f"[[fault: {fault}]]"))


async def refused_where_it_is_full(api: Described, worker: RunningWorker) -> None:
    """A gateway that takes one call and one follower, and has both."""
    async with (
        gate(worker.settings, calls=1, followers=1) as url,
        aiohttp.ClientSession() as session,
    ):
        call = partial(api.call, session, url)
        await call(
            "post", "/v1/requests", 202, json=prompt("followed [[latency: 60s]]"), headers={"Idempotency-Key": "f"}
        )
        running = asyncio.create_task(session.post(f"{url}{MESSAGES}", json=prompt("first [[latency: 60s]]")))
        await until(lambda: worker.calls("first"))
        for path in (MESSAGES, "/v1/requests"):
            await call("post", path, 529)
        async with session.get(f"{url}/v1/requests/f/events") as following:
            await following.content.readline()
            await call("get", "/v1/requests/{id}", 529, id="f", params={"wait": "20s"})
            await call("get", "/v1/requests/{id}/events", 529, id="f")
            await call("get", "/v1/ws", 529, headers=UPGRADE)
        running.cancel()
        await call("delete", "/v1/requests/{id}", 202, id="f")


def prompt(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def _too_many(*_: object, **__: object) -> None:
    raise ControlRefused({"code": "too_many_control_messages", "status": 429, "retryable": True})


@pytest.mark.slow
async def test_made_up_calls_through_the_lanes_are_answered_as_the_document_says(vhost: Vhost) -> None:
    paths = {"/v1/messages", "/v1/requests", "/v1/requests/{id}"}
    async with serving(vhost.amqp_url, retry={"base_s": 0.05, "cap_s": 0.1}) as worker, gate(worker.settings) as url:
        assert await asyncio.to_thread(make_up, url, paths=paths, examples=10) > len(paths)
