"""Reads and writes the headers of a request: those that a requester may set, and those that only workers write when
they publish the request again (a hop)."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from lanekeeper.contract import names
from lanekeeper.contract.messages import BodyAddress, Headers
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem, invalid_request
from topology.delays import LEVELS, MAX_DELAY_MS, UNIT_MS

UNSUPPORTED = {
    names.DEBOUNCE: "debouncing is",
    names.WEBHOOK: "webhooks are",
    names.PIPELINE: "pipelines are",
    names.ORDER: "ordering by key is",
}
"""Headers that the contract reserves and this version does not support. A request with one of them is refused, so that
no such header is silently ignored."""
PREFIX = "x-lane-"
SENT_AT_MOST_MS = 10**14
"""The latest time that a header may state, counted from 1970: a time in the year 5138."""
BETA_LENGTH = 1024
"""The maximum length, in characters, of the header `anthropic-beta`."""
BOUNDS_MS = {
    names.DEADLINE_MS: (1, MAX_DELAY_MS),
    names.DELAY_MS: (UNIT_MS, MAX_DELAY_MS),
    names.SENT_MS: (0, SENT_AT_MOST_MS),
}
"""The lowest and highest allowed value of each header that is a number of milliseconds."""
TIME_LENGTH = 40
"""The maximum length, in characters, of a header whose value is a time."""
ERRORS_KEPT = 5
"""How many errors of earlier attempts a request carries in its headers; older errors are dropped."""
ADDRESS_LENGTH = 2048
"""The maximum length, in characters, of the header that contains the address of a request's body."""
DIGITS = re.compile(r"[0-9]{1,15}")
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
BETA = re.compile(r"[A-Za-z0-9_.,: -]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """The headers that the requester set and `decode` uses. `deadline_ms` and `delay_ms` are durations in ms; `at_ms`
    is a time in ms since 1970."""

    deadline_ms: int | None
    stream: bool
    delay_ms: int | None
    at_ms: int | None
    beta: str | None
    kept: BodyAddress | None
    """The address and digest of the body; None if the message contains the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopHeaders:
    """The headers that a worker writes when it publishes a request again: to the wait queues of a delay, or to a side
    queue (into which workers move the requests of a tenant that has many waiting requests). They are read only from
    messages of queues to which nobody but workers can publish."""

    attempts: int = 0
    """How many attempts to call the provider were made for this request so far."""
    errors: tuple[str, ...] = ()
    """The errors of the request's latest attempts, at most `ERRORS_KEPT`."""
    first_seen_ms: int | None = None
    """When a worker first received the request; ms since 1970."""
    due_ms: int | None = None
    """The request must not start before this time; ms since 1970."""
    user_id: str | None = None
    """The property `user_id` of the message that the requester published."""
    expiration: str | None = None
    """The property `expiration` of the message that the requester published."""
    dead_at: str | None = None
    """The time at which the request had become a dead letter, if it is a dead letter that was published again."""
    redelivered: bool = False
    """True if the request had been redelivered to the worker that published it again: an earlier delivery had neither
    been acknowledged nor returned."""
    hop_ms: int | None = None
    """When the worker published the request to the wait queues of a delay; ms since 1970."""
    back_ms: int | None = None
    """When the request's delay is over; ms since 1970."""
    is_fresh: bool = False
    """True if the request was never delayed or retried: it comes from its lane's intake, directly or through a side
    queue."""
    reply_try: int = 0
    """How often the requester's reply queue has refused the reply. If this number is above 0, the request has ended,
    and only its reply has to be sent again."""
    reply_error: str | None = None
    """The problem document to send as the reply; None: the reply is in the store of results."""


def read(headers: Mapping[str, Any]) -> RequestHeaders:
    """Read the requester's headers. Raises RequestProblem for a header that is unknown or malformed, or that this
    version does not support."""
    for key in headers:
        if key in UNSUPPORTED:
            raise invalid_request(f"header {key}: {UNSUPPORTED[key]} not available in this version")
        if key.lower().startswith(PREFIX) and key not in names.PUBLIC and key not in names.OURS:
            raise unknown_header(key, known=names.PUBLIC)
    if names.CC in headers or names.BCC in headers:
        raise invalid_request("headers CC and BCC are not allowed: publish once, with one key")
    if names.DELAY_MS in headers and names.AT in headers:
        raise invalid_request(f"headers {names.DELAY_MS} and {names.AT}: give one of them")
    _bool(headers, names.NO_BATCH)  # this version makes no batches
    _ms(headers, names.SENT_MS)  # `published` reads it
    tenant = headers.get(names.TENANT)
    if tenant is not None and not isinstance(tenant, str):
        raise _wrong(names.TENANT, tenant, "a string")
    return RequestHeaders(
        deadline_ms=_ms(headers, names.DEADLINE_MS),
        stream=_bool(headers, names.STREAM),
        delay_ms=_ms(headers, names.DELAY_MS),
        at_ms=_time(headers, names.AT),
        beta=_beta(headers),
        kept=_kept(headers),
    )


def unknown_header(key: str, *, known: Set[str]) -> RequestProblem:
    """Make the error for an unknown `x-lane-` header. Its text suggests a known header with a similar name."""
    near = get_close_matches(key.lower()[len(PREFIX) :], [name[len(PREFIX) :] for name in sorted(known)], n=1)
    hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
    return invalid_request(f"unknown header {key[:80]!r}{hint}")


def read_hop(headers: Mapping[str, Any]) -> HopHeaders:
    """Read the headers that a worker wrote. Call it only for messages of queues to which only workers can publish."""
    errors = headers.get(names.ERRORS)
    return HopHeaders(
        attempts=_whole(headers.get(names.ATTEMPT)) or 0,
        errors=tuple(str(error) for error in errors[:ERRORS_KEPT]) if isinstance(errors, list) else (),
        first_seen_ms=_whole(headers.get(names.FIRST_SEEN_MS)),
        due_ms=_whole(headers.get(names.DUE_MS)),
        user_id=_text(headers.get(names.USER_ID)),
        expiration=_text(headers.get(names.EXPIRATION)),
        dead_at=_text(headers.get(names.DEAD_AT)),
        redelivered=headers.get(names.REDELIVERED) is True,
        hop_ms=_whole(headers.get(names.HOP_MS)),
        back_ms=_whole(headers.get(names.BACK_MS)),
        is_fresh=headers.get(names.FRESH) is True,
        reply_try=_whole(headers.get(names.REPLY_TRY)) or 0,
        reply_error=_text(headers.get(names.REPLY_ERROR)),
    )


def carried(headers: Mapping[str, Any], *, of: Names) -> dict[str, Any]:
    """The headers that a message keeps when a worker publishes it again: those that the requester set. Headers that the
    broker or workers set are left out. So are delay bits (the headers that route a message through the wait queues of a
    delay), because the bits of an earlier delay would make the message wait in the wrong queues.

    The headers keep their AMQP types, except the trace context, which is written again each time. The broker's header
    `x-death` must be left out, because with it RabbitMQ 3.10 would take the republished message for a routing cycle and
    drop it (docs/facts.md, section 3).
    """
    bits = {of.delay_bit(level) for level in range(LEVELS)}
    return {
        key: headers.encoded(key) if isinstance(headers, Headers) and key not in names.TRACE_CONTEXT else value
        for key, value in headers.items()
        if key not in names.OURS
        and key not in bits
        and key not in (names.CC, names.BCC)
        and not key.startswith(names.STRIPPED_ON_REPUBLISH)
    }


def hop_headers(hop: HopHeaders) -> dict[str, Any]:
    """Encode `hop` as message headers, from which the worker that gets the message next reads it (`read_hop`)."""
    found: dict[str, Any] = {
        names.ATTEMPT: hop.attempts,
        names.ERRORS: list(hop.errors) or None,
        names.FIRST_SEEN_MS: hop.first_seen_ms,
        names.DUE_MS: hop.due_ms,
        names.USER_ID: hop.user_id,
        names.EXPIRATION: hop.expiration,
        names.DEAD_AT: hop.dead_at,
        names.REDELIVERED: hop.redelivered or None,
        names.HOP_MS: hop.hop_ms,
        names.BACK_MS: hop.back_ms,
        names.FRESH: hop.is_fresh or None,
        names.REPLY_TRY: hop.reply_try or None,
        names.REPLY_ERROR: hop.reply_error,
    }
    return {key: value for key, value in found.items() if value is not None}


def _wrong(key: str, found: object, allowed: str) -> RequestProblem:
    shown = repr(found)[:60] if isinstance(found, (int, float, str)) else type(found).__name__
    return invalid_request(f"header {key}: found {shown}, allowed is {allowed}")


def _ms(headers: Mapping[str, Any], key: str) -> int | None:
    """The value of a header in milliseconds. The header may be an integer, or digits in a string, because shell clients
    (amqp-publish) can only send strings. Returns None if the header is absent."""
    value = headers.get(key)
    if value is None:
        return None
    low, high = BOUNDS_MS.get(key, (0, SENT_AT_MOST_MS))
    if isinstance(value, str) and DIGITS.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(key, value, f"whole milliseconds from {low} to {high}")
    return value


def ms_or_none(headers: Mapping[str, Any], key: str) -> int | None:
    """Read a header whose value is a number of milliseconds. Returns None if the header is absent or malformed. Used
    where a message must be read without raising errors."""
    try:
        return _ms(headers, key)
    except RequestProblem:
        return None


def _bool(headers: Mapping[str, Any], key: str) -> bool:
    value = headers.get(key, False)
    if value in ("true", "false") and isinstance(value, str):
        return value == "true"
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _time(headers: Mapping[str, Any], key: str) -> int | None:
    value = headers.get(key)
    if value is None:
        return None
    allowed = "an RFC 3339 time with a zone, such as 2026-11-21T18:00:00Z"
    if not isinstance(value, str) or len(value) > TIME_LENGTH or "T" not in value.upper().replace(" ", "T"):
        raise _wrong(key, value, allowed)
    try:
        when = datetime.fromisoformat(value.upper())  # RFC 3339 allows t and z
        if when.tzinfo is None:
            raise _wrong(key, value, allowed)
        return int(when.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise _wrong(key, value, allowed) from error


def _beta(headers: Mapping[str, Any]) -> str | None:
    value = headers.get(names.ANTHROPIC_BETA)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > BETA_LENGTH or not BETA.fullmatch(value):
        raise _wrong(names.ANTHROPIC_BETA, value, "names of betas, separated by commas")
    return value


def _kept(headers: Mapping[str, Any]) -> BodyAddress | None:
    address, sha256 = headers.get(names.BODY), headers.get(names.BODY_SHA256)
    if address is None and sha256 is None:
        return None
    if not isinstance(address, str) or len(address) > ADDRESS_LENGTH or not ADDRESS.fullmatch(address):
        raise _wrong(names.BODY, address, "the URL where the body lies")
    if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        raise _wrong(names.BODY_SHA256, sha256, "the body's SHA-256 as 64 hex digits")
    return BodyAddress(address, sha256.lower())


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
