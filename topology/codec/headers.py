"""Reads and writes the headers of a request: those that a requester may set, and those that only workers write when
they publish the request again (a hop)."""

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from datetime import date, datetime
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, cast

from lanekeeper.contract import names
from lanekeeper.contract.identity import GROUP_AT_MOST, is_request_id
from lanekeeper.contract.messages import BodyAddress, Headers
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem, invalid_request
from topology.delays import LEVELS, MAX_DELAY_MS, UNIT_MS

UNSUPPORTED = {
    names.ORDER: "ordering by key is",
}
"""Reserved by the contract: refused, so that none is silently ignored."""
PREFIX = "x-lane-"
MOST = 2**53
SENT_AT_MOST_MS = 10**14
"""A time in the year 5138."""
PROVIDER_HEADERS = 100
PROVIDER_HEADER_BYTES = 8 * 1024
"""What servers usually take as one header."""
PROVIDER_HEADERS_BYTES = 32 * 1024
"""Of all together: they are headers of each message of the request, and RabbitMQ's headers fit into one frame."""
BOUNDS_MS = {
    names.DEADLINE_MS: (1, MAX_DELAY_MS),
    names.DELAY_MS: (UNIT_MS, MAX_DELAY_MS),
    names.SENT_MS: (0, SENT_AT_MOST_MS),
}
TIME_LENGTH = 40
ERRORS_KEPT = 5
"""The errors of the latest attempts that a request carries."""
ADDRESS_LENGTH = 2048
DIGITS = re.compile(r"[0-9]{1,15}")
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
DEBOUNCE = re.compile(r"[ -~]{1,128}")
PROVIDER_HEADER = re.compile(r"anthropic-[a-z0-9!#$%&'*+.^_`|~-]+")
PRINTABLE = re.compile(r"[\t -~]*")
VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """The headers that the requester set and `decode` uses."""

    deadline_ms: int | None
    long_call: bool
    stream: bool
    delay_ms: int | None
    at_ms: int | None
    debounce: str | None
    pipeline: str | None
    provider_headers: Mapping[str, str]
    """The `anthropic-*` headers, by their names in lower case."""
    kept: BodyAddress | None
    no_batch: bool
    dialect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowHop:
    """Where a pipeline's request stands, or an item of its fan-out."""

    step: str
    deadline_ms: int
    """Of the pipeline's request, whatever the lane of the step; ms since 1970."""
    item_of: str = ""
    """Of an item: the id of the pipeline's request. Empty: the message is that request's own."""
    body_hash: str = ""
    """Of the body that the requester published (`Fingerprint.body_hash`), in hex; the message's body is the state."""
    digest: str = ""
    """Of its input, in the ids of its steps: of what was unpacked, because a dead letter is packed otherwise."""
    input_bytes: int = 0
    """The length of the requester's body, with which the state begins (`decoding.state_of`)."""
    routing_key: str = ""
    """The one that the requester published with."""
    items: int = 0
    """How many items of the step's fan-out were published."""
    done: int = 0
    """How many of them, from the first on, are known to have ended."""
    since_ms: int = 0
    """When the first of them was published."""
    of: int = 0
    """How many items the fan-out has; 0: that is not known yet."""
    again: int = 0
    """How many items were published again because the store had lost them."""
    role: str = ""
    """`LOOKS`: the message goes round without its body, which is in the store. `KEEPS`: the message has that body, goes
    round seldom, and does nothing but see that the store has it. Empty: it is one message."""


LOOKS = "looks"
KEEPS = "keeps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHop:
    """What a request carries on its way into a provider's batch, and back to its lane."""

    account: str = ""
    """Into the batch: against whose limits it counts (`Route.account`), like the following fields up to `tenant`."""
    provider: str = ""
    model: str = ""
    """The provider's name for it."""
    headers: str = ""
    """The `anthropic-*` headers, as JSON; empty if there are none. Requests with other headers are in other batches."""
    dialect: str = names.ANTHROPIC_MESSAGES
    """Requests of other dialects are in other batches."""
    tokens: int = 0
    """What it is expected to use, input and output."""
    deadline_ms: int = 0
    tenant: str = ""
    params_bytes: int = 0
    """So long is the JSON for the provider that follows the requester's body; 0: that body is the JSON."""
    ticket: str = ""
    """Back from the batch: of which ticket, and in which batch of the provider. The ticket stays if it is gathered
    again."""
    batch: str = ""
    result_bytes: int = 0
    """So long is the provider's result line that follows the requester's body."""
    live: bool = False
    """It is run live, and not gathered again."""
    tries: int = 0
    """How often it was sent back because another ticket has it."""


Hop = TypeVar("Hop", FlowHop, BatchHop)


def split_tail(body: bytes, tail_bytes: int) -> tuple[bytes, bytes]:
    """The requester's body, and what a worker has added at its end (`params_bytes`, `result_bytes`)."""
    at = max(0, len(body) - tail_bytes)
    return body[:at], body[at:]


@dataclass(frozen=True, slots=True, kw_only=True)
class HopHeaders:
    """What a worker writes when it publishes a request again, to a delay or a side queue. Times are in ms since 1970.
    It is read only from queues to which nobody but workers can publish."""

    attempts: int = 0
    errors: tuple[str, ...] = ()
    first_seen_ms: int | None = None
    due_ms: int | None = None
    user_id: str | None = None
    """Of the message that the requester published, like `expiration`."""
    expiration: str | None = None
    dead_at: str | None = None
    """When the request had become a dead letter, if it is one that was published again."""
    replays: int = 0
    """How often it was published again from a dead letter."""
    replayed_at: str | None = None
    """When that was last."""
    redelivered: bool = False
    """An earlier delivery to the worker that published it again had neither been acknowledged nor returned."""
    hop_ms: int | None = None
    back_ms: int | None = None
    is_fresh: bool = False
    """Never delayed or retried: from its lane's intake, directly or through a side queue."""
    ran_ms: int = 0
    """How long the attempts ran, together."""
    deaths: int = 0
    """How many attempts ended because the process of the request's handler died."""
    reply_try: int = 0
    """How often the reply queue has refused the reply. Above 0, the request has ended, and only its reply is sent
    again."""
    reply_error: str | None = None
    """The problem document to send; None: the reply is in the store of results."""
    flow: FlowHop | None = None
    flow_unread: str = ""
    """The header in place of `flow`, if another version wrote it and this one cannot read it."""
    batch: BatchHop | None = None
    batch_unread: str = ""


NO_HOP = HopHeaders()
_NUMBERS = {
    "attempts": names.ATTEMPT,
    "first_seen_ms": names.FIRST_SEEN_MS,
    "due_ms": names.DUE_MS,
    "hop_ms": names.HOP_MS,
    "back_ms": names.BACK_MS,
    "ran_ms": names.RAN_MS,
    "deaths": names.DEATHS,
    "reply_try": names.REPLY_TRY,
    "replays": names.REPLAYS,
}
_TEXTS = {
    "user_id": names.USER_ID,
    "expiration": names.EXPIRATION,
    "dead_at": names.DEAD_AT,
    "replayed_at": names.REPLAYED_AT,
    "reply_error": names.REPLY_ERROR,
}
_FLAGS = {"redelivered": names.REDELIVERED, "is_fresh": names.FRESH}
_SCALARS = {**_NUMBERS, **_TEXTS, **_FLAGS}
_ONLY_ABOVE_0 = frozenset({names.REPLY_TRY, names.REPLAYS, names.DEATHS, *_FLAGS.values()})
_OF_HOPS = (*_SCALARS.values(), names.ERRORS, names.FLOW)


def read(headers: Mapping[str, Any]) -> RequestHeaders:
    """Raises RequestProblem for a header that is unknown, malformed, or not supported by this version."""
    for key in headers:
        if key in UNSUPPORTED:
            raise invalid_request(f"header {key}: {UNSUPPORTED[key]} not available in this version")
        if key.lower().startswith(PREFIX) and key not in names.PUBLIC and key not in names.OURS:
            raise unknown_header(key, known=names.PUBLIC)
    if names.CC in headers or names.BCC in headers:
        raise invalid_request("headers CC and BCC are not allowed: publish once, with one key")
    if names.DELAY_MS in headers and names.AT in headers:
        raise invalid_request(f"headers {names.DELAY_MS} and {names.AT}: give one of them")
    _check_webhook(headers)  # settling reads it
    _ms(headers, names.SENT_MS)  # `published` reads it
    _bool(headers, names.PARK_INVALID)  # `Job.parks` reads it
    _bool(headers, names.PARTS_TOGETHER)  # `Parts` reads it
    called_with = headers.get(names.KEY)
    if called_with is not None and not (isinstance(called_with, str) and is_request_id(called_with)):
        raise _wrong(names.KEY, called_with, "the name of an API key: 1 to 128 of A-Z a-z 0-9 . _ : -")
    group = headers.get(names.GROUP)  # `Job.group` reads it
    if group is not None and not (isinstance(group, str) and is_request_id(group)):
        raise _wrong(names.GROUP, group, "the id of a group: 1 to 128 of A-Z a-z 0-9 . _ : -")
    if (size := headers.get(names.GROUP_SIZE)) is not None and not group_size(headers):
        raise _wrong(names.GROUP_SIZE, size, f"how many requests the group has: 1 to {GROUP_AT_MOST}")
    if size is not None and group is None:
        raise invalid_request(f"header {names.GROUP_SIZE}: it needs {names.GROUP}, the group's id")
    tenant = headers.get(names.TENANT)
    if tenant is not None and not isinstance(tenant, str):
        raise _wrong(names.TENANT, tenant, "a string")
    return RequestHeaders(
        deadline_ms=_ms(headers, names.DEADLINE_MS),
        long_call=_bool(headers, names.LONG_CALL),
        stream=_bool(headers, names.STREAM),
        delay_ms=_ms(headers, names.DELAY_MS),
        at_ms=_time(headers, names.AT),
        debounce=_debounce(headers),
        pipeline=_pipeline(headers),
        provider_headers=read_provider_headers(headers),
        kept=_kept(headers),
        no_batch=_bool(headers, names.NO_BATCH),
        dialect=_dialect(headers),
    )


def unknown_header(key: str, *, known: Set[str]) -> RequestProblem:
    """The error for an unknown `x-lane-` header; it suggests a known one with a similar name."""
    near = get_close_matches(key.lower()[len(PREFIX) :], [name[len(PREFIX) :] for name in sorted(known)], n=1)
    hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
    return invalid_request(f"unknown header {key[:80]!r}{hint}")


def read_hop(headers: Mapping[str, Any]) -> HopHeaders:
    """Call it only for messages of queues to which only workers can publish."""
    found: dict[str, Any] = {
        field: value for field, name in _NUMBERS.items() if type(value := headers.get(name)) is int and value >= 0
    }
    found |= {field: value for field, name in _TEXTS.items() if isinstance(value := headers.get(name), str)}
    found |= {field: headers.get(name) is True for field, name in _FLAGS.items()}
    if isinstance(errors := headers.get(names.ERRORS), list):
        found["errors"] = tuple(map(str, errors[:ERRORS_KEPT]))
    flow = flow_unread = None
    if isinstance(text := headers.get(names.FLOW), str) and (flow := _flow(text)) is None:
        flow_unread = text
    batch, batch_text = read_batch(headers), headers.get(names.BATCH)
    return HopHeaders(
        **found,
        flow=flow,
        flow_unread=flow_unread or "",
        batch=batch,
        batch_unread=batch_text if batch is None and isinstance(batch_text, str) else "",
    )


def read_fresh(headers: Mapping[str, Any], *, user_id: str | None, expiration: str | None) -> HopHeaders:
    """Of a message that a requester published. What it says of the dead letter that it was may be forged, which harms
    nobody: the store compares the time, and the rest is only shown."""
    dead_at, replays, replayed_at = map(headers.get, (names.DEAD_AT, names.REPLAYS, names.REPLAYED_AT))
    return HopHeaders(
        user_id=user_id,
        expiration=expiration,
        dead_at=dead_at if isinstance(dead_at, str) else None,
        replays=replays if type(replays) is int and replays >= 0 else 0,
        replayed_at=replayed_at if isinstance(replayed_at, str) else None,
        is_fresh=True,
    )


def carried(headers: Mapping[str, Any], *, of: Names) -> dict[str, Any]:
    """The requester's headers, which a message keeps when a worker publishes it again. What the broker or workers set
    is left out; so are delay bits, because those of an earlier delay would make the message wait in the wrong queues.

    They keep their AMQP types, except the trace context, which is written again each time. With `x-death`, RabbitMQ
    3.10 would take the republished message for a routing cycle and drop it (docs/facts.md, section 3).
    """
    bits = _delay_bits(of)
    return {
        key: headers.encoded(key) if isinstance(headers, Headers) and key not in names.TRACE_CONTEXT else value
        for key, value in headers.items()
        if key not in names.OURS
        and key not in bits
        and key not in (names.CC, names.BCC)
        and not key.startswith(names.STRIPPED_ON_REPUBLISH)
    }


@cache
def _delay_bits(of: Names) -> frozenset[str]:
    return frozenset(of.delay_bit(level) for level in range(LEVELS))


def _flow(text: str) -> FlowHop | None:
    return _hop(FlowHop, _object(text))


def item_of(headers: Mapping[str, Any]) -> str:
    """The id of the pipeline's request of which a message that a worker has published is an item; empty: of none."""
    flow = _flow(text) if isinstance(text := headers.get(names.FLOW), str) else None
    return "" if flow is None else flow.item_of


def read_batch(headers: Mapping[str, Any]) -> BatchHop | None:
    """Like `read_hop`, of the batch alone."""
    text = headers.get(names.BATCH)
    found = _object(text) if isinstance(text, str) else None
    if found is not None:
        for name in ("held", "held_until_ms"):  # of a worker of 0.4.0, like `beta`
            found.pop(name, None)
        if isinstance(beta := found.pop("beta", None), str) and beta:
            found["headers"] = provider_headers_json({names.ANTHROPIC_BETA: beta})
    return _hop(BatchHop, found)


def without_params(text: str) -> tuple[str, int] | None:
    """Of a batch that another version has written: its header when the JSON for the provider is taken from the body's
    end, and how long that is. None if this is no header of a worker."""
    if (found := _object(text)) is None:
        return None
    match found:
        case {"params_bytes": int(length)} if length >= 0:
            return json.dumps({**found, "params_bytes": 0}), length
        case {"provider": str(), "deadline_ms": int()}:  # a length of 0 is not written
            return text, 0
        case _:
            return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _hop(kind: type[Hop], found: Mapping[str, Any] | None) -> Hop | None:
    """None if another version has written it: it has other fields, or of other types."""
    if found is None or not all(_fits(value, _TYPES[kind].get(name)) for name, value in found.items()):
        return None
    try:
        return kind(**found)
    except TypeError:  # a field is missing
        return None


def _fits(value: object, wanted: object) -> bool:
    return type(value) is wanted and (wanted is not int or 0 <= cast("int", value) < MOST)


def provider_headers_json(headers: Mapping[str, str]) -> str:
    """For `BatchHop.headers`: equal texts for equal headers."""
    return json.dumps(dict(sorted(headers.items()))) if headers else ""


def batch_header(hop: BatchHop) -> dict[str, str]:
    """Encode `hop` for `read_batch`."""
    return {names.BATCH: _json(hop)}


def with_batch(headers: Mapping[str, Any], batch: BatchHop | str, *, of: Names) -> dict[str, Any]:
    """The headers of a message that a worker has published, for the next hop: those of `carried`, and of the last hop,
    with this batch (or with what another version has written of it)."""
    hop = {name: headers[name] for name in _OF_HOPS if name in headers}
    return {
        **carried(headers, of=of),
        **hop,
        **({names.BATCH: batch} if isinstance(batch, str) else batch_header(batch)),
    }


def hop_headers(hop: HopHeaders) -> dict[str, Any]:
    """Encode `hop` for `read_hop`."""
    found: dict[str, Any] = {}
    for field, name in _SCALARS.items():
        if (value := getattr(hop, field)) is not None and (value or name not in _ONLY_ABOVE_0):
            found[name] = value
    if hop.errors:
        found[names.ERRORS] = list(hop.errors)
    if flow := hop.flow_unread if hop.flow is None else _json(hop.flow):
        found[names.FLOW] = flow
    if batch := hop.batch_unread if hop.batch is None else _json(hop.batch):
        found[names.BATCH] = batch
    return found


_TYPES = {kind: {each.name: each.type for each in fields(kind)} for kind in (FlowHop, BatchHop)}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in (FlowHop, BatchHop)}


def _json(hop: FlowHop | BatchHop) -> str:
    # 0.4.0 knows no dialect: its workers can read a hop that needs none
    given = ((name, getattr(hop, name)) for name in _FIELDS[type(hop)])
    return json.dumps({name: value for name, value in given if value and value != names.ANTHROPIC_MESSAGES})


def _wrong(key: str, found: object, allowed: str) -> RequestProblem:
    shown = repr(found)[:60] if isinstance(found, (int, float, str)) else type(found).__name__
    return invalid_request(f"header {key}: found {shown}, allowed is {allowed}")


def _ms(headers: Mapping[str, Any], key: str) -> int | None:
    """An integer, or digits in a string, because shell clients (amqp-publish) can only send strings."""
    value = headers.get(key)
    if value is None:
        return None
    low, high = BOUNDS_MS.get(key, (0, SENT_AT_MOST_MS))
    if isinstance(value, str) and DIGITS.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(key, value, f"whole milliseconds from {low} to {high}")
    return value


def group_size(headers: Mapping[str, Any]) -> int:
    """How many requests the group has; 0: the header is missing or malformed."""
    size = headers.get(names.GROUP_SIZE)
    if isinstance(size, str) and DIGITS.fullmatch(size):
        size = int(size)
    return size if type(size) is int and 1 <= size <= GROUP_AT_MOST else 0


def ms_or_none(headers: Mapping[str, Any], key: str) -> int | None:
    """None also if the header is malformed: for messages that must be read without errors."""
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


def _debounce(headers: Mapping[str, Any]) -> str | None:
    key = headers.get(names.DEBOUNCE)
    if key is None:
        return None
    if not isinstance(key, str) or not DEBOUNCE.fullmatch(key):
        raise _wrong(names.DEBOUNCE, key, "a key of 1 to 128 printable ASCII characters")
    if headers.get(names.DELAY_MS) is None:
        raise invalid_request(f"header {names.DEBOUNCE}: needs {names.DELAY_MS}, for how long to wait for a newer one")
    return key


def _check_webhook(headers: Mapping[str, Any]) -> None:
    url = headers.get(names.WEBHOOK)
    if url is not None and not (isinstance(url, str) and len(url) <= ADDRESS_LENGTH and ADDRESS.fullmatch(url)):
        kind = {str: "another text", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
        found = kind.get(type(url), "another value")  # what it says may be a secret
        raise invalid_request(
            f"header {names.WEBHOOK}: found {found}, allowed is a URL of at most {ADDRESS_LENGTH} characters"
        )


def read_provider_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers for the provider (`anthropic-*`), by their names in lower case. Raises RequestProblem."""
    found: dict[str, str] = {}
    for key, value in headers.items():
        if not key.lower().startswith(names.ANTHROPIC):
            continue
        name = key.lower()
        if not PROVIDER_HEADER.fullmatch(name) or name in found:
            raise invalid_request(f"header {key[:80]!r}: not a header's name, or it is there twice")
        if not isinstance(value, str) or not PRINTABLE.fullmatch(value):
            raise _wrong(name[:80], value, "printable ASCII characters")
        if len(value) > PROVIDER_HEADER_BYTES:
            raise invalid_request(f"header {name[:80]}: {len(value)} bytes, allowed are {PROVIDER_HEADER_BYTES}")
        found[name] = value.strip()
    if len(found) > PROVIDER_HEADERS:
        raise invalid_request(f"{len(found)} headers anthropic-*: allowed are {PROVIDER_HEADERS}")
    if (size := sum(len(name) + len(value) for name, value in found.items())) > PROVIDER_HEADERS_BYTES:
        raise invalid_request(f"headers anthropic-*: {size} bytes, allowed are {PROVIDER_HEADERS_BYTES} together")
    if (version := found.get(names.ANTHROPIC_VERSION)) is not None and not is_version(version):
        raise _wrong(names.ANTHROPIC_VERSION, version, "a date such as 2023-06-01")
    return found


def is_version(text: str) -> bool:
    """Whether it is a version of Anthropic's API: a date."""
    if not VERSION.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _pipeline(headers: Mapping[str, Any]) -> str | None:
    value = headers.get(names.PIPELINE)
    if value is not None and not isinstance(value, str):
        raise _wrong(names.PIPELINE, value, "a pipeline's name")
    return value


def _dialect(headers: Mapping[str, Any]) -> str:
    value = headers.get(names.DIALECT, names.ANTHROPIC_MESSAGES)
    if not isinstance(value, str) or value not in names.DIALECTS:
        raise _wrong(names.DIALECT, value, f"one of {', '.join(names.DIALECTS)}")
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
