"""Headers: what a requester may send, what is refused by name, and what is passed on at a hop."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from topology.codec.headers import (
    BatchHop,
    FlowHop,
    HopHeaders,
    RequestHeaders,
    carried,
    hop_headers,
    ms_or_none,
    read,
    read_hop,
    with_batch,
)
from topology.delays import MAX_DELAY_MS

NOTHING = RequestHeaders(
    deadline_ms=None,
    long_call=False,
    stream=False,
    delay_ms=None,
    at_ms=None,
    debounce=None,
    pipeline=None,
    provider_headers={},
    kept=None,
    no_batch=False,
    dialect="anthropic.messages",
)


def said(**changed: Any) -> RequestHeaders:
    return RequestHeaders(**{**{field: getattr(NOTHING, field) for field in NOTHING.__dataclass_fields__}, **changed})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, NOTHING),
        ({"x-lane-deadline-ms": 1}, said(deadline_ms=1)),
        ({"x-lane-deadline-ms": "30000"}, said(deadline_ms=30_000)),  # amqp-publish sends only strings
        ({"x-lane-stream": True}, said(stream=True)),
        ({"x-lane-stream": "true"}, said(stream=True)),
        ({"x-lane-stream": "false"}, NOTHING),
        ({"x-lane-delay-ms": 100}, said(delay_ms=100)),
        ({"x-lane-delay-ms": 100, "x-lane-debounce": "doc 'a' 1"}, said(delay_ms=100, debounce="doc 'a' 1")),
        ({"x-lane-delay-ms": MAX_DELAY_MS}, said(delay_ms=MAX_DELAY_MS)),
        ({"x-lane-at": "1970-01-01T00:00:01Z"}, said(at_ms=1000)),
        ({"x-lane-at": "1970-01-01T01:00:01.500+01:00"}, said(at_ms=1500)),
        ({"x-lane-at": "1970-01-01 00:00:01Z"}, said(at_ms=1000)),
        ({"x-lane-at": "1970-01-01t00:00:01z"}, said(at_ms=1000)),  # RFC 3339 allows small letters
        ({"x-lane-sent-ms": 1_790_000_000_000}, NOTHING),  # `published` reads it
        ({"x-lane-body": "s3://b/x", "x-lane-body-sha256": "0A" * 32}, said(kept=BodyAddress("s3://b/x", "0a" * 32))),
        ({"anthropic-beta": "a" * 1024}, said(provider_headers={"anthropic-beta": "a" * 1024})),
        (
            {"anthropic-beta": "context-1m-2026-08-07,files-api"},
            said(provider_headers={"anthropic-beta": "context-1m-2026-08-07,files-api"}),
        ),
        ({"x-lane-tenant": "shop"}, NOTHING),
        ({"x-lane-no-batch": True}, said(no_batch=True)),
        ({"traceparent": "rubbish", "tracestate": 5, "baggage": None}, NOTHING),
        ({"x-mine": "kept", "timestamp_in_ms": 5}, NOTHING),
        (dict.fromkeys(n.OURS, "forged"), NOTHING),  # a dead letter can be published again as it is
    ],
)
def test_headers_that_a_requester_may_send_are_read(headers: dict[str, Any], expected: RequestHeaders) -> None:
    assert read(headers) == expected


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"x-lane-deadline": 5}, "'x-lane-deadline'; did you mean x-lane-deadline-ms?"),
        ({"X-Lane-Stream": True}, "'X-Lane-Stream'"),
        ({"x-lane-colour": "red"}, "known: x-lane-at, "),
        ({"x-lane-debounce": "k"}, "x-lane-debounce: needs x-lane-delay-ms"),
        ({"x-lane-debounce": "k", "x-lane-at": "2026-11-21T18:00:00Z"}, "x-lane-debounce: needs x-lane-delay-ms"),
        ({"x-lane-debounce": "", "x-lane-delay-ms": 500}, "x-lane-debounce: found ''"),
        ({"x-lane-debounce": "k" * 129, "x-lane-delay-ms": 500}, "x-lane-debounce: found 'k"),
        ({"x-lane-debounce": "a\nb", "x-lane-delay-ms": 500}, "x-lane-debounce: found 'a"),
        ({"x-lane-debounce": 7, "x-lane-delay-ms": 500}, "x-lane-debounce: found 7, allowed is a key of 1 to 128"),
        ({"x-lane-webhook": "a.example/hook"}, "x-lane-webhook: found another text"),
        ({"x-lane-webhook": 7}, "x-lane-webhook: found a number"),
        ({"x-lane-webhook": "https://a.example/" + "x" * 2048}, "allowed is a URL of at most 2048 characters"),
        ({"x-lane-pipeline": 1}, "x-lane-pipeline: found 1, allowed is a pipeline's name"),
        ({"x-lane-order": "k"}, "x-lane-order: ordering by key is not available in this version"),
        ({"x-lane-body": "https://a.example/"}, "x-lane-body-sha256: found NoneType, allowed is the body's SHA-256"),
        ({"x-lane-body-sha256": "0" * 64}, "x-lane-body: found NoneType, allowed is the URL"),
        ({"x-lane-body": "/etc/passwd", "x-lane-body-sha256": "0" * 64}, "x-lane-body: found '/etc/passwd'"),
        ({"x-lane-body": "s3://b/" + "x" * 2048, "x-lane-body-sha256": "0" * 64}, "x-lane-body: found"),
        ({"x-lane-body": "s3://b/a b", "x-lane-body-sha256": "0" * 64}, "x-lane-body: found"),
        ({"x-lane-body": "s3://b/x", "x-lane-body-sha256": "0" * 63}, "x-lane-body-sha256: found"),
        ({"CC": ["batch.a.b"]}, "CC"),
        ({"BCC": []}, "BCC"),
        ({"x-lane-delay-ms": 5, "x-lane-at": "2026-11-21T18:00:00Z"}, "x-lane-delay-ms and x-lane-at"),
        ({"x-lane-deadline-ms": 0}, "found 0, allowed is whole milliseconds from 1"),
        ({"x-lane-deadline-ms": True}, "found True"),
        ({"x-lane-deadline-ms": 1.5}, "found 1.5"),
        ({"x-lane-deadline-ms": "soon"}, "found 'soon'"),
        ({"x-lane-deadline-ms": "٣"}, "x-lane-deadline-ms"),
        ({"x-lane-deadline-ms": "9" * 400}, "x-lane-deadline-ms"),
        ({"x-lane-deadline-ms": []}, "found list"),
        ({"x-lane-delay-ms": -1}, "found -1"),
        ({"x-lane-delay-ms": 0}, "found 0, allowed is whole milliseconds from 100"),
        ({"x-lane-delay-ms": 99}, "found 99, allowed is whole milliseconds from 100"),
        ({"x-lane-delay-ms": MAX_DELAY_MS + 1}, "x-lane-delay-ms"),
        ({"x-lane-stream": 1}, "x-lane-stream: found 1, allowed is true or false"),
        ({"x-lane-stream": "True"}, "x-lane-stream"),
        ({"x-lane-no-batch": "maybe"}, "x-lane-no-batch"),
        ({"x-lane-at": "2026-11-21T18:00:00"}, "x-lane-at"),  # no time zone
        ({"x-lane-at": "2026-11-21"}, "x-lane-at"),
        ({"x-lane-at": "tomorrow"}, "x-lane-at"),
        ({"x-lane-at": 1_790_000_000}, "x-lane-at"),
        ({"x-lane-at": "2026-02-30T18:00:00Z"}, "x-lane-at"),
        ({"x-lane-at": "2" * 100_000}, "x-lane-at"),
        ({"x-lane-tenant": 5}, "x-lane-tenant"),
        ({"anthropic-beta": "a\r\nx-api-key: b"}, "anthropic-beta"),
        ({"anthropic-beta": "ä"}, "anthropic-beta"),
        ({"anthropic-beta": "a" * 8193}, "anthropic-beta: 8193 bytes"),
        ({"Anthropic-New": 5}, "anthropic-new"),
        ({"anthropic-b c": "d"}, "anthropic-b c"),
        ({"anthropic-a": "1", "Anthropic-A": "2"}, "there twice"),
        ({f"anthropic-{n}": "a" for n in range(101)}, "101 headers"),
        ({f"anthropic-{n}": "a" * 8000 for n in range(5)}, "together"),
        ({"anthropic-version": "latest"}, "a date such as"),
        ({"anthropic-version": "2026-13-01"}, "a date such as"),
        ({"anthropic-version": "2023-06-01,2026-10-21"}, "a date such as"),
        ({"anthropic-beta": ["a"]}, "anthropic-beta"),
    ],
)
def test_a_wrong_header_is_refused_by_name(headers: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestProblem) as refused:
        read(headers)
    assert refused.value.code == "invalid_request"
    assert named in refused.value.detail
    assert len(refused.value.detail) < 400


YEAR = 31_536_000_000


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("x-lane-deadline-ms", 1, YEAR), ("x-lane-delay-ms", 100, YEAR), ("x-lane-sent-ms", 0, 100_000_000_000_000)],
)
def test_times_have_their_bounds(header: str, low: int, high: int) -> None:
    for inside in (low, high):
        found = read({header: inside})
        assert inside in {found.deadline_ms, found.delay_ms, ms_or_none({header: inside}, "x-lane-sent-ms")}
    for outside in (low - 1, high + 1):
        with pytest.raises(
            RequestProblem, match=f"{header}: found {outside}, allowed is whole milliseconds from {low}"
        ):
            read({header: outside})


def test_the_headers_of_a_hop_carry_everything_to_the_next_worker() -> None:
    hop = HopHeaders(attempts=3, errors=("b", "a"), first_seen_ms=5, due_ms=6, user_id="shop", expiration="60000")
    assert read_hop(hop_headers(hop)) == hop
    assert read_hop(hop_headers(HopHeaders())) == HopHeaders()
    assert hop_headers(HopHeaders()) == {n.ATTEMPT: 0, n.RAN_MS: 0}


def test_with_another_batch_the_headers_of_a_hop_stay_what_they_were() -> None:
    flow, before = FlowHop(step="sum", deadline_ms=9, items=2), BatchHop(ticket="t")
    hop = HopHeaders(
        attempts=3, errors=("b", "a"), first_seen_ms=5, due_ms=6, user_id="shop", expiration="60000", dead_at="now",
        replays=1, replayed_at="then", redelivered=True, hop_ms=7, back_ms=8, is_fresh=True, ran_ms=9, deaths=1,
        reply_try=2, reply_error="{}", flow=flow, batch=before,
    )  # fmt: skip
    assert read_hop(hop_headers(hop)) == hop
    headers = {"mine": 7, n.ROUTING_KEY: "batch.a", n.DELIVERY_COUNT: 2, **hop_headers(hop)}
    again = with_batch(headers, after := BatchHop(ticket="u", live=True), of=Names())
    assert read_hop(again) == replace(hop, batch=after)
    assert again.keys() == headers.keys() - {n.ROUTING_KEY, n.DELIVERY_COUNT}


def test_a_batch_that_a_worker_of_0_4_0_has_written_is_read() -> None:
    written = {"account": "a", "ticket": "t", "beta": "b", "held": [1, 20.0, 0.5], "held_until_ms": 9}
    read = read_hop({n.BATCH: json.dumps(written)})
    assert read.batch == BatchHop(account="a", ticket="t", headers='{"anthropic-beta": "b"}')
    assert read_hop({n.BATCH: json.dumps({**written, "unknown": 1})}).batch is None


@pytest.mark.parametrize(
    "headers",
    [
        {n.ATTEMPT: -1, n.FIRST_SEEN_MS: -5, n.DUE_MS: True},
        {n.ATTEMPT: "3", n.ERRORS: "a", n.USER_ID: 5, n.EXPIRATION: b"\xff"},
        {n.ATTEMPT: 1.5, n.ERRORS: {"a": 1}, n.DUE_MS: []},
    ],
)
def test_internal_headers_that_make_no_sense_are_ignored(headers: dict[str, Any]) -> None:
    assert read_hop(headers) == HopHeaders()


def test_a_hop_passes_on_the_requesters_headers_and_none_of_the_brokers_or_ours() -> None:
    requesters = {
        "x-mine": 1,
        "traceparent": "00-…",
        "x-lane-stream": True,
        "x-lane-deadline-ms": 5,
        "lane-d29": True,  # no level of the cascade has this number
        "anthropic-beta": "b",
    }
    brokers = {
        "x-death": [{"count": 1}],
        "x-first-death-queue": "q",
        "x-last-death-reason": "expired",
        "x-delivery-count": 3,
        "x-acquired-count": 4,
        "CC": ["a"],
        "BCC": ["b"],
    }
    bits = {f"lane-d{level:02d}": True for level in range(29)}
    ours = dict.fromkeys(n.OURS, "…")
    assert carried({**requesters, **brokers, **bits, **ours}, of=Names()) == requesters


def test_delay_headers_of_another_namespace_are_passed_on() -> None:
    assert carried({"lane-d00": 1, "mine-d00": 1}, of=Names("mine")) == {"lane-d00": 1}
