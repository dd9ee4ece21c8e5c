import string
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from lanekeeper.telemetry import tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
VALID = f"00-{TRACE}-{SPAN}-01"


def carried(headers: dict[str, Any]) -> dict[str, Any]:
    """The trace headers of a message that is published while `headers` are processed."""
    publisher = tracing.context_in(headers)
    token = context.attach(tracing.received_context(headers, publisher))
    try:
        return tracing.headers_with({}, publisher or INVALID_SPAN_CONTEXT)
    finally:
        context.detach(token)


@pytest.mark.parametrize("value", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes-later"])
def test_a_traceparent_of_a_later_version_is_read_as_version_00(value: str) -> None:
    assert carried({"traceparent": value})["traceparent"] == VALID


@pytest.mark.parametrize(
    "value",
    [
        None, 1, 1.5, True, b"\xff\xfe", [VALID], {"traceparent": VALID}, NEW_YEAR, Decimal(1), "", " ",
        VALID + "\r\nx-evil: 1", VALID.upper(), VALID + "-00",
        f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01", f"00-{TRACE[:-1]}٣-{SPAN}-01", f"01-{TRACE}-{SPAN}-01x",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 500, "x" * 1_000_000,
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_malformed_traceparent_is_ignored(value: object) -> None:
    assert tracing.context_in({"traceparent": value}) is None


@pytest.mark.parametrize(
    "value",
    [7, None, ["a=1"], b"\xff", "a", "a=1,a=2", "A=1", "a=1\n", "a=\u00e9", "a=" + "x" * 600,
     ",".join(f"k{i}=1" for i in range(33))],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_malformed_tracestate_is_dropped_and_the_trace_is_kept(value: object) -> None:
    assert carried({"traceparent": VALID, "tracestate": value}) == {"traceparent": VALID}


@pytest.mark.parametrize(
    "value",
    [7, None, ["a=1"], {}, b"\xff", "a=1\r\nx: y", "a=\u00e9", "a=" + "x" * 8192, ",".join(["a=1"] * 181)],
    ids=lambda value: repr(value)[:40],
)
def test_a_malformed_baggage_is_dropped(value: object) -> None:
    assert carried({"baggage": value}) == {}
    assert tracing.headers_with({"baggage": value}, INVALID_SPAN_CONTEXT) == {}


def test_a_messages_trace_headers_are_replaced_and_its_other_headers_are_kept() -> None:
    headers = {"traceparent": "junk", "tracestate": 5, "baggage": [1], "x-lane-sent-ms": 1}
    span = tracing.context_in({"traceparent": VALID})
    assert span is not None

    out = tracing.headers_with(headers, span)

    assert out == {"traceparent": VALID, "x-lane-sent-ms": 1}
    assert headers["traceparent"] == "junk"


amqp_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=80)
    | st.text(max_size=80)
    | st.datetimes()
    | st.decimals()
    | st.sampled_from([VALID, "a=1,b=2", "a=1;p,b=%20"])
    | st.text(alphabet="0123456789abcdef-", min_size=50, max_size=60)
    | st.text(alphabet=string.ascii_lowercase + "=,;@ \t", max_size=60),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


# The first example is slow: Hypothesis builds its table of Unicode characters.
slow_start = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@pytest.mark.slow
@slow_start
@given(st.dictionaries(st.sampled_from(["traceparent", "tracestate", "baggage", "a"]), amqp_values))
def test_any_header_value_leads_to_valid_trace_headers_and_no_exception(headers: dict[str, Any]) -> None:
    out = carried(headers)
    again = tracing.headers_with(headers, INVALID_SPAN_CONTEXT)

    assert all(isinstance(value, str) and value.isascii() and value.isprintable() for value in out.values())
    assert carried(out) == out
    assert "traceparent" not in again
    assert trace.get_current_span().get_span_context() == INVALID_SPAN_CONTEXT


def test_a_trace_is_joined_only_with_exactly_the_ids_that_were_sent() -> None:
    @slow_start
    @given(st.integers(0, 54), st.characters(codec="utf-8"))
    def check(position: int, character: str) -> None:
        changed = VALID[:position] + character + VALID[position + 1 :]
        found = tracing.context_in({"traceparent": changed})
        if found is not None:
            assert f"{found.trace_id:032x}-{found.span_id:016x}" == changed[3:52]

    check()
