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
from lanekeeper.telemetry import recording, signals
from lanekeeper.telemetry.tracing import Tracing

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


def links(span: ReadableSpan) -> list[tuple[str, str]]:
    return [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links]


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
    assert [(each.start_time, each.end_time) for each in (beside, inside)] == [(5, 9), (9, 12)]


def test_a_consumer_span_is_a_child_of_the_publishers_span_and_links_to_it(recorded: Recorded) -> None:
    message = request()

    with recorded.tracing.send(message, exchange="lane.requests", routing_key="critical.support.chat"):
        pass
    with recorded.tracing.process(message, queue="lane.critical", delivery_tag=7):
        pass

    sent, processed = recorded.span("send lane.requests"), recorded.span("process lane.critical")
    assert sent.kind is SpanKind.PRODUCER
    assert parent(sent) is None
    assert message.headers["traceparent"] == "00-{}-{}-03".format(*ids(sent))
    assert processed.kind is SpanKind.CONSUMER
    assert (ids(processed)[0], parent(processed)) == ids(sent)
    assert links(processed) == [ids(sent)]


def test_every_hop_is_a_child_of_the_hop_before_it(recorded: Recorded) -> None:
    message = request({"traceparent": VALID})

    with recorded.tracing.process(message, queue="lane.critical"):
        copy = Message(body=message.body, headers=message.headers, routing_key=message.routing_key)
        with recorded.tracing.send(copy, exchange="lane.delay.03", routing_key=copy.routing_key):
            pass
    with recorded.tracing.process(copy, queue="lane.critical.due"):
        reply = Message(body=b"{}")
        with recorded.tracing.send(reply, exchange="", routing_key="amq.gen-1"):
            pass
        with recorded.tracing.settle(signals.ACK, copy, queue="lane.critical.due", delivery_tag=1):
            pass

    first, hop = recorded.span("process lane.critical"), recorded.span("send lane.delay.03")
    second = recorded.span("process lane.critical.due")
    assert parent(first) == SPAN
    assert links(first) == [(TRACE, SPAN)]
    assert parent(hop) == ids(first)[1]
    assert parent(second) == ids(hop)[1]
    assert links(second) == [ids(hop)]
    assert parent(recorded.span("send (reply)")) == ids(second)[1]
    assert parent(recorded.span("ack lane.critical.due")) == ids(second)[1]
    assert {ids(span)[0] for span in recorded.exporter.get_finished_spans()} == {TRACE}
    assert message.headers["traceparent"] == VALID, "the delivered message's own headers were changed"


def test_a_publish_span_is_a_child_of_the_active_span(recorded: Recorded) -> None:
    message = request({"traceparent": VALID})

    with (
        recorded.provider.get_tracer("app").start_as_current_span("checkout"),
        recorded.tracing.send(message, exchange="lane.requests", routing_key="k"),
    ):
        pass

    sent = recorded.span("send lane.requests")
    assert (ids(sent)[0], parent(sent)) == ids(recorded.span("checkout"))
    assert links(sent) == [(TRACE, SPAN)], "the context that the message brought is linked, not lost"


def test_without_an_active_span_a_publish_span_is_a_child_of_the_span_in_the_message(recorded: Recorded) -> None:
    message = request({"traceparent": VALID})

    with recorded.tracing.send(message, exchange="lane.requests", routing_key="k"):
        pass

    assert parent(recorded.span("send lane.requests")) == SPAN


@pytest.mark.parametrize("junk", [None, 5, b"\xff", ["x"], {"a": 1}, "00-zz", VALID + "\n"])
def test_a_malformed_context_starts_a_new_trace_even_inside_another_span(recorded: Recorded, junk: object) -> None:
    with (
        recorded.provider.get_tracer("app").start_as_current_span("elsewhere"),
        recorded.tracing.process(request({"traceparent": junk}), queue="lane.critical"),
    ):
        pass

    processed = recorded.span("process lane.critical")
    assert parent(processed) is None
    assert links(processed) == []
    assert ids(processed)[0] != ids(recorded.span("elsewhere"))[0]


def test_messaging_attributes_follow_the_semantic_conventions(recorded: Recorded) -> None:
    message = request()

    with recorded.tracing.process(message, queue="lane.critical", delivery_tag=7) as span:
        recording.request(span, lane="critical", app="support", attempt=2, wait_ms=40, redelivered=True)
        recording.outcome(span, "retried", error="overloaded_error", delay_ms=1500)
        with recorded.tracing.send(Message(body=b"{}"), exchange="", routing_key="replies"):
            pass
        with recorded.tracing.settle("ack", message, queue="lane.critical", delivery_tag=7):
            pass

    common = {"messaging.system": "rabbitmq", "server.address": "broker", "server.port": 5672}
    assert dict(recorded.span("process lane.critical").attributes or {}) == common | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "lane.requests:critical.support.chat:lane.critical",
        "messaging.rabbitmq.destination.routing_key": "critical.support.chat",
        "messaging.rabbitmq.message.delivery_tag": 7,
        "messaging.message.id": "m-1",
        "messaging.message.conversation_id": "c-1",
        "messaging.message.body.size": len(CANARY),
        "lane.name": "critical",
        "lane.app": "support",
        "lane.attempt": 2,
        "lane.wait_ms": 40,
        "lane.redelivered": True,
        "lane.outcome": "retried",
        "lane.delay_ms": 1500,
        "error.type": "overloaded_error",
    }
    assert dict(recorded.span("send (reply)").attributes or {}) == common | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "replies",
        "messaging.destination.template": "(reply)",
        "messaging.rabbitmq.destination.routing_key": "replies",
        "messaging.message.body.size": 2,
    }
    assert dict(recorded.span("ack lane.critical").attributes or {}) == common | {
        "messaging.operation.name": "ack",
        "messaging.operation.type": "settle",
        "messaging.destination.name": "lane.requests:critical.support.chat:lane.critical",
        "messaging.rabbitmq.destination.routing_key": "critical.support.chat",
        "messaging.rabbitmq.message.delivery_tag": 7,
        "messaging.message.id": "m-1",
        "messaging.message.conversation_id": "c-1",
        "messaging.message.body.size": len(CANARY),
    }


def test_a_chat_span_has_the_model_the_parameters_and_the_usage(recorded: Recorded) -> None:
    with recorded.tracing.chat(model="claude-x", provider="anthropic", stream=True, max_tokens=64) as span:
        inside = recorded.tracing.traceparent()
        recording.answer(
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
        recording.answer(span, model=odd, input_tokens=1, output_tokens=1, stop_reason=odd, request_id=odd)

    attributes = dict(recorded.span("chat claude-x").attributes or {})
    assert attributes["gen_ai.response.model"] == "?"
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
        recording.request(span, lane="critical", app="a", attempt=1, wait_ms=1)
        with tracing.chat(model="m", provider="p", stream=False), tracing.send(out, exchange="e", routing_key="k"):
            pass
        with tracing.settle(signals.ACK, out, queue="lane.critical", delivery_tag=1):
            pass
    return dict(out.headers)


def test_without_an_sdk_the_requesters_trace_context_is_passed_on() -> None:
    context_of_requester = {"traceparent": VALID, "tracestate": "a=1", "baggage": "b=2;p"}

    assert hop(Tracing(), context_of_requester) == {**context_of_requester, "x-lane-attempt": 1}
    assert hop(Tracing(), {"traceparent": 5}) == {"x-lane-attempt": 1}


def test_without_an_sdk_a_publisher_sends_the_context_it_was_given() -> None:
    message = request({"traceparent": VALID})

    with Tracing().send(message, exchange="lane.requests", routing_key="k"):
        pass

    assert message.headers == {"traceparent": VALID}


def test_without_an_sdk_the_provider_gets_the_requesters_span_as_parent() -> None:
    tracing = Tracing()

    with tracing.process(request({"traceparent": VALID}), queue="q"):
        assert tracing.traceparent() == VALID
        assert tracing.trace_id() == TRACE
    assert tracing.traceparent() is None


def test_an_unsampled_trace_stays_unsampled() -> None:
    tracing = Tracing(TracerProvider(sampler=ALWAYS_OFF))

    out = hop(tracing, {"traceparent": VALID, "baggage": "b=2"})

    assert out["traceparent"].startswith(f"00-{TRACE}-")
    assert out["traceparent"].endswith("-00")
    assert out["baggage"] == "b=2"


def test_no_span_is_made_under_an_unsampled_span() -> None:
    asked: list[str] = []

    class Sampler(type(ALWAYS_OFF)):  # type: ignore[misc]
        def should_sample(self, parent_context: Any, trace_id: int, name: str, *rest: Any, **more: Any) -> Any:
            asked.append(name)
            return super().should_sample(parent_context, trace_id, name, *rest, **more)

    hop(Tracing(TracerProvider(sampler=Sampler(ALWAYS_OFF._decision))), {})

    assert asked == ["process lane.critical"]


def test_a_global_tracer_provider_that_is_set_later_is_used(
    monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    tracing = Tracing()
    with tracing.process(request(), queue="lane.normal"):
        pass
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: recorded.provider)

    with tracing.process(request(), queue="lane.critical"):
        pass

    assert [span.name for span in recorded.exporter.get_finished_spans()] == ["process lane.critical"]
