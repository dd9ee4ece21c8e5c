import asyncio
import io
import json
import logging
import socket
import threading
import time

import pytest
from opentelemetry import trace

from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import recording, signals
from lanekeeper.telemetry.tracing import Tracing
from service.telemetry import exporters as telemetry
from service.telemetry import logs
from tests.support.otlp import OtlpReceiver, one

CANARY = "canary-91c2"
KEY = "sk-ant-api03-" + CANARY


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def traces_url(otlp: OtlpReceiver) -> str:
    return f"{otlp.endpoint}/v1/traces"


def publish(otlp: OtlpReceiver, message: Message, *, service: str, exchange: str, key: str) -> None:
    with (
        logs.configured(service=service, level="info", stream=io.StringIO()),
        telemetry.exporting(traces_url(otlp), service_name=service) as provider,
        Tracing(provider).send(message, exchange=exchange, routing_key=key),
    ):
        pass


def work(otlp: OtlpReceiver, message: Message, *, queue: str, attempts_left: int) -> Message:
    """What a worker does with one delivery; returns the published messages."""
    with telemetry.exporting(traces_url(otlp), service_name="worker") as provider:
        tracing = Tracing(provider)
        with tracing.process(message, queue=queue, delivery_tag=1) as span:
            try:
                with tracing.chat(model="claude", provider="anthropic", stream=False):
                    if attempts_left:
                        raise TimeoutError(CANARY)
            except TimeoutError:
                recording.outcome(span, "retried", error="timeout", delay_ms=100)
                out = Message(body=message.body, headers=message.headers, routing_key=message.routing_key)
                exchange, key = "lane.delay.00", message.routing_key
            else:
                recording.outcome(span, "answered")
                out, exchange, key = Message(body=b"{}"), "", "replies"
            with tracing.send(out, exchange=exchange, routing_key=key):
                pass
            with tracing.settle(signals.ACK, message, queue=queue, delivery_tag=1):
                pass
    return out


async def test_a_request_with_a_retry_and_a_reply_is_one_trace_with_correct_parents() -> None:
    async with OtlpReceiver() as otlp:
        message = Message(body=CANARY.encode(), exchange="lane.requests", routing_key="critical.a.b", message_id="m")

        publish(otlp, message, service="app", exchange="lane.requests", key="critical.a.b")
        retried = work(otlp, message, queue="lane.critical", attempts_left=1)
        reply = work(otlp, retried, queue="lane.critical.due", attempts_left=0)

        sent = one(await otlp.wait_for(lambda spans: len(spans) >= 9), "send lane.requests")
        spans = await otlp.trace(sent.trace_id, names=["ack lane.critical", "ack lane.critical.due", "send (reply)"])

    first, second = one(spans, "process lane.critical"), one(spans, "process lane.critical.due")
    hop, answer = one(spans, "send lane.delay.00"), one(spans, "send (reply)")
    failed, chat = (span for span in spans if span.name == "chat claude")
    assert len(spans) == len(otlp.spans) == 9
    assert [(span.parent_id, span.links) for span in (sent, first, hop, second)] == [
        ("", ()),
        (sent.span_id, ((sent.trace_id, sent.span_id),)),
        (first.span_id, ()),
        (hop.span_id, ((sent.trace_id, hop.span_id),)),
    ]
    assert failed.parent_id == one(spans, "ack lane.critical").parent_id == first.span_id
    assert chat.parent_id == one(spans, "ack lane.critical.due").parent_id == answer.parent_id == second.span_id
    assert reply.headers["traceparent"] == f"00-{answer.trace_id}-{answer.span_id}-03"
    assert [(sent.kind, sent.service), (first.kind, first.service), (chat.kind, chat.service)] == [
        ("PRODUCER", "app"),
        ("CONSUMER", "worker"),
        ("CLIENT", "worker"),
    ]
    assert (failed.status, failed.attributes["error.type"], chat.status) == ("ERROR", "TimeoutError", "UNSET")
    assert one(spans, "process lane.critical", lane_outcome="retried", error_type="timeout").status == "ERROR"
    assert not any(CANARY.encode() in body for _, body in otlp.requests)


async def test_the_sdk_reads_its_own_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-operator")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=night")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    async with OtlpReceiver() as otlp:
        publish(otlp, Message(body=b""), service="app", exchange="lane.requests", key="k")
        (sent,) = await otlp.wait_for(lambda spans: spans)

    assert sent.service == "named-by-operator"
    assert sent.resource["deployment.environment.name"] == "night"
    assert otlp.requests[0][0]["x-collector-key"] == "abc"
    assert otlp.requests[0][0]["content-encoding"] == "gzip"


async def test_with_a_sampler_that_drops_everything_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with OtlpReceiver() as otlp:
        publish(otlp, Message(body=b""), service="app", exchange="e", key="k")

    assert otlp.requests == []


async def test_all_spans_are_exported_before_the_process_ends() -> None:
    async with OtlpReceiver() as otlp:
        with telemetry.exporting(traces_url(otlp), service_name="worker") as provider:
            tracing = Tracing(provider)
            for _ in range(1000):
                with tracing.send(Message(body=b""), exchange="e", routing_key="k"):
                    pass

        assert len(await otlp.wait_for(lambda spans: len(spans) == 1000)) == 1000


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("endpoint", ["refuses", "never answers"])
def test_an_unreachable_endpoint_neither_delays_the_exit_nor_fills_the_log(endpoint: str) -> None:
    out = io.StringIO()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if endpoint == "never answers":
            listener.listen()
        url = f"http://user:{CANARY}@127.0.0.1:{listener.getsockname()[1]}"
        with (
            logs.configured(service="worker", level="info", format="json", stream=out),
            telemetry.exporting(f"{url}/v1/traces", service_name="worker") as provider,
        ):
            tracing = Tracing(provider)
            for _ in range(5000):
                with tracing.send(Message(body=b""), exchange="e", routing_key="k"):
                    pass
            began = time.monotonic()
        took_s = time.monotonic() - began

    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert took_s < 3.5
    assert set(events) == {signals.TRACES_EXPORTED_TO, signals.TRACES_LOST}
    assert len(events) <= 4
    assert CANARY not in out.getvalue()


def test_without_an_endpoint_there_is_no_tracer_provider_and_no_thread() -> None:
    before = set(threading.enumerate())

    with telemetry.exporting(None, service_name="worker") as provider:
        assert provider is None
        assert set(threading.enumerate()) <= before, "a thread of an earlier test may end meanwhile"


def test_the_applications_global_tracer_provider_is_not_changed() -> None:
    before = trace.get_tracer_provider()

    with telemetry.exporting("http://127.0.0.1:9/v1/traces", service_name="worker"):
        assert trace.get_tracer_provider() is before


async def test_prompts_and_keys_are_in_no_span_and_no_log_line() -> None:
    out = io.StringIO()
    async with OtlpReceiver() as otlp:
        with (
            logs.configured(service="worker", level="debug", format="json", stream=out),
            telemetry.exporting(traces_url(otlp), service_name="worker") as provider,
        ):
            tracing = Tracing(provider)
            message = Message(
                body=f'{{"prompt": "{CANARY}"}}'.encode(),
                headers={"authorization": KEY, "x-app": CANARY, "baggage": KEY},
            )
            try:
                with tracing.process(message, queue="lane.critical"):
                    dict[str, str]()[CANARY]
            except KeyError:
                telemetry.log.exception(signals.HANDLER_FAILED, where="handle", body=message.body, prompt=CANARY)
            logging.getLogger("anthropic").debug("Request options: %s", CANARY)
            logging.getLogger("aiohttp.client").warning("sent %s to http://me:%s@host/", KEY, CANARY)
        await otlp.wait_for(lambda spans: spans)
        await asyncio.sleep(0)

    assert signals.HANDLER_FAILED in out.getvalue()
    assert CANARY not in out.getvalue()
    assert not any(CANARY.encode() in body for _, body in otlp.requests)
