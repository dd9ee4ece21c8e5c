"""Reads and writes W3C trace context in message headers. It validates strictly what it reads, because anybody may write
these headers.

OpenTelemetry's own propagators raise on header values that are not strings (AMQP has twenty types) and log the values
they refuse. Here a value is either accepted as a whole or ignored silently, and messages that we publish carry only
accepted values. Sources of the rules: W3C Trace Context (level 2) and W3C Baggage.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, TraceState

from lanekeeper.contract.names import BAGGAGE, TRACE_CONTEXT, TRACEPARENT, TRACESTATE

# A header `traceparent` of version 00 has exactly 55 characters. That of a later version may continue after another
# dash; its first 55 characters are read like those of version 00.
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_TRACEPARENT_LENGTH: Final = 55
_TRACEPARENT_MAXIMUM: Final = 128
"""The longest header `traceparent`, in characters, that is read."""
_TRACESTATE_MAXIMUM: Final = 512
"""The longest header `tracestate`, in characters, that is read and passed on: W3C requires at least this much."""
_TRACESTATE_MEMBERS: Final = 32
"""The largest number of entries in a header `tracestate`: W3C's limit."""
_TRACESTATE_MEMBER: Final = re.compile(
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_BAGGAGE: Final = re.compile(r"[\x20-\x7e]{1,8192}")  # not parsed, so that it is passed on unchanged
_BAGGAGE_MEMBERS: Final = 180
"""The largest number of entries in a header `baggage`: W3C's limit."""
_KNOWN_FLAGS: Final = TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID
_CARRIED_BAGGAGE: Final = "lanekeeper-baggage"
_FLAGS: Final = tuple(TraceFlags(flags) for flags in range(_KNOWN_FLAGS + 1))
_NO_STATE: Final = TraceState()
_OWN_BAGGAGE: Final = W3CBaggagePropagator()


def read(headers: Mapping[str, Any]) -> SpanContext | None:
    """Read the W3C trace context in a message's headers: that of the span in which the message was published. Returns
    None if the headers contain no trace context, or an invalid one. Never raises."""
    text = _text(headers.get(TRACEPARENT), maximum=_TRACEPARENT_MAXIMUM)
    if text is None or (found := _TRACEPARENT.match(text)) is None:
        return None
    if len(text) != _TRACEPARENT_LENGTH and (text.startswith("00") or text[_TRACEPARENT_LENGTH] != "-"):
        return None
    trace_id, span_id, flags = found.groups()
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=_FLAGS[int(flags, 16) & _KNOWN_FLAGS],
        trace_state=_state(headers.get(TRACESTATE)) if TRACESTATE in headers else _NO_STATE,
    )


def trace_id(span: Span, headers: Mapping[str, Any]) -> str | None:
    """The trace id for log lines about a message, 32 hexadecimal digits: that of `span`, or if the span is not valid,
    that in the message's headers. Returns None if neither has a trace id."""
    found = span.get_span_context()
    named = found if found.is_valid else read(headers)
    return None if named is None else f"{named.trace_id:032x}"


def received(headers: Mapping[str, Any], publisher: SpanContext | None) -> Context:
    """The OpenTelemetry context for processing a message. It contains the publisher's span and the baggage of the
    message's headers, and nothing of the current context."""
    values: dict[str, object] = {}
    if BAGGAGE in headers and (carried := _baggage(headers[BAGGAGE])) is not None:
        values[_CARRIED_BAGGAGE] = carried
    if publisher is None:
        return Context(values)
    return trace.set_span_in_context(NonRecordingSpan(publisher), Context(values))


def written(headers: Mapping[str, Any], span: SpanContext) -> dict[str, Any]:
    """A copy of `headers` with the trace context of `span` and the baggage of the current context.

    Invalid values in `headers` are left out. Valid baggage in `headers` is kept if the current context has no baggage.
    """
    out = {name: value for name, value in headers.items() if name not in TRACE_CONTEXT}
    if span.is_valid:
        out[TRACEPARENT] = traceparent(span)
        if span.trace_state:
            out[TRACESTATE] = span.trace_state.to_header()
    current = context.get_current()
    if baggage.get_all(current):
        _OWN_BAGGAGE.inject(out, current)
    elif (carried := current.get(_CARRIED_BAGGAGE) or _baggage(headers.get(BAGGAGE))) is not None:
        out[BAGGAGE] = carried
    return out


def traceparent(span: SpanContext) -> str:
    """The value of the W3C header `traceparent` that names `span` as the parent."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _text(value: object, *, maximum: int) -> str | None:
    """A header's value as text. Returns None if the value is not ASCII (as text or bytes), or longer than `maximum`
    characters."""
    if isinstance(value, bytes | bytearray) and len(value) <= maximum and value.isascii():
        return value.decode("ascii")
    return value if isinstance(value, str) and len(value) <= maximum and value.isascii() else None


def _state(value: object) -> TraceState:
    """Parse the header `tracestate`; the result is empty if any of its members is invalid."""
    text = _text(value, maximum=_TRACESTATE_MAXIMUM)
    if not text:
        return _NO_STATE
    members: dict[str, str] = {}
    for member in text.split(","):
        if not (stripped := member.strip(" \t")):
            continue
        found = _TRACESTATE_MEMBER.fullmatch(stripped)
        if found is None or found[1] in members:
            return _NO_STATE
        members[found[1]] = found[2]
    return TraceState(list(members.items())) if len(members) <= _TRACESTATE_MEMBERS else _NO_STATE


def _baggage(value: object) -> str | None:
    text = _text(value, maximum=8192)
    return text if text and _BAGGAGE.fullmatch(text) and text.count(",") < _BAGGAGE_MEMBERS else None
