"""One trace per request: a span for each step of its message, written with OpenTelemetry's API only.

    PRODUCER send lane.requests            the publisher's span; its context is in the message's headers
    ├── CONSUMER process lane.critical     child of the span in the message's headers, and linked to it
    │   ├── CLIENT chat <model>            one attempt; spans of the provider's client are its children
    │   ├── PRODUCER send lane.delay.03    a retry; `delay`, `wait` and the next `process` are its children
    │   ├── PRODUCER send (reply)
    │   └── CLIENT ack lane.critical
    └── INTERNAL wait lane.critical        the wait in the queue; written by the worker that takes the request

Against the conventions, each worker that publishes a request again replaces the context in its message: otherwise the
trace of a retried request would show only its first wait.

Without an OpenTelemetry SDK, or if the trace is not sampled, no spans are made. The trace context is still passed on.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import (
    INVALID_SPAN,
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lanekeeper.contract.identity import is_word, shown
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import BAGGAGE, TRACE_CONTEXT, TRACEPARENT
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from lanekeeper.telemetry import signals

SCOPE: Final = "lanekeeper"
Attributes: TypeAlias = dict[str, str | int | float | bool | tuple[str, ...]]
_ERROR: Final = Status(StatusCode.ERROR)
LINKS: Final = 100
_MODEL_MAXIMUM: Final = 128
"""The requester chooses the name."""
_TRACE_CONTEXT: Final = TraceContextTextMapPropagator()
_TEXT_MAXIMUM: Final = 512
_BAGGAGE: Final = re.compile(r"[\x20-\x7e]+")  # not parsed, so that it is passed on unchanged
_BAGGAGE_MAXIMUM: Final = 8192
_BAGGAGE_MEMBERS: Final = 180
_CARRIED_BAGGAGE: Final = "lanekeeper-baggage"
_OWN_BAGGAGE: Final = W3CBaggagePropagator()


class Scope:
    """A span that lasts as long as a `with` block. An exception marks it as failed, without its text."""

    __slots__ = ("_around", "_span", "_token")

    def __init__(self, span: Span, around: Context | None) -> None:
        self._span = span
        self._around = around

    def __enter__(self) -> Span:
        if self._around is not None:
            self._token = context.attach(self._around)
        return self._span

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._around is not None:
            context.detach(self._token)
        if self._span.is_recording():
            if error is not None:
                mark_failed(self._span, error_type(error))
            self._span.end()


class Tracing:
    """Makes spans. Without `provider`, it uses the global one as soon as it is set. `broker` returns host and port."""

    def __init__(
        self, provider: TracerProvider | None = None, *, broker: Callable[[], tuple[str, int]] | None = None
    ) -> None:
        self._tracer = None if provider is None else _tracer_of(provider)
        self._broker = broker

    def send(self, message: Message, *, exchange: str, routing_key: str) -> Scope:
        """A publish, whose message gets the span's context in its headers. A child of the current span, else of the one
        in the headers; if they name another trace, linked to it."""
        around = trace.get_current_span()
        current = around.get_span_context()
        tracer = self._find_tracer()
        if tracer is None or _is_sampled_out(around):
            self.carry(message)
            return _NO_SPAN
        parent, links = None, None
        if (named := context_in(message.headers)) is not None:
            if not current.is_valid:
                parent = trace.set_span_in_context(NonRecordingSpan(named))
            elif named.trace_id != current.trace_id:
                links = (Link(named),)
        span = tracer.start_span(
            f"{signals.SEND} {exchange or signals.REPLY_TEMPLATE}", parent, kind=SpanKind.PRODUCER, links=links
        )
        message.headers = headers_with(message.headers, span.get_span_context())
        if span.is_recording():
            attributes = self._attributes(message, signals.SEND, exchange, routing_key)
            if not exchange:
                attributes[signals.MESSAGING_DESTINATION_TEMPLATE] = signals.REPLY_TEMPLATE
            span.set_attributes(attributes)
        return Scope(span, None)

    def carry(self, message: Message) -> None:
        """Without a span: the current context in the message's headers, else the valid one that they have."""
        current = trace.get_current_span().get_span_context()
        passed_on = current if current.is_valid else context_in(message.headers)
        message.headers = headers_with(message.headers, passed_on or INVALID_SPAN_CONTEXT)

    def ask(self) -> Scope:
        if (tracer := self._find_tracer()) is None:
            return _NO_SPAN
        span = tracer.start_span(signals.ASK, kind=SpanKind.CLIENT)
        return Scope(span, trace.set_span_in_context(span))

    def process(
        self, message: Message, *, queue: str, delivery_tag: int | None = None, start_ns: int | None = None
    ) -> Scope:
        """The processing of a delivered message: linked to its publisher's span, and without the current context."""
        publisher = context_in(message.headers)
        received = received_context(message.headers, publisher)
        tracer = self._find_tracer()
        if tracer is None:
            return Scope(INVALID_SPAN, received)
        span = tracer.start_span(
            f"{signals.PROCESS} {queue}",
            context=received,
            kind=SpanKind.CONSUMER,
            links=None if publisher is None else (Link(publisher),),
            start_time=start_ns,
        )
        if span.is_recording():
            attributes = self._attributes(message, signals.PROCESS, message.exchange, message.routing_key, queue)
            if delivery_tag is not None:
                attributes[signals.MESSAGING_DELIVERY_TAG] = delivery_tag
            span.set_attributes(attributes)
        return Scope(span, trace.set_span_in_context(span, received))

    def passed(self, name: str, *, start_ns: int, end_ns: int, came_by: Message | None = None) -> None:
        """A period that has ended, such as a wait in a queue. Its parent is the span in the headers of `came_by`, else
        the current one."""
        if self._tracer is None:
            return
        publisher = None if came_by is None else context_in(came_by.headers)
        parent = None if publisher is None else trace.set_span_in_context(NonRecordingSpan(publisher))
        self._tracer.start_span(name, parent, start_time=start_ns).end(end_ns)

    def settle(self, operation: str, message: Message, *, queue: str, delivery_tag: int) -> Scope:
        def said() -> Attributes:
            attributes = self._attributes(message, operation, message.exchange, message.routing_key, queue)
            attributes[signals.MESSAGING_OPERATION_TYPE] = signals.SETTLE
            attributes[signals.MESSAGING_DELIVERY_TAG] = delivery_tag
            return attributes

        return self._step(f"{operation} {queue}", said, is_current=False)

    def chat(
        self,
        *,
        model: str,
        provider: str,
        stream: bool,
        max_tokens: int | None = None,
        operation: str = signals.CHAT,
    ) -> Scope:
        """A call of a provider."""

        def said() -> Attributes:
            attributes: Attributes = {
                signals.GEN_AI_OPERATION_NAME: operation,
                signals.GEN_AI_PROVIDER_NAME: provider,
                signals.GEN_AI_REQUEST_MODEL: model[:_MODEL_MAXIMUM],
            }
            if stream:
                attributes[signals.GEN_AI_REQUEST_STREAM] = True
            if max_tokens is not None:
                attributes[signals.GEN_AI_REQUEST_MAX_TOKENS] = max_tokens
            return attributes

        return self._step(f"{operation} {model[:_MODEL_MAXIMUM]}", said)

    def post(self, host: str) -> Scope:
        return self._step(signals.POST, lambda: {signals.HTTP_METHOD: signals.POST, signals.SERVER_ADDRESS: host})

    def handler(self, name: str) -> Scope:
        return self._step(f"{signals.HANDLER} {name}", dict, kind=SpanKind.INTERNAL)

    def _step(
        self, name: str, said: Callable[[], Attributes], *, kind: SpanKind = SpanKind.CLIENT, is_current: bool = True
    ) -> Scope:
        """A child of the current span. `said`: its attributes, if it is recorded."""
        if self._tracer is None or _is_sampled_out(trace.get_current_span()):
            return _NO_SPAN
        span = self._tracer.start_span(name, kind=kind)
        if span.is_recording():
            span.set_attributes(said())
        return Scope(span, trace.set_span_in_context(span) if is_current else None)

    def batch(self, operation: str, requests: Sequence[Message], *, model: str, provider: str) -> Scope:
        """The work on a provider's batch: a trace of its own, with links to those of the first `LINKS` requests. It is
        not the current span, so that each request's own trace goes on."""
        if (tracer := self._find_tracer()) is None:
            return _NO_SPAN
        contexts = (context_in(message.headers) for message in requests[:LINKS])
        links = [Link(found) for found in contexts if found is not None]
        span = tracer.start_span(f"{signals.BATCH} {operation}", Context(), kind=SpanKind.CLIENT, links=links)
        if span.is_recording():
            attributes: Attributes = {
                signals.GEN_AI_PROVIDER_NAME: provider,
                signals.GEN_AI_REQUEST_MODEL: model[:_MODEL_MAXIMUM],
                signals.LANE_BATCH_REQUESTS: len(requests),
            }
            span.set_attributes(attributes)
        return Scope(span, None)

    def traceparent(self) -> str | None:
        """For an HTTP request to a provider, which gets neither `tracestate` nor `baggage`."""
        current = trace.get_current_span().get_span_context()
        return traceparent_of(current) if current.is_valid else None

    def trace_id(self) -> str | None:
        return trace_id_of(trace.get_current_span(), {})

    def _find_tracer(self) -> Tracer | None:
        """Takes 1 µs, so it is called only when a message is received or published."""
        if self._tracer is None:
            self._tracer = _tracer_of(trace.get_tracer_provider())
        return self._tracer

    def _attributes(
        self, message: Message, operation: str, exchange: str, routing_key: str, queue: str = ""
    ) -> Attributes:
        # OpenTelemetry's conventions for RabbitMQ: `exchange:routing key[:queue]`, without empty and repeated parts
        destination = dict.fromkeys(part for part in (exchange, routing_key, queue) if part)
        attributes: Attributes = {
            signals.MESSAGING_SYSTEM: signals.RABBITMQ,
            signals.MESSAGING_OPERATION_NAME: operation,
            signals.MESSAGING_OPERATION_TYPE: operation,
            signals.MESSAGING_DESTINATION_NAME: ":".join(destination) or signals.DEFAULT_EXCHANGE,
            signals.MESSAGING_ROUTING_KEY: routing_key,
            signals.MESSAGING_BODY_SIZE: len(message.body),
        }
        if self._broker is not None:
            attributes[signals.SERVER_ADDRESS], attributes[signals.SERVER_PORT] = self._broker()
        if message.message_id is not None:
            attributes[signals.MESSAGING_MESSAGE_ID] = message.message_id
        if message.correlation_id is not None:
            attributes[signals.MESSAGING_CONVERSATION_ID] = message.correlation_id
        return attributes


_NO_SPAN: Final = Scope(INVALID_SPAN, None)


def _tracer_of(provider: TracerProvider) -> Tracer | None:
    """None for OpenTelemetry's placeholders, which stand for a missing SDK."""
    return None if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider) else provider.get_tracer(SCOPE)


def _is_sampled_out(span: Span) -> bool:
    """Made by this process and not recorded: then its children would not be either."""
    return not span.is_recording() and (of := span.get_span_context()).is_valid and not of.is_remote


# ---- what a span says of a request -----------------------------------------------------------------------------------


def record_request(
    span: Span, *, lane: str, app: str, attempt: int, wait_ms: int, redelivered: bool, step: str
) -> None:
    """`attempt` counts from 1."""
    if not span.is_recording():
        return
    attributes: Attributes = {
        signals.LANE_NAME: lane,
        signals.LANE_APP: app,
        signals.LANE_ATTEMPT: attempt,
        signals.LANE_WAIT_MS: wait_ms,
    }
    if redelivered:
        attributes[signals.LANE_REDELIVERED] = True
    if step:
        attributes[signals.LANE_STEP] = step
    span.set_attributes(attributes)


def record_answer(
    span: Span,
    *,
    model: str,
    input_tokens: int,
    output_tokens: int,
    cache_read_tokens: int = 0,
    cache_write_tokens: int = 0,
    stop_reason: str | None = None,
    request_id: str | None = None,
    cost_usd: float | None = None,
) -> None:
    """`input_tokens` excludes cached tokens, as in Anthropic's answers; the attribute is the sum."""
    if not span.is_recording():
        return
    found: dict[str, Any] = {
        signals.GEN_AI_RESPONSE_MODEL: shown(model),
        signals.GEN_AI_INPUT_TOKENS: input_tokens + cache_read_tokens + cache_write_tokens,
        signals.GEN_AI_OUTPUT_TOKENS: output_tokens,
        signals.GEN_AI_CACHE_READ_TOKENS: cache_read_tokens or None,
        signals.GEN_AI_CACHE_WRITE_TOKENS: cache_write_tokens or None,
        signals.GEN_AI_RESPONSE_FINISH_REASONS: (stop_reason,) if stop_reason and is_word(stop_reason) else None,
        signals.PROVIDER_REQUEST_ID: request_id if request_id and is_word(request_id) else None,
        signals.LANE_COST_USD: cost_usd,
    }
    span.set_attributes({name: value for name, value in found.items() if value is not None})


def record_outcome(span: Span, name: str, *, error: str | None = None, delay_ms: int | None = None) -> None:
    """`error`: a problem's code or an error's type."""
    if not span.is_recording():
        return
    span.set_attribute(signals.LANE_OUTCOME, name)
    if delay_ms is not None:
        span.set_attribute(signals.LANE_DELAY_MS, delay_ms)
    if error is not None:
        mark_failed(span, error)


def record_status(span: Span, status: int) -> None:
    """Of the answer to an HTTP call."""
    if span.is_recording():
        span.set_attribute(signals.HTTP_STATUS, status)
        if status >= 300:
            mark_failed(span, str(status))


def mark_failed(span: Span, error: str) -> None:
    """Without a description: an exception's text may quote a prompt or an answer."""
    span.set_attribute(signals.ERROR_TYPE, error)
    span.set_status(_ERROR)


def error_type(error: BaseException) -> str:
    """A problem's code, the provider's error type if it `is_word` (it comes from its answer's body), or the class."""
    if isinstance(error, RequestProblem):
        return error.code
    word = getattr(error, "type", None) if isinstance(error, LanekeeperError) else None
    return word if isinstance(word, str) and is_word(word) else type(error).__name__


# ---- W3C trace context in headers ------------------------------------------------------------------------------------


class _Headers(Getter[Mapping[str, Any]]):
    """Of a message that anybody may have written: short ASCII text, or nothing."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        text = _ascii(carrier.get(key), maximum=_TEXT_MAXIMUM)
        return None if text is None else [text]

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_HEADERS: Final = _Headers()


def context_in(headers: Mapping[str, Any]) -> SpanContext | None:
    """The W3C trace context in a message's headers; None if there is none, or an invalid one. Never raises."""
    if TRACEPARENT not in headers:
        return None
    found = trace.get_current_span(_TRACE_CONTEXT.extract(headers, Context(), _HEADERS)).get_span_context()
    return found if found.is_valid else None


def trace_id_of(span: Span, headers: Mapping[str, Any]) -> str | None:
    """Of `span`, or if it is not valid, in the headers."""
    found = span.get_span_context()
    named = found if found.is_valid else context_in(headers)
    return None if named is None else f"{named.trace_id:032x}"


def trace_url(jaeger_url: str | None, trace_id: str | None) -> str | None:
    """Where people look at a trace; None without a trace, or without a Jaeger."""
    return None if jaeger_url is None or trace_id is None else f"{jaeger_url}/trace/{trace_id}"


def received_context(headers: Mapping[str, Any], publisher: SpanContext | None) -> Context:
    """The publisher's span and the baggage of the headers, and nothing of the current context."""
    values: dict[str, object] = {}
    if BAGGAGE in headers and (carried := _baggage(headers[BAGGAGE])) is not None:
        values[_CARRIED_BAGGAGE] = carried
    if publisher is None:
        return Context(values)
    return trace.set_span_in_context(NonRecordingSpan(publisher), Context(values))


def headers_with(headers: Mapping[str, Any], span: SpanContext) -> dict[str, Any]:
    """A copy with the context of `span` and the current baggage, or if there is none, the valid one of the headers."""
    out = {name: value for name, value in headers.items() if name not in TRACE_CONTEXT}
    if span.is_valid:
        _TRACE_CONTEXT.inject(out, trace.set_span_in_context(NonRecordingSpan(span), Context()))
    current = context.get_current()
    if baggage.get_all(current):
        _OWN_BAGGAGE.inject(out, current)
    elif (carried := current.get(_CARRIED_BAGGAGE) or _baggage(headers.get(BAGGAGE))) is not None:
        out[BAGGAGE] = carried
    return out


def traceparent_of(span: SpanContext) -> str:
    """The value of the header that names `span` as the parent."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _ascii(value: object, *, maximum: int) -> str | None:
    if isinstance(value, bytes | bytearray) and len(value) <= maximum and value.isascii():
        return value.decode("ascii")
    return value if isinstance(value, str) and len(value) <= maximum and value.isascii() else None


def _baggage(value: object) -> str | None:
    text = _ascii(value, maximum=_BAGGAGE_MAXIMUM)
    return text if text and _BAGGAGE.fullmatch(text) and text.count(",") < _BAGGAGE_MEMBERS else None
