import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown, LanekeeperError, RequestProblem
from lanekeeper.telemetry import logs, signals
from lanekeeper.telemetry.tracing import (
    Tracing,
    record_answer,
    record_outcome,
    record_request,
    trace_url,
    traceparent_of,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"
CANARY = "canary-7f3a"


class Recorded:
    """Tracing that keeps its spans in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider, broker=lambda: ("broker", 5672))

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return found


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    yield Recorded()
    assert context.get_current() == {}, "a span's context was left behind"


def request(headers: dict[str, Any] | None = None) -> Message:
    return Message(
        body=CANARY.encode(),
        exchange="lane.requests",
        routing_key="critical.support.chat",
        headers=headers or {},
        message_id="m-1",
        correlation_id="c-1",
    )


def ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def parent(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def test_the_span_of_a_past_wait_is_a_sibling_of_the_delivery_or_inside_it(recorded: Recorded) -> None:
    message = request({"traceparent": VALID})
    with recorded.tracing.process(message, queue="lane.critical", delivery_tag=1):
        recorded.tracing.passed("wait lane.critical", start_ns=5, end_ns=9, came_by=message)
        recorded.tracing.passed("wait (turn)", start_ns=9, end_ns=12)
        recorded.tracing.passed("wait of unknown", start_ns=5, end_ns=9, came_by=request())

    (delivery,) = (each for each in recorded.exporter.get_finished_spans() if each.name.startswith("process"))
    beside, inside = recorded.span("wait lane.critical"), recorded.span("wait (turn)")
    assert (parent(beside), parent(inside)) == (SPAN, ids(delivery)[1])
    assert parent(recorded.span("wait of unknown")) == ids(delivery)[1]
    assert [f"{link.context.span_id:016x}" for link in delivery.links] == [SPAN]
    assert [(each.start_time, each.end_time) for each in (beside, inside)] == [(5, 9), (9, 12)]


def test_without_an_active_span_a_publish_span_is_a_child_of_the_span_in_the_message(recorded: Recorded) -> None:
    message = request({"traceparent": VALID})

    with recorded.tracing.send(message, exchange="lane.requests", routing_key="k"):
        pass

    span = recorded.span("send lane.requests")
    assert (parent(span), (span.attributes or {})["messaging.destination.name"]) == (SPAN, "lane.requests:k")


def test_a_publish_span_is_linked_to_the_span_in_the_message_if_that_is_of_another_trace(recorded: Recorded) -> None:
    with recorded.tracing.process(request({"traceparent": VALID}), queue="lane.critical", delivery_tag=1):
        for exchange, headers in (
            ("same", {"traceparent": VALID}),
            ("other", {"traceparent": f"00-{'7' * 32}-{SPAN}-01"}),
        ):
            with recorded.tracing.send(request(headers), exchange=exchange, routing_key="k"):
                pass

    (delivery,) = (each for each in recorded.exporter.get_finished_spans() if each.name.startswith("process"))
    same, other = recorded.span("send same"), recorded.span("send other")
    assert parent(same) == parent(other) == ids(delivery)[1]
    assert not same.links
    assert [f"{link.context.trace_id:032x}" for link in other.links] == ["7" * 32]


def test_a_delivery_has_its_tag_and_what_is_known_of_its_request(recorded: Recorded) -> None:
    with recorded.tracing.process(request(), queue="lane.critical", delivery_tag=7) as span:
        record_request(span, lane="critical", app="support", attempt=2, wait_ms=5, redelivered=True, step="summary")
        with recorded.tracing.settle("ack", request(), queue="lane.critical", delivery_tag=7):
            assert recorded.tracing.trace_id() == f"{span.get_span_context().trace_id:032x}"
            assert trace.get_current_span() is span
    with recorded.tracing.process(request(), queue="lane.batch") as span:
        record_request(span, lane="batch", app="support", attempt=1, wait_ms=5, redelivered=False, step="")

    said, settled = recorded.span("process lane.critical").attributes, recorded.span("ack lane.critical").attributes
    plain = recorded.span("process lane.batch").attributes
    assert said is not None
    assert settled is not None
    assert plain is not None
    assert said["messaging.rabbitmq.message.delivery_tag"] == settled["messaging.rabbitmq.message.delivery_tag"] == 7
    assert settled["messaging.operation.type"] == "settle"
    assert (said["messaging.message.id"], said["messaging.message.conversation_id"]) == ("m-1", "c-1")
    assert (said["server.address"], said["server.port"]) == ("broker", 5672)
    assert (said["lane.attempt"], said["lane.redelivered"], said["lane.step"]) == (2, True, "summary")
    assert said.keys() - plain.keys() == {
        "messaging.rabbitmq.message.delivery_tag", "lane.redelivered", "lane.step"
    }  # fmt: skip
    assert recorded.span("ack lane.critical").parent == recorded.span("process lane.critical").context


def test_a_reply_is_published_in_a_span_without_the_name_of_its_queue(recorded: Recorded) -> None:
    with recorded.tracing.send(request(), exchange="", routing_key="amq.gen-1"):
        pass
    with recorded.tracing.send(request(), exchange="lane.requests", routing_key="k"):
        pass
    reply, published = (recorded.span(f"send {name}").attributes or {} for name in ("(reply)", "lane.requests"))
    assert (reply["messaging.destination.name"], reply["messaging.destination.template"]) == ("amq.gen-1", "(reply)")
    assert "messaging.destination.template" not in published


def test_what_a_command_asks_is_a_span_around_its_request(recorded: Recorded) -> None:
    with recorded.tracing.ask(), recorded.tracing.send(request(), exchange="lane.requests", routing_key="k"):
        pass
    assert parent(recorded.span("send lane.requests")) == ids(recorded.span("ask"))[1]
    with Tracing().ask() as span:
        assert not span.is_recording()


def test_in_a_trace_that_is_not_sampled_no_further_spans_are_made_and_its_context_is_passed_on() -> None:
    tracing = Tracing(TracerProvider(sampler=ALWAYS_OFF))
    message = request()
    with tracing.process(request(), queue="lane.critical") as span:
        record_request(span, lane="critical", app="support", attempt=1, wait_ms=5, redelivered=False, step="")
        with tracing.chat(model="m", provider="p", stream=False) as chat:
            assert not chat.get_span_context().is_valid
        with tracing.send(message, exchange="lane.requests", routing_key="k"):
            pass
    assert message.headers["traceparent"] == traceparent_of(span.get_span_context())


@pytest.mark.parametrize(
    ("more", "attributes", "status"),
    [
        ({}, {}, StatusCode.UNSET),
        ({"error": "internal"}, {"error.type": "internal"}, StatusCode.ERROR),
        ({"delay_ms": 0}, {"lane.delay_ms": 0}, StatusCode.UNSET),
    ],
)
def test_an_outcome_is_told_with_its_delay_and_its_error(
    recorded: Recorded, more: Any, attributes: dict[str, Any], status: StatusCode
) -> None:
    with recorded.tracing.handler("chunk") as span:
        record_outcome(span, "retried", **more)
    told = recorded.span("handler chunk")
    assert (dict(told.attributes or {}), told.status.status_code) == ({"lane.outcome": "retried", **attributes}, status)
    assert told.kind is SpanKind.INTERNAL


def test_a_batch_is_a_trace_of_its_own_with_links_to_its_requests(recorded: Recorded) -> None:
    requests = [request({"traceparent": VALID}), request()]
    with recorded.tracing.batch("create", requests, model="claude-x", provider="anthropic"):
        pass
    span = recorded.span("batch create")
    assert span.attributes is not None
    assert (parent(span), [link.context.trace_id for link in span.links]) == (None, [int(TRACE, 16)])
    assert (span.attributes["lane.batch_requests"], span.attributes["gen_ai.request.model"]) == (2, "claude-x")


@pytest.mark.parametrize(
    ("jaeger", "trace", "url"), [("http://j", "4b", "http://j/trace/4b"), (None, "4b", None), ("http://j", None, None)]
)
def test_a_trace_has_a_page_where_there_is_a_jaeger(jaeger: str | None, trace: str | None, url: str | None) -> None:
    assert trace_url(jaeger, trace) == url


def test_an_event_of_the_client_goes_to_the_standard_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lanekeeper"):
        logs.warning("broker.lost", lane="normal")
        logs.info("broker.connected")
    assert [(each.levelname, each.message, each.filename) for each in caplog.records] == [
        ("WARNING", "event='broker.lost' lane='normal'", "test_tracing.py"),
    ]


def test_a_chat_span_has_the_model_the_parameters_and_the_usage(recorded: Recorded) -> None:
    with recorded.tracing.chat(model="claude-x", provider="anthropic", stream=True, max_tokens=64) as span:
        inside = recorded.tracing.traceparent()
        record_answer(
            span,
            model="claude-x-1",
            input_tokens=10,
            output_tokens=5,
            cache_read_tokens=2,
            cache_write_tokens=3,
            stop_reason="end_turn",
            request_id="req_1",
        )

    chat = recorded.span("chat claude-x")
    assert chat.kind is SpanKind.CLIENT
    assert inside == "00-{}-{}-03".format(*ids(chat)), "what the provider's client adds comes under the chat span"
    assert dict(chat.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "claude-x",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "claude-x-1",
        "gen_ai.response.finish_reasons": ("end_turn",),
        "gen_ai.usage.input_tokens": 15,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.cache_write.input_tokens": 3,
        "anthropic.request.id": "req_1",
    }


def test_a_providers_text_that_does_not_look_like_an_identifier_is_not_in_the_span(recorded: Recorded) -> None:
    odd = f"odd words: {CANARY}"
    with recorded.tracing.chat(model="claude-x", provider="anthropic", stream=False, max_tokens=1) as span:
        record_answer(span, model=odd, input_tokens=1, output_tokens=1, stop_reason=odd, request_id=odd)

    attributes = dict(recorded.span("chat claude-x").attributes or {})
    assert attributes["gen_ai.response.model"] == "?"
    assert attributes["gen_ai.usage.input_tokens"] == 1
    assert not [name for name in attributes if "cache" in name or "stream" in name]
    assert CANARY not in str(attributes)


class Overloaded(LanekeeperError):
    type = "overloaded_error"


class Odd(LanekeeperError):
    type = f"a type with spaces: {CANARY}"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError(CANARY), "ValueError"),
        (RequestProblem("invalid_request", CANARY), "invalid_request"),
        (ConfirmUnknown(CANARY), "ConfirmUnknown"),
        (Overloaded(CANARY), "overloaded_error"),
        (Odd(CANARY), "Odd"),
        (KeyboardInterrupt(CANARY), "KeyboardInterrupt"),
    ],
)
def test_a_failed_span_has_the_errors_type_and_not_its_text(
    recorded: Recorded, error: BaseException, kind: str
) -> None:
    with pytest.raises(type(error)), recorded.tracing.process(request(), queue="lane.critical"):
        raise error

    span = recorded.span("process lane.critical")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == kind
    assert CANARY not in span.to_json()


def hop(tracing: Tracing, headers: dict[str, Any]) -> dict[str, Any]:
    """The headers of a message that is published while a message with `headers` is processed."""
    out = Message(body=b"", headers={"traceparent": "junk", "x-lane-attempt": 1})
    with tracing.process(request(headers), queue="lane.critical") as span:
        record_request(span, lane="critical", app="a", attempt=1, wait_ms=1, redelivered=False, step="")
        with tracing.chat(model="m", provider="p", stream=False), tracing.send(out, exchange="e", routing_key="k"):
            pass
        with tracing.settle(signals.ACK, out, queue="lane.critical", delivery_tag=1):
            pass
    return dict(out.headers)


def test_without_an_sdk_the_requesters_trace_context_is_passed_on() -> None:
    context_of_requester = {"traceparent": VALID, "tracestate": "a=1", "baggage": "b=2;p"}

    assert hop(Tracing(), context_of_requester) == {**context_of_requester, "x-lane-attempt": 1}
    assert hop(Tracing(), {"traceparent": 5}) == {"x-lane-attempt": 1}


def test_without_an_sdk_the_provider_gets_the_requesters_span_as_parent() -> None:
    tracing = Tracing()

    with tracing.process(request({"traceparent": VALID}), queue="q"):
        assert tracing.traceparent() == VALID
        assert tracing.trace_id() == TRACE
    assert tracing.traceparent() is None
