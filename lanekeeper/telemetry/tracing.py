"""One trace per request: a span for each step of its message, written with OpenTelemetry's API only.

    PRODUCER send lane.requests            the publisher's span; its context is in the message's headers
    ├── CONSUMER process lane.critical     child of the span in the message's headers, and linked to it
    │   ├── CLIENT chat <model>            one attempt; spans of the provider's client are its children
    │   ├── PRODUCER send lane.delay.03    a retry; `delay`, `wait` and the next `process` are its children
    │   ├── PRODUCER send (reply)
    │   └── CLIENT ack lane.critical
    └── INTERNAL wait lane.critical        the wait in the queue; written by the worker that takes the request

OpenTelemetry's conventions make links the default and allow a parent for single messages. A request is always a single
message, so `process` has both a link and a parent, and any viewer shows one tree. The conventions also say that the
context in a message is never replaced. Lanekeeper departs from this: each worker that publishes a request again
replaces the context, because otherwise the trace of a retried request would show only its first wait.

Without an OpenTelemetry SDK, or if the trace is not sampled, no spans are made. The trace context is still passed on.
"""

from collections.abc import Callable
from typing import Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanKind,
    Tracer,
    TracerProvider,
)

from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import propagation, signals
from lanekeeper.telemetry.recording import Attributes, error_type, fail

SCOPE: Final = "lanekeeper"
_MODEL_MAXIMUM: Final = 128
"""The maximum length, in characters, of a model's name in a span. Longer names are cut, because the requester chooses
the name."""


class Scope:
    """A span that lasts as long as a `with` block; an exception marks it as failed, without the exception's text."""

    __slots__ = ("_around", "_span", "_token")

    def __init__(self, span: Span, around: Context | None) -> None:
        self._span = span
        self._around = around
        """The context that is current inside the block; None leaves it unchanged."""

    def __enter__(self) -> Span:
        if self._around is not None:
            self._token = context.attach(self._around)
        return self._span

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._around is not None:
            context.detach(self._token)
        if self._span.is_recording():
            if error is not None:
                fail(self._span, error_type(error))
            self._span.end()


class Tracing:
    """Creates the OpenTelemetry spans for publishing, processing and settling (acknowledging or rejecting) messages and
    for calls to models. If `provider` is None, it uses the global tracer provider, as soon as one is set. `broker`
    returns the host and port of the broker that is connected at present."""

    def __init__(
        self, provider: TracerProvider | None = None, *, broker: Callable[[], tuple[str, int]] | None = None
    ) -> None:
        self._tracer = None if provider is None else _tracer_of(provider)
        self._broker = broker

    def send(self, message: Message, *, exchange: str, routing_key: str) -> Scope:
        """A span for a publish: publish `message` inside its `with` block. The message gets new headers, which contain
        the context of this span.

        The span is a child of the current span, or if there is none, of the span in the message's headers. If the
        headers name a span of another trace than the current one, the new span is linked to it.
        """
        around = trace.get_current_span()
        current = around.get_span_context()
        tracer = self._find_tracer()
        if tracer is None or _is_sampled_out(around):
            self.carry(message)
            return _NO_SPAN
        parent, links = None, None
        if (named := propagation.read(message.headers)) is not None:
            if not current.is_valid:
                parent = trace.set_span_in_context(NonRecordingSpan(named))
            elif named.trace_id != current.trace_id:
                links = (Link(named),)
        span = tracer.start_span(
            f"{signals.SEND} {exchange or signals.REPLY_TEMPLATE}", parent, kind=SpanKind.PRODUCER, links=links
        )
        message.headers = propagation.written(message.headers, span.get_span_context())
        if span.is_recording():
            attributes = self._attributes(message, signals.SEND, exchange, routing_key)
            if not exchange:
                attributes[signals.MESSAGING_DESTINATION_TEMPLATE] = signals.REPLY_TEMPLATE
            span.set_attributes(attributes)
        return Scope(span, None)

    def carry(self, message: Message) -> None:
        """Write the context of the current span into the headers of `message`; without a current span, keep the valid
        trace context in its headers. Makes no span."""
        current = trace.get_current_span().get_span_context()
        passed_on = current if current.is_valid else propagation.read(message.headers)
        message.headers = propagation.written(message.headers, passed_on or INVALID_SPAN_CONTEXT)

    def ask(self) -> Scope:
        """A span for a client's request: publish it and wait for its answer inside the `with` block."""
        if (tracer := self._find_tracer()) is None:
            return _NO_SPAN
        span = tracer.start_span(signals.ASK, kind=SpanKind.CLIENT)
        return Scope(span, trace.set_span_in_context(span))

    def process(
        self, message: Message, *, queue: str, delivery_tag: int | None = None, start_ns: int | None = None
    ) -> Scope:
        """A span for the processing of a delivered message: process it inside the `with` block. The span is linked to
        the span of the message's publisher. The span that is current outside the block has no effect on it."""
        publisher = propagation.read(message.headers)
        received = propagation.received(message.headers, publisher)
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
        """Write a span for a period that has ended, such as a wait in a queue. Its parent is the span in the headers of
        the message `came_by`, so that it is shown beside the span `process` of that message; without `came_by`, its
        parent is the current span."""
        if self._tracer is None:
            return
        publisher = None if came_by is None else propagation.read(came_by.headers)
        parent = None if publisher is None else trace.set_span_in_context(NonRecordingSpan(publisher))
        self._tracer.start_span(name, parent, start_time=start_ns).end(end_ns)

    def settle(self, operation: str, message: Message, *, queue: str, delivery_tag: int) -> Scope:
        """A span for an acknowledgement (`signals.ACK`) or a rejection: send it inside the `with` block. The span is a
        child of the message's `process` span."""
        if self._tracer is None or _is_sampled_out(trace.get_current_span()):
            return _NO_SPAN
        span = self._tracer.start_span(f"{operation} {queue}", kind=SpanKind.CLIENT)
        if span.is_recording():
            attributes = self._attributes(message, operation, message.exchange, message.routing_key, queue)
            attributes[signals.MESSAGING_OPERATION_TYPE] = signals.SETTLE
            attributes[signals.MESSAGING_DELIVERY_TAG] = delivery_tag
            span.set_attributes(attributes)
        return Scope(span, None)

    def chat(self, *, model: str, provider: str, stream: bool, max_tokens: int | None = None) -> Scope:
        """A span for one call to a model: make the call inside the `with` block. The span is a child of the request's
        `process` span."""
        if self._tracer is None or _is_sampled_out(trace.get_current_span()):
            return _NO_SPAN
        span = self._tracer.start_span(f"{signals.CHAT} {model[:_MODEL_MAXIMUM]}", kind=SpanKind.CLIENT)
        if span.is_recording():
            attributes: Attributes = {
                signals.GEN_AI_OPERATION_NAME: signals.CHAT,
                signals.GEN_AI_PROVIDER_NAME: provider,
                signals.GEN_AI_REQUEST_MODEL: model[:_MODEL_MAXIMUM],
            }
            if stream:
                attributes[signals.GEN_AI_REQUEST_STREAM] = True
            if max_tokens is not None:
                attributes[signals.GEN_AI_REQUEST_MAX_TOKENS] = max_tokens
            span.set_attributes(attributes)
        return Scope(span, trace.set_span_in_context(span))

    def traceparent(self) -> str | None:
        """The value of the header `traceparent` for an HTTP request to a provider. Returns None if there is no current
        span. Providers get neither `tracestate` nor `baggage`."""
        current = trace.get_current_span().get_span_context()
        return propagation.traceparent(current) if current.is_valid else None

    def trace_id(self) -> str | None:
        """The id of the current trace, for logs: 32 hexadecimal digits. Returns None if there is no trace."""
        return propagation.trace_id(trace.get_current_span(), {})

    def _find_tracer(self) -> Tracer | None:
        """The tracer; None while there is no OpenTelemetry SDK. Finding it takes 1 µs, so this is called only when a
        message is received or published."""
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
"""A scope that creates no span and leaves the current context unchanged."""


def _tracer_of(provider: TracerProvider) -> Tracer | None:
    """The tracer of a tracer provider. Returns None if the provider is one of OpenTelemetry's placeholders, which stand
    for a missing SDK."""
    return None if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider) else provider.get_tracer(SCOPE)


def _is_sampled_out(span: Span) -> bool:
    """Whether `span` was made by this process and is not recorded (not sampled): then its children would not be
    recorded either."""
    return not span.is_recording() and (of := span.get_span_context()).is_valid and not of.is_remote
