"""Nothing that a requester writes into a message, and nothing that a model answers, gives more rights than a request
has, blocks the worker, or reaches a log, a header or a terminal as more than text."""

import asyncio
import io
import json
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from service.telemetry import logs
from tests.support.brokers import Vhost
from tests.support.malicious import (
    REQUESTS,
    Asked,
    MaliciousProvider,
    Piece,
    Stalls,
    deltas,
    head,
    malicious_provider,
    streamed,
    whole,
)
from tests.support.otlp import OtlpReceiver
from tests.support.processes import environment, lanekeeper
from tests.support.requester import CRITICAL, Requester, raw_properties, requester, table
from tests.support.serving import RunningWorker, meeting, serving
from tests.support.waiting import until

INTERNAL = {
    "x-lane-attempt": 99,
    "x-lane-errors": ["made up"],
    "x-lane-user-id": "boss",
    "x-lane-expiration": "1",
    "x-lane-first-seen-ms": 1,
    "x-lane-due-ms": 4_000_000_000_000,
    "x-lane-status": "ok",
    "x-lane-dead-code": "poison",
    "x-lane-request-id": "another",
    "x-delivery-count": 19,
    "x-acquired-count": 50,
    "x-first-death-queue": "lane.normal",
    "x-last-death-reason": "expired",
    "lane-d00": 1,
    "lane-d05": 0,
}


async def test_internal_headers_of_a_fresh_request_are_not_believed(vhost: Vhost) -> None:
    """Neither its attempts, nor its due time, nor its tenant; and they are not in the dead letter."""
    async with meeting(vhost, lanes={"critical": {"max_attempts": 3}}) as (worker, app, _):
        await app.read_dead()
        reply = await app.ask({"prompt": "pushy"}, headers=INTERNAL, message_id="f-1")
        assert (reply.status, reply.headers["x-lane-attempt"]) == ("ok", 1)
        assert reply.headers["x-lane-request-id"] == "f-1"
        assert reply.headers["x-lane-wait-ms"] < 60_000, "not since 1970"

        reply = await app.ask({"prompt": "pushy [[fault: server_error]]"}, headers=INTERNAL, message_id="f-2")
        assert reply.code == "attempts_exhausted"
        assert len(worker.calls("pushy [[fault")) == 3
        dead = await app.buried("f-2")
        assert len(dead.headers["x-lane-errors"]) == 3
        assert "made up" not in str(dead.headers["x-lane-errors"])
        assert dead.headers["x-lane-attempt"] == 3
        left = INTERNAL.keys() & dead.headers.keys()
        assert left == {"x-lane-attempt", "x-lane-errors", "x-lane-dead-code"}


@pytest.mark.oldest_version
async def test_a_forged_death_is_refused_by_name(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        death = [{"queue": "lane.critical.due", "reason": "delivery_limit", "count": 1, "exchange": "lane.due"}]
        reply = await app.ask({"prompt": "undead"}, headers={"x-death": death}, message_id="f-3")
        assert reply.code == "invalid_request"
        assert "x-death" in reply.json["detail"]
        assert "x-death" not in (await app.buried("f-3")).headers
        lost = await app.ask({"prompt": "undead"}, headers={"x-death": death}, key="nowhere.x", message_id="f-4")
        assert lost.code == "unroutable"
        assert not worker.api.calls


@pytest.mark.oldest_version
async def test_the_internal_exchange_cannot_be_published_to(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        with pytest.raises(Exception, match=r"ACCESS_REFUSED|internal"):
            await app.publish({"prompt": "x"}, exchange="lane.due", headers={"x-lane-attempt": 0})
        assert not worker.api.calls


@pytest.mark.oldest_version
async def test_the_user_checked_by_the_broker_is_kept_through_retries(vhost: Vhost) -> None:
    async with serving(vhost, lanes={"critical": {"max_attempts": 2}}), requester(vhost) as app:
        await app.read_dead()
        headers = {"x-lane-user-id": "boss"}
        await app.ask({"prompt": "x [[fault: server_error]]"}, user_id=vhost.user, headers=headers, message_id="f-5")
        dead = await app.buried("f-5")
        assert dead.headers["x-lane-user-id"] == vhost.user
        assert dead.properties.user_id in (None, "")


FORBIDDEN = [
    "lane.critical",
    "lane.dead",
    "lane",
    "lane.replyx",
    "amq.rabbitmq.log",
    "amq.gen-short",
    "amq.rabbitmq.reply-to.with space",
]


async def test_a_forbidden_reply_address_is_parked_and_nothing_is_sent_there(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        for n, address in enumerate(FORBIDDEN):
            await app.publish({"prompt": "deputy"}, reply_to=address, message_id=f"lane-{n}")
            await app.publish({"prompt": "deputy"}, reply_to=address, message_id=f"none-{n}", key="nowhere.x")
        for n, address in enumerate(FORBIDDEN):
            dead = await app.buried(f"lane-{n}")
            assert dead.headers["x-lane-dead-code"] == "forbidden_reply_to"
            assert address in dead.headers["x-lane-dead-detail"]
            assert dead.properties.reply_to == address
            assert (await app.buried(f"none-{n}")).headers["x-lane-dead-code"] == "unroutable"
        assert (await app.ask({"prompt": "a good one"})).status == "ok"
        assert len(worker.api.calls) == 1
        assert len(app.dead) == 2 * len(FORBIDDEN), "nothing was sent to lane.dead as a reply"
        queues = ("lane.critical", "lane.batch.due", "lane.fallen", "lane.control", "lane.delay.00")
        await until(lambda: app.holds(0, *queues))
        assert worker.is_well


@pytest.mark.every_version
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_forged_direct_reply_address_affects_no_other_requester(vhost: Vhost, stream: bool) -> None:
    """Before RabbitMQ 4.3.5 it kills the connection that answers it (docs/facts.md, section 6)."""
    async with serving(vhost) as worker, requester(vhost) as app, requester(vhost, direct=True) as direct:
        await app.read_dead()
        for n in range(3):
            ours = [
                await direct.publish({"prompt": f"mine {n}"}, headers={"x-lane-stream": stream}),
                await app.publish({"prompt": f"mine too {n}"}, headers={"x-lane-stream": stream}),
            ]
            await app.publish(
                {"prompt": "evil"},
                reply_to="amq.rabbitmq.reply-to.g2dkABNyYWJiaXRAbm93aGVyZQAAAAAAAAAAAAAAAA==.AAAAAAAAAAAAAAAAAAAAAA==",
                message_id=f"evil-{n}",
                headers={"x-lane-stream": stream},
            )
            ours += [await direct.publish({"prompt": f"mine after {n}"}), await app.publish({"prompt": f"and {n}"})]
            for each in ours:
                await until(lambda each=each: app.finals(each) or direct.finals(each))
                got = (app.finals(each) or direct.finals(each))[0]
                assert got.status == "ok"
        assert worker.is_well
        if tuple(int(part) for part in vhost.version.split(".")[:3]) < (4, 3, 5):
            for n in range(3):
                dead = await app.buried(f"evil-{n}")
                assert dead.headers["x-lane-dead-code"] == "forbidden_reply_to"
                assert len(app.dead_of(f"evil-{n}")) == 1
        await until(lambda: app.holds(0, *CRITICAL))


ESCAPE = "\x1b[2J\x1b]0;owned\x07"
CRLF = '\r\nx-injected: yes\r\n{"event":"forged"}\n'
TRACE = {
    "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "tracestate": "vendor=value",
    "baggage": "user=canary,tenant=canary",
}
OURS = {
    "traceparent",
    "anthropic-beta",
    "anthropic-version",
    "x-api-key",
    "authorization",
    "user-agent",
    "host",
    "connection",
}
"""The headers that our calls to the provider have."""
CLIENTS = ("x-stainless-", "content-", "accept")


def foreign(worker: RunningWorker) -> list[str]:
    """All other headers of the provider's calls."""
    names = {name.lower() for call in worker.api.calls for name in call.headers}
    return sorted(name for name in names - OURS if not name.startswith(CLIENTS))


async def test_the_provider_gets_our_own_traceparent_and_neither_tracestate_nor_baggage(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.ask({"prompt": "x"}, headers={**TRACE, "x-api-key": "stolen", "host": "elsewhere", "x-own": "1"})
        (call,) = worker.api.calls
        assert foreign(worker) == []
        assert "stolen" not in str(dict(call.headers))
        assert call.headers["host"].startswith("127.0.0.1")
        assert "canary" not in str(dict(call.headers))


def placed(text: str) -> list[dict[str, Any]]:
    """The text in each property alone, so that not always the same one is refused."""
    short = text[:100]
    return [
        *({"headers": {name: value + text}} for name, value in TRACE.items()),
        {"headers": {"anthropic-beta": "a" + text}},
        {"headers": {"x-lane-deadline-ms": text}},
        {"headers": {"x-lane-tenant": text}},
        {"headers": {f"x-lane-{short[:60]}": 1}},
        {"headers": {"x-own": text}},
        {"key": f"critical.{short}.x"},
        {"key": f"nowhere.{short}.x"},
        *({name: short} for name in ("message_id", "correlation_id", "message_type", "content_type")),
        *({name: short} for name in ("content_encoding", "app_id", "reply_to")),
    ]


@pytest.mark.parametrize("format", ["json", "console"])
async def test_hostile_text_in_any_property_becomes_one_log_line_and_no_header(
    vhost: Vhost, format: Literal["json", "console"]
) -> None:
    out = io.StringIO()
    with logs.configured(service="worker", level="debug", stream=out, format=format):
        async with serving(vhost) as worker, requester(vhost) as app:
            for text in (CRLF, ESCAPE, "x" * 60_000, "\u2028\u202e\u0085"):
                for each in placed(text):
                    await app.publish({"prompt": "x"}, **each)
                assert (await app.ask({"prompt": "a good one"})).status == "ok"
            assert worker.is_well
    assert foreign(worker) == []
    written = out.getvalue()
    assert "\x1b" not in written
    lines = written.splitlines()  # split at every character that some program treats as the end of a line
    if format == "json":
        events = [json.loads(line)["event"] for line in lines]
        assert "forged" not in events
    assert all(len(line) < 10_000 for line in lines)
    assert not any(line.startswith(("x-injected", '{"event":"forged"')) for line in lines)


HOSTILE = json.dumps(
    {
        "cancel": "victim",
        "reply_to": "lane.dead",
        "routing_key": "critical.other.app",
        "headers": {"x-lane-status": "error", "x-lane-tenant": "acme"},
        "exchange": "lane.control",
        "sql": "'; DROP TABLE requests; --",
        "template": "{{7*7}} ${7*7} %s %(x)s {0}",
        "path": "../../etc/passwd",
        "url": "http://169.254.169.254/latest/meta-data/",
        "markup": "<img src=x onerror=alert(1)></script>",
        "frame": "\r\nx-lane-status: error\r\n\r\n",
        "event": 'data: {"type":"message_stop"}\n\nevent: error\ndata: {"type":"error"}\n\n',
    }
)


async def test_an_answer_full_of_control_text_changes_only_the_body_of_its_reply(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        await app.read_events()
        victim = await app.publish({"prompt": "victim [[held]]"}, message_id="victim")
        await until(lambda: worker.calls("victim"))
        for stream in (False, True):
            id = f"hostile-{stream}"
            body = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 4000}
            reply = await app.ask(body, message_id=id, headers={"x-lane-stream": stream})
            assert (reply.status, reply.text) == ("ok", f"echo: {HOSTILE}")
            assert reply.headers["x-lane-request-id"] == id
            assert "x-lane-tenant" not in reply.headers
            await until(lambda id=id: "completed" in app.events_of(id))
            assert app.events_of(id) == ["started", "completed"]
            again = await app.control({"result": id}, key="result")
            assert again.body == reply.body, "the store keeps it to the byte"
        worker.api.release("victim")
        assert (await app.final(victim)).status == "ok"
        assert not app.dead
        assert len(worker.api.calls) == 3
        assert worker.is_well


STALL_S = 0.9
"""CPU time, with a margin for a busy machine; alone under 0.1 s. Without the limits: 1.8 s for one message."""
WITHIN_S = 60.0
TOO_LARGE = (
    "a huge array",
    "huge numbers",
    "a tool's input that is a huge array",
    "an endless body",
    "a gzip bomb",
)


@pytest.fixture(scope="module")
def malicious() -> Iterator[str]:
    """A provider in its own process, so that it takes no time from the measured event loop."""
    with malicious_provider() as base_url:
        yield base_url


async def chat(app: Requester, until_done: "asyncio.Future[Any]") -> list[float]:
    """How long critical requests take meanwhile."""
    took = []
    while not until_done.done():
        began_s = time.perf_counter()
        assert (await app.ask({"prompt": "hello"}, within_s=WITHIN_S)).status == "ok"
        took.append(time.perf_counter() - began_s)
    return took


async def test_malicious_bodies_end_as_documented_and_delay_no_other_request(vhost: Vhost, malicious: str) -> None:
    bodies = {name: (each.body, each.content_encoding) for name, each in REQUESTS.items()}
    async with serving(vhost, base_url=malicious) as worker, requester(vhost) as app:
        await app.ask({"prompt": "hello"})

        async def send(name: str) -> str | None:
            body, encoding = bodies[name]
            reply = await app.ask(body, key="batch.tests.nasty", content_encoding=encoding, within_s=WITHIN_S)
            return None if reply.status == "ok" else reply.code

        with Stalls() as stalls:
            sending = asyncio.gather(*(send(name) for name in bodies))
            took = await chat(app, sending)
        codes = dict(zip(bodies, await sending, strict=True))

        assert codes == {name: each.code for name, each in REQUESTS.items()}
        assert stalls.longest_s < STALL_S
        assert len(took) > 2, "others were answered meanwhile"
        assert worker.is_well


async def test_a_burst_of_messages_full_of_headers_is_refused_and_delays_no_other_request(
    vhost: Vhost, malicious: str
) -> None:
    full = b"A" + (60_000).to_bytes(4, "big") + b"V" * 60_000
    properties = {"headers": table((b"x-app", full))}
    async with serving(vhost, base_url=malicious) as worker, requester(vhost) as app:
        await app.ask({"prompt": "hello"})
        with Stalls() as stalls:
            for n in range(16):
                await app.publish_raw(
                    b'{"prompt": "hello"}',
                    key=b"batch.tests.nasty",
                    properties=raw_properties(correlation_id=b"%d" % n, reply_to=app.reply_to.encode(), **properties),
                )
            replies = [await app.final(str(n)) for n in range(16)]

        assert {reply.code for reply in replies} == {"invalid_request"}
        assert all("headers" in reply.json["detail"] and "4000 values" in reply.json["detail"] for reply in replies)
        assert stalls.longest_s < STALL_S
        assert worker.is_well


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_an_answer_that_would_take_long_to_parse_ends_at_once(vhost: Vhost, malicious: str, name: str) -> None:
    body = {"prompt": f"[[answer: {name}]]"}
    async with serving(vhost, base_url=malicious) as worker, requester(vhost) as app:
        await app.read_dead()
        with Stalls() as stalls:
            reply = await app.ask(body, message_id="large", headers={"x-lane-stream": True}, within_s=WITHIN_S)

        assert reply.code == "answer_too_large"
        assert reply.json["attempts"] == 1
        assert "ask for less" in reply.json["detail"]
        assert (await app.buried("large")).body == json.dumps(body).encode()
        assert stalls.longest_s < STALL_S
        assert worker.is_well


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lone_surrogate_in_a_providers_error_or_answer_ends_the_request_after_one_call(
    vhost: Vhost, stream: bool
) -> None:
    error = b'{"type":"error","error":{"type":"invalid_request_error","message":"no \\ud83d"}}'
    delta = b'{"type":"text_delta","text":"cut \\ud83d"}'

    def answer(asked: Asked) -> Iterable[Piece]:
        if b"refused" in asked.body:
            return [head(400, body=error)]
        return streamed(deltas(1, delta)) if stream else whole(b'[{"type":"text","text":"cut \\ud83d"}]')

    async with (
        MaliciousProvider(answer) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        requester(vhost) as app,
    ):
        refused = await app.ask({"prompt": "refused"}, headers={"x-lane-stream": stream})
        answered = await app.ask({"prompt": "x"}, headers={"x-lane-stream": stream})

        assert (refused.code, refused.json["detail"]) == ("provider_rejected", "400 invalid_request_error: no \ufffd")
        assert (answered.status, answered.text) == ("ok", "cut \ud83d")
        assert len(provider.asked) == 2
        assert worker.is_well


CANARY = "cassowary"
"""Text in everything that a requester writes, which the provider quotes."""


def quoting(asked: Asked) -> Iterable[Piece]:
    """An error that quotes the prompt, with the status that the prompt names."""
    prompt = json.loads(asked.body)["messages"][0]["content"]
    status = int(prompt.split()[1])
    kind = {400: "invalid_request_error", 529: "overloaded_error", 500: "api_error"}.get(status, CANARY + " is no type")
    body = json.dumps({"type": "error", "error": {"type": kind, "message": f"you said: {prompt}"}}).encode()
    return [head(status, body=body, request_id="req_1")]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


async def test_prompts_and_quotes_of_them_reach_only_the_requester_and_the_dead_letter(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with MaliciousProvider(quoting) as provider, OtlpReceiver() as otlp, requester(vhost) as app:
        environ = environment(
            vhost,
            provider,
            LANEKEEPER_LOG_LEVEL="debug",
            LANEKEEPER_LANES__CRITICAL__MAX_ATTEMPTS="2",
            OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="50",
        )
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
            health = await worker.ready()
            await app.read_dead()
            await app.read_events()
            asked = [
                await app.publish({"prompt": f"{CANARY} {status} one"}, message_id=f"m-{status}")
                for status in (400, 418, 500, 529)
            ]
            odd = [
                await app.publish(b'{"' + CANARY.encode() + b'": 1, "' + CANARY.encode() + b'": 2}', message_id="m-1"),
                await app.publish({"prompt": "x", "max_tokens": CANARY}, message_id="m-2"),
                await app.publish({"prompt": "x"}, message_id="m-3", headers={f"x-lane-{CANARY}": CANARY}),
                await app.publish({"prompt": "x"}, message_id="m-4", headers={"x-lane-deadline-ms": CANARY}),
                await app.publish({"prompt": "x", "model": CANARY}, message_id="m-5", content_type=CANARY),
            ]
            replies = [await app.final(each) for each in (*asked, *odd)]
            dead = [await app.buried(f"m-{status}") for status in (400, 418, 500, 529)]
            status = await app.control({}, key="status")
            looked = [await asyncio.to_thread(get, f"{health}/{path}") for path in ("healthz", "readyz")]
            await until(lambda: len(app.events) >= 20)
        await until(lambda: otlp.requests)

        assert all(CANARY in reply.json["detail"] for reply in replies[:4]), "the requester is told"
        assert all(CANARY in str(each.headers["x-lane-dead-detail"]) for each in dead)
        assert CANARY in str(dead[-1].headers["x-lane-errors"])
        told = [each for each in worker.events if each["event"] == "request.buried"]
        assert len(told) == 9
        of_requests = [each for each in worker.events if each["event"].startswith("request.")]
        assert [each for each in of_requests if not {"request", "lane", "attempt", "trace_id"} <= each.keys()] == []
        assert {"invalid_request_error 400 (req_1)"} <= {each["reason"] for each in told}
        signals = {
            "log": [json.dumps(each) for each in worker.events] + worker.lines,
            "events": [each.body.decode() + each.routing_key for each in app.events],
            "health": looked,
            "status": [status.body.decode()],
            "spans": [body.decode("latin-1") for _, body in otlp.requests],
        }
        assert {where: [each for each in texts if CANARY in each] for where, texts in signals.items()} == {
            where: [] for where in signals
        }
