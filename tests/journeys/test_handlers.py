"""Registered functions answer requests whose property `type` names them, with the same retries, replies and dead
letters as a model's calls."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from lanekeeper.contract.problems import SettingsError
from tests.support.brokers import Vhost
from tests.support.gate import call, gate
from tests.support.requester import Got, requester
from tests.support.serving import serving
from tests.support.web_server import web_server

EXAMPLES = Path(__file__).parents[2] / "examples/python"
FUNCTIONS = "tests.support.functions"


def registered(**kinds: str) -> dict[str, Any]:
    return {name: {"run": f"{FUNCTIONS}:{name}", "kind": kind} for name, kind in kinds.items()}


async def test_a_handler_answers_like_a_model_and_a_repeated_id_is_answered_from_the_store(vhost: Vhost) -> None:
    async with serving(vhost, handlers=registered(echo="async", doubled="cpu")) as worker:
        async with requester(vhost) as app:
            reply = await app.ask({"any": ["JSON"]}, message_type="echo", message_id="h-1")
            assert (reply.status, reply.json) == ("ok", {"echo": {"any": ["JSON"]}})
            assert reply.headers["x-lane-provider"] == "handler"
            assert reply.headers["x-lane-model"] == "echo"
            assert reply.headers["x-lane-attempt"] == 1
            again = await app.ask({"any": ["JSON"]}, message_type="echo", message_id="h-1")
            assert again.headers["x-lane-replayed"] is True
            assert again.body == reply.body
            computed = await app.ask(7, message_type="doubled", key="batch.tests.ask")
            assert computed.json[:2] == [7, 7]
            plain = await app.ask({"prompt": "hi"}, message_type="messages")
            assert plain.text == "echo: hi"
        assert len(worker.api.calls) == 1, "handlers call no provider"


async def test_many_requests_are_one_call_of_an_embeddings_endpoint(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[list[str]]()

    async def embed(request: web.BaseRequest) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        asked = await request.json()
        assert asked["model"] == "embeds"
        calls.append(asked["input"])
        if "too odd" in asked["input"]:
            return web.Response(status=400)
        data = [{"index": number, "embedding": [len(text)]} for number, text in enumerate(asked["input"])]
        return web.json_response({"data": data[::-1]})

    handlers = {"embeddings": {"run": "documents.embeddings:embed", "many": True, "count": 8, "window_ms": 5000}}
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with capture_logs() as logs:
        async with (
            web_server(embed) as url,
            serving(vhost, handlers=handlers, retry={"base_s": 0.01, "cap_s": 0.01}),
            requester(vhost) as asker,
        ):
            monkeypatch.setenv("EMBEDDINGS_URL", f"{url}/v1/embeddings")
            monkeypatch.setenv("EMBEDDINGS_MODEL", "embeds")
            monkeypatch.setenv("EMBEDDINGS_KEY", "secret")
            texts = ["x" * number for number in range(1, 8)]

            async def asked(*more: Any) -> list[Got]:
                bodies = [*({"text": text} for text in texts), *more]
                return await asyncio.gather(*(asker.ask(body, message_type="embeddings") for body in bodies))

            replies = await asked({"text": 7})
            assert [reply.json for reply in replies[:-1]] == [{"embedding": [number]} for number in range(1, 8)]
            assert replies[-1].code == "provider_rejected", "it fails alone"
            assert [sorted(call) for call in calls] == [texts]

            calls.clear()
            replies = await asked({"text": "too odd"})
            assert [reply.status for reply in replies] == ["ok"] * 7 + ["error"]
            assert replies[-1].code == "provider_rejected"
            assert [len(call) for call in calls] == [8] + [1] * 8, "after a failure each is tried alone"
    (told,) = [each for each in logs if each["event"] == "handler.narrow"]
    assert told["slots"] == {"batch": 4}


async def test_the_items_of_a_fan_out_are_gathered(vhost: Vhost) -> None:
    handlers = {"together": {"run": f"{FUNCTIONS}:together", "many": True, "count": 10, "window_ms": 500}}
    pipelines = {"p": {"steps": [{"name": "all", "each": "input", "handler": "together"}]}}
    lanes = {"critical": {"slots": 10}}
    async with serving(vhost, handlers=handlers, pipelines=pipelines, lanes=lanes), requester(vhost) as app:
        reply = await app.ask(list(range(40)), headers={"x-lane-pipeline": "p"})
    assert [item for item, _ in reply.json] == list(range(40))
    assert max(together for _, together in reply.json) > 1


async def test_a_type_without_a_handler_is_refused_by_name_and_so_is_a_stream(vhost: Vhost) -> None:
    async with serving(vhost, handlers=registered(echo="async")), requester(vhost) as app:
        unknown = await app.ask({"a": 1}, message_type="ecko")
        assert unknown.code == "invalid_request"
        assert "'ecko'" in unknown.json["detail"]
        assert "registered: echo" in unknown.json["detail"]
        streamed = await app.ask({"a": 1}, message_type="echo", headers={"x-lane-stream": True})
        assert streamed.code == "invalid_request"
        broken = await app.ask(b"{", message_type="echo")
        assert broken.code == "invalid_request"


async def test_a_failing_handler_is_retried_and_then_buried_and_a_rejected_input_at_once(vhost: Vhost) -> None:
    lanes = {"critical": {"max_attempts": 3}}
    handlers = registered(fails="async", rejects="async", returns_a_set="async", rejects_too="cpu")
    async with serving(vhost, lanes=lanes, handlers=handlers), requester(vhost) as app:
        await app.read_dead()
        failed = await app.ask({"a": 1}, message_type="fails", message_id="f-1")
        assert failed.code == "attempts_exhausted"
        assert failed.json["attempts"] == 3
        assert "ValueError at functions.py:" in failed.json["detail"]
        letter = await app.buried("f-1")
        assert letter.json == {"a": 1}
        assert letter.properties.message_type == "fails"
        for name in ("rejects", "rejects_too"):
            rejected = await app.ask({"a": 1}, message_type=name)
            assert (rejected.code, rejected.json["status"]) == ("provider_rejected", 422)
            assert "never any good" in rejected.json["detail"]
        unsendable = await app.ask({"a": 1}, message_type="returns_a_set")
        assert unsendable.code == "internal"
        assert "no JSON" in unsendable.json["detail"]


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("hangs", "async", "attempts_exhausted"),
        ("computes", "cpu", "attempts_exhausted"),
        ("dies", "cpu", "poison"),
    ],
)
async def test_a_handler_that_hangs_eats_its_cpu_or_kills_its_process_is_buried_and_others_are_answered(
    vhost: Vhost, name: str, kind: str, code: str
) -> None:
    lanes = {"normal": {"call_timeout_s": 0.2, "max_attempts": 5}}
    handlers = registered(**{name: kind, "echo": "async", "doubled": "cpu"})
    async with serving(vhost, lanes=lanes, handlers=handlers) as worker, requester(vhost) as app:
        await app.read_dead()
        bad = await app.publish({"a": 1}, message_type=name, key="normal.tests.ask", message_id="bad-1")
        others = [await app.publish({"n": n}, message_type="echo") for n in range(20)]
        others += [await app.publish({"n": n}, message_type="doubled") for n in range(5)]
        for other in others:
            assert (await app.final(other)).status == "ok"
        final = await app.final(bad)
        assert final.code == code
        # on a busy machine the time limit may end an attempt before its process dies
        assert final.json["attempts"] in ((4, 5) if code == "poison" else (5,))
        assert (await app.buried("bad-1")).json == {"a": 1}
        assert worker.is_well


async def test_a_critical_request_does_not_wait_for_computing_ones_of_another_lane(
    vhost: Vhost, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    async with serving(vhost, handlers=registered(waits_for="cpu", doubled="cpu")), requester(vhost) as app:
        others = [await app.publish(str(gate), message_type="waits_for", key="batch.tests.ask") for _ in range(10)]
        reply = await app.ask(7, message_type="doubled", key="critical.tests.ask")
        assert reply.json[:2] == [7, 7]
        gate.touch()
        for other in others:
            assert (await app.final(other)).status == "ok"


async def test_handlers_that_cannot_be_imported_are_refused_at_start_all_at_once(vhost: Vhost) -> None:
    handlers = {"a": {"run": "no.such:thing"}, "b": {"run": f"{FUNCTIONS}:absent", "kind": "cpu"}}
    with pytest.raises(SettingsError) as refused:
        async with serving(vhost, handlers=handlers):
            pass
    assert "handlers.a.run: 'no.such:thing'" in str(refused.value)
    assert "handlers.b.run" in str(refused.value)


async def test_a_handler_is_called_over_http(vhost: Vhost) -> None:
    async with serving(vhost, handlers=registered(echo="async")) as worker, gate(worker) as url:
        headers = {"x-lane-type": "echo", "content-type": "application/json"}
        posted = await call("POST", f"{url}/v1/requests", b'[1, {"stream": true}]', **headers)
        assert posted.status == 202, posted.body
        found = await call("GET", f"{url}{posted['status_url']}?wait=20s")
        assert found["status"] == "completed"
        assert found["result"] == {"echo": [1, {"stream": True}]}
        assert (found["model"], found["provider"]) == ("echo", "handler")
        refused = await call("POST", f"{url}/v1/requests", b"1", **{**headers, "x-lane-type": "other"})
        assert (refused.status, refused["code"]) == (400, "invalid_request")
        waiting = await call("POST", f"{url}/v1/messages", b"1", **headers)
        assert waiting.status == 400
