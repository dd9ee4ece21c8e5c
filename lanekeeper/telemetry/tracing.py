"""One trace per request: a span for each step of its message, written with OpenTelemetry's API only.

    PRODUCER send lane.requests            the publisher's; its context is in the message's headers
    ├── CONSUMER process lane.critical     child of, and linked to, the span in the message
    │   ├── CLIENT chat <model>            one attempt; what the provider's client adds comes under it
    │   ├── PRODUCER send lane.delay.03    a retry: `delay`, `wait` and the next `process` are children of this
    │   ├── PRODUCER send (reply)
    │   └── CLIENT ack lane.critical
    └── INTERNAL wait lane.critical        until it was taken; written by the worker that took it

The conventions make links the default and allow a parent for single messages. A request here is one message at a
time, so both are set, and any viewer shows one tree. The conventions also ask to leave a creation context in a message
unchanged. Our hops replace it: a retry that kept its first publisher's context would hide every wait but the first.

Without an SDK, or if the trace is not sampled, no spans are built, but the trace context is still passed on.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

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
_MODEL_MAXIMUM: Final = 128  # characters of a requester's model name in a span's name


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._around is not None:
            context.detach(self._token)
        if self._span.is_recording():
            if error is not None:
                fail(self._span, error_type(error))
            self._span.end()


class Tracing:
    """Makes the spans. `provider` None: the global one, once it is set. `broker`: returns its current host and port."""

    def __init__(
        self, provider: TracerProvider | None = None, *, broker: Callable[[], tuple[str, int]] | None = None
    ) -> None:
        self._tracer = None if provider is None else _tracer_of(provider)
        self._broker = broker

    def send(self, message: Message, *, exchange: str, routing_key: str) -> Scope:
        """Publish `message` inside this block; its headers are replaced by a new dict that carries the span's context.

        The span is a child of the current span, or else of the span in the message's headers. If the current span and
        that span belong to different traces, the latter is linked.
        """
        around = trace.get_current_span()
        current = around.get_span_context()
        tracer = self._recorder()
        if tracer is None or _is_sampled_out(around):
            self.carry(message)
            return _NOTHING
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
            attributes = self._of(message, operation=signals.SEND, type=signals.SEND)
            attributes[signals.MESSAGING_DESTINATION_NAME] = _destination(exchange, routing_key)
            attributes[signals.MESSAGING_ROUTING_KEY] = routing_key
            if not exchange:
                attributes[signals.MESSAGING_DESTINATION_TEMPLATE] = signals.REPLY_TEMPLATE
            span.set_attributes(attributes)
        return Scope(span, None)

    def carry(self, message: Message) -> None:
        """Give `message` the context of the current span, or else keep that in its headers. Makes no span."""
        current = trace.get_current_span().get_span_context()
        passed_on = current if current.is_valid else propagation.read(message.headers)
        message.headers = propagation.written(message.headers, passed_on or INVALID_SPAN_CONTEXT)

    def ask(self) -> Scope:
        """Publish a request and wait for its answer inside this block."""
        if (tracer := self._recorder()) is None:
            return _NOTHING
        span = tracer.start_span(signals.ASK, kind=SpanKind.CLIENT)
        return Scope(span, trace.set_span_in_context(span))

    def process(
        self,
        message: Message,
        *,
        queue: str,
        delivery_tag: int | None = None,
        operation: str = signals.PROCESS,
        start_ns: int | None = None,
    ) -> Scope:
        """Work on a delivered message inside this block. What was current before does not affect its spans."""
        publisher = propagation.read(message.headers)
        received = propagation.received(message.headers, publisher)
        tracer = self._recorder()
        if tracer is None:
            return Scope(INVALID_SPAN, received)
        span = tracer.start_span(
            f"{operation} {queue}",
            context=received,
            kind=SpanKind.CONSUMER,
            links=None if publisher is None else (Link(publisher),),
            start_time=start_ns,
        )
        if span.is_recording():
            attributes = self._of(message, operation=operation, type=signals.PROCESS)
            self._received_from(attributes, message, queue, delivery_tag)
            span.set_attributes(attributes)
        return Scope(span, trace.set_span_in_context(span, received))

    def passed(self, name: str, *, start_ns: int, end_ns: int, came_by: Message | None = None) -> None:
        """Write a span for a time that has passed. Its parent is the span in the headers of `came_by`, so that it
        stands beside the current `process`; without `came_by`, the current span."""
        if self._tracer is None:
            return
        publisher = None if came_by is None else propagation.read(came_by.headers)
        parent = None if publisher is None else trace.set_span_in_context(NonRecordingSpan(publisher))
        self._tracer.start_span(name, parent, start_time=start_ns).end(end_ns)

    def settle(self, operation: str, message: Message, *, queue: str, delivery_tag: int) -> Scope:
        """Acknowledge (`signals.ACK`) or return a delivery inside this block, and inside its `process`."""
        if self._tracer is None or _is_sampled_out(trace.get_current_span()):
            return _NOTHING
        span = self._tracer.start_span(f"{operation} {queue}", kind=SpanKind.CLIENT)
        if span.is_recording():
            attributes = self._of(message, operation=operation, type=signals.SETTLE)
            self._received_from(attributes, message, queue, delivery_tag)
            span.set_attributes(attributes)
        return Scope(span, None)

    def chat(
        self,
        *,
        model: str,
        provider: str,
        stream: bool,
        max_tokens: int | None = None,
        server: tuple[str, int] | None = None,
    ) -> Scope:
        """Call the model once inside this block, and inside `process`; `server` is the provider's host and port."""
        if self._tracer is None or _is_sampled_out(trace.get_current_span()):
            return _NOTHING
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
            if server is not None:
                attributes |= {signals.SERVER_ADDRESS: server[0], signals.SERVER_PORT: server[1]}
            span.set_attributes(attributes)
        return Scope(span, trace.set_span_in_context(span))

    def traceparent(self) -> str | None:
        """The current span, for the provider's HTTP request, which never gets `tracestate` or `baggage`."""
        current = trace.get_current_span().get_span_context()
        return propagation.traceparent(current) if current.is_valid else None

    def trace_id(self) -> str | None:
        """The current trace, as logs write it: 32 hexadecimal digits."""
        current = trace.get_current_span().get_span_context()
        return f"{current.trace_id:032x}" if current.is_valid else None

    def _recorder(self) -> Tracer | None:
        """The tracer; None while there is no SDK. Called only where a message comes in or goes out: it costs 1 µs."""
        if self._tracer is None:
            self._tracer = _tracer_of(trace.get_tracer_provider())
        return self._tracer

    def _of(self, message: Message, *, operation: str, type: str) -> Attributes:
        attributes: Attributes = {
            signals.MESSAGING_SYSTEM: signals.RABBITMQ,
            signals.MESSAGING_OPERATION_NAME: operation,
            signals.MESSAGING_OPERATION_TYPE: type,
            signals.MESSAGING_BODY_SIZE: len(message.body),
        }
        if self._broker is not None:
            attributes[signals.SERVER_ADDRESS], attributes[signals.SERVER_PORT] = self._broker()
        if message.message_id is not None:
            attributes[signals.MESSAGING_MESSAGE_ID] = message.message_id
        if message.correlation_id is not None:
            attributes[signals.MESSAGING_CONVERSATION_ID] = message.correlation_id
        return attributes

    @staticmethod
    def _received_from(attributes: Attributes, message: Message, queue: str, delivery_tag: int | None) -> None:
        attributes[signals.MESSAGING_DESTINATION_NAME] = _destination(message.exchange, message.routing_key, queue)
        attributes[signals.MESSAGING_ROUTING_KEY] = message.routing_key
        if delivery_tag is not None:
            attributes[signals.MESSAGING_DELIVERY_TAG] = delivery_tag


class _Nothing(Scope):
    """A scope without a span, which leaves the current context unchanged."""

    __slots__ = ()

    def __enter__(self) -> Span:
        return INVALID_SPAN

    def __exit__(self, *_: Any) -> None: ...


_NOTHING: Final = _Nothing(INVALID_SPAN, None)


def _tracer_of(provider: TracerProvider) -> Tracer | None:
    """The provider's tracer; None if it is one of the API's placeholders for the case that there is no SDK."""
    return None if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider) else provider.get_tracer(SCOPE)


def _is_sampled_out(span: Span) -> bool:
    """Whether `span` is from this process and not recorded: its children would not be recorded either."""
    return not span.is_recording() and (of := span.get_span_context()).is_valid and not of.is_remote


def _destination(*parts: str) -> str:
    """`exchange:routing key[:queue]`: empty parts left out, equal ones written once (conventions for RabbitMQ)."""
    return ":".join(dict.fromkeys(part for part in parts if part)) or signals.DEFAULT_EXCHANGE
