from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from consumers.dialects.openai_embeddings import EMBEDDINGS
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown, LanekeeperError, RequestProblem
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import (
    Tracing,
    record_answer,
    record_request,
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


def test_a_call_for_embeddings_is_named_by_its_operation(recorded: Recorded) -> None:
    with recorded.tracing.chat(model="small", provider="openai", stream=False, operation=EMBEDDINGS.operation):
        pass

    assert dict(recorded.span("embeddings small").attributes or {}) == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "small",
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
