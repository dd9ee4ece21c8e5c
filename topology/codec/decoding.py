"""Turns a delivered message into a `Request`. Anything that is wrong or unknown raises an error that names it."""

import json
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jiter

from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import PRIORITY_AT_MOST, UNREADABLE, Message
from lanekeeper.contract.names import BODY, BODY_SHA256, DEADLINE_MS, DEATH, STREAM
from lanekeeper.contract.problems import RequestProblem, invalid_request
from topology.codec import body as bodies
from topology.codec import bounds
from topology.codec import headers as header_rules
from topology.codec.headers import HopHeaders, RequestHeaders
from topology.codec.published import published
from topology.codec.request import Request
from topology.delays import MAX_DELAY_MS
from topology.lanes import MIB, LaneSpec

PACKED_BYTES = MIB
"""The maximum length, in bytes, of the body of a message as it was published; a body that is packed with gzip is
measured before it is unpacked."""
UNPACKED_BYTES = 8 * MIB
"""The largest body, in bytes, after unpacking (gzip). Unpacking this much takes 20 ms of CPU, whatever the size of the
packed body."""
UNPACKED_TIMES = 1032
"""The highest compression ratio of gzip: one packed byte becomes at most this many bytes."""
NESTED = 200
"""How deep arrays and objects in a body may be nested: the limit of the JSON parser."""
_DUPLICATE_KEY = re.compile(r'Detected duplicate key "(?P<key>.*)"', re.DOTALL)
_JSON_TYPE = re.compile(r'application/json(\s*;\s*charset="?utf-8"?)?\s*', re.IGNORECASE)


def decode(
    message: Message,
    *,
    lane: LaneSpec,
    request_id: str,
    hop: HopHeaders | None,
    now_ms: int,
    raw: bytes | None = None,
    max_values: int = bounds.VALUES,
) -> Request:
    """Check a message of `lane`, and convert its headers and body to a `Request`.

    `hop`: the headers that an earlier worker wrote when it published the request again; None for a message that no
    worker has published again. `raw`: the body, if the caller has already fetched or unpacked it, and checked it with
    `bounds`; None: the body is taken from the message. If the message has only the body's address, and `raw` is None,
    the result has no body, but the address in `Request.kept`.

    Raises RequestProblem (invalid_request, unsupported_media, too_large, forbidden_model).
    """
    _check_properties(message, lane=lane, fresh=hop is None)
    headers = header_rules.read(message.headers)
    if headers.kept is not None:
        _check_unpublished(message)
    elif raw is None:
        raw = unpacked(message)
        if (excess := bounds.excess(raw, max_values=max_values)) is not None:
            raise too_large(excess)
    content = _Content(b"", lane.model, lane.max_tokens) if raw is None else _content(raw, headers, lane)
    history = hop or HopHeaders()
    sent = published(message, history, now_ms=now_ms)
    due_ms = _due_ms(headers, history, sent_ms=sent.ms)
    return Request(
        id=request_id,
        lane=lane.name,
        body=content.body,
        model=content.model,
        max_tokens=content.max_tokens,
        stream=headers.stream,
        states_stream=content.states_stream,
        beta=headers.beta,
        published=sent,
        due_ms=due_ms,
        deadline_ms=(due_ms or sent.ms) + _deadline_ms(headers, lane),
        kept=headers.kept if raw is None else None,
        media_bytes=content.media_bytes,
    )


class _Content(NamedTuple):
    """The fields of `Request` that come from the body."""

    body: bytes
    model: str
    max_tokens: int
    states_stream: bool = False
    media_bytes: int = 0


def _content(raw: bytes, headers: RequestHeaders, lane: LaneSpec) -> _Content:
    found = _parsed(raw)
    checked = bodies.check(found)
    assert isinstance(found, dict)
    if checked.stream is not None and checked.stream != headers.stream:
        raise invalid_request(
            f"body: stream is {str(checked.stream).lower()}, but header {STREAM} says {str(headers.stream).lower()}"
        )
    model, max_tokens = checked.model or lane.model, checked.max_tokens or lane.max_tokens
    if lane.models is not None and model not in lane.models:
        raise RequestProblem(
            "forbidden_model",
            f"model {model[:80]!r} is not allowed in lane {lane.name}; allowed: {', '.join(sorted(lane.models))}",
        )
    return _Content(
        _provider_body(raw, found, checked, model=model, max_tokens=max_tokens, rewrite=lane.models is not None),
        model,
        max_tokens,
        states_stream="stream" in checked.model_fields_set,
        media_bytes=0 if headers.kept is None else bodies.media_bytes(checked),
    )


def unpacked(message: Message) -> bytes:
    """The body of a message, unpacked according to `content_encoding`. Raises RequestProblem (unsupported_media,
    too_large, invalid_request)."""
    if len(message.body) > PACKED_BYTES:
        raise RequestProblem(
            "too_large",
            f"body: {len(message.body)} bytes, allowed are {PACKED_BYTES}; put a larger body into a store, and publish "
            f"its address and digest ({BODY}, {BODY_SHA256}) with an empty body",
        )
    encoding = (message.content_encoding or "identity").lower()
    if encoding == "identity":
        return message.body
    if encoding != "gzip":
        raise RequestProblem("unsupported_media", f"content_encoding {encoding[:40]!r}: allowed are identity and gzip")
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        body = unpacker.decompress(message.body, UNPACKED_BYTES + 1)
    except zlib.error as error:
        raise invalid_request(f"body: content_encoding is gzip, but it is not: {error}") from error
    if len(body) > UNPACKED_BYTES:
        raise RequestProblem("too_large", f"body: more than {UNPACKED_BYTES} bytes when unpacked")
    if not unpacker.eof or unpacker.unused_data:
        raise invalid_request("body: the gzip data is cut short, or something follows it")
    return body


def weight(message: Message) -> int:
    """The largest size in bytes that a message's body can have after unpacking (gzip), or its actual size if it is not
    packed."""
    size = len(message.body)
    return min(UNPACKED_BYTES, UNPACKED_TIMES * size) if message.content_encoding else size


def too_large(excess: str) -> RequestProblem:
    """Make the error for a body that exceeds a limit of `bounds.py`; `excess` is the text that names the limit."""
    return RequestProblem("too_large", f"body: {excess}")


def app_of(routing_key: str) -> str:
    """The application's name in a routing key `<lane>.<app>.<task>…`; `unknown` if there is none."""
    words = routing_key.split(".", 2)
    return words[1] if len(words) > 1 and words[1] else "unknown"


def _check_properties(message: Message, *, lane: LaneSpec, fresh: bool) -> None:
    if UNREADABLE in message.headers:
        raise invalid_request(f"properties that cannot be read: {message.headers[UNREADABLE]}")
    if fresh:
        if message.routing_key.split(".", 1)[0] != lane.name:
            raise invalid_request(
                f"routing key {message.routing_key[:120]!r}: allowed is {lane.name}.<app>.<task> in lane {lane.name}"
            )
        if DEATH in message.headers:
            raise invalid_request(f"header {DEATH}: not allowed on a fresh request")
    if message.message_id and not is_request_id(message.message_id):
        raise invalid_request(f"message_id: {REQUEST_ID}; found something else")
    if message.priority is not None and message.priority > PRIORITY_AT_MOST:
        raise invalid_request(f"priority: found {message.priority}, allowed are 0 to {PRIORITY_AT_MOST}")
    if message.type not in (None, "", "messages"):
        raise invalid_request(
            f"type {message.type[:40]!r}: handlers of other types are not available in this version; "
            "leave it out, or say messages"
        )
    if message.content_type and not _JSON_TYPE.fullmatch(message.content_type):
        raise RequestProblem(
            "unsupported_media", f"content_type {message.content_type[:60]!r}: allowed is application/json (UTF-8)"
        )


def _check_unpublished(message: Message) -> None:
    """Check that a message with the address of a body has neither a body of its own nor a content encoding."""
    if message.body:
        raise invalid_request(f"body: {len(message.body)} bytes, and header {BODY} says that it lies elsewhere")
    if (message.content_encoding or "identity").lower() != "identity":
        raise RequestProblem(
            "unsupported_media", f"content_encoding {message.content_encoding!r}: with header {BODY} there is none"
        )


def _parsed(raw: bytes) -> object:
    if not raw:
        raise invalid_request("body: empty; allowed is a JSON object")
    try:
        return jiter.from_json(raw, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError as error:
        if str(error).startswith("recursion limit exceeded"):
            detail = f"body: nested too deeply: allowed are {NESTED} arrays and objects inside of each other"
            raise invalid_request(detail) from None
        raise invalid_request(f"body: not JSON in UTF-8: {_without_content(str(error))}") from None


def _without_content(error: str) -> str:
    """The text of an error of the JSON parser (jiter). A duplicate key that it quotes is removed, because it may be
    part of a prompt, unless the key is the name of a known field."""
    duplicate = _DUPLICATE_KEY.match(error)
    known = bodies.MessagesBody.model_fields | bodies.PromptBody.model_fields
    if duplicate is None or duplicate["key"] in known:
        return error[:200]
    return f"a key is there twice{error[duplicate.end() :]}"


def _due_ms(headers: RequestHeaders, history: HopHeaders, *, sent_ms: int) -> int | None:
    if history.due_ms is not None:
        return history.due_ms
    if headers.delay_ms is not None:
        return sent_ms + headers.delay_ms
    if headers.at_ms is not None:
        if headers.at_ms - sent_ms > MAX_DELAY_MS:
            raise invalid_request("header x-lane-at: more than a year ahead")
        return max(headers.at_ms, sent_ms)
    return None


def _deadline_ms(headers: RequestHeaders, lane: LaneSpec) -> int:
    max_ms = int(lane.deadline_s * 1000)
    if headers.deadline_ms is None:
        return max_ms
    if headers.deadline_ms > max_ms:
        raise invalid_request(
            f"header {DEADLINE_MS}: found {headers.deadline_ms}, lane {lane.name} allows at most {max_ms}"
        )
    return headers.deadline_ms


def _provider_body(
    raw: bytes,
    found: Mapping[str, object],
    checked: bodies.MessagesBody | bodies.PromptBody,
    *,
    model: str,
    max_tokens: int,
    rewrite: bool,
) -> bytes:
    """The body for the provider: the bytes as they were published, with missing fields inserted at the beginning.

    `rewrite` (for a lane that allows only some models): the body is encoded again from the parsed values that were
    checked, because the provider's parser might read the original bytes differently.
    """
    if isinstance(checked, bodies.PromptBody):
        body: dict[str, object] = {
            "model": model,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": checked.prompt}],
        }
        if checked.system is not None:
            body["system"] = checked.system
        return _encoded(body)
    filled = {"model": model, "max_tokens": max_tokens}
    missing = {key: value for key, value in filled.items() if key not in checked.model_fields_set}
    is_null = any(getattr(checked, key) is None for key in filled.keys() - missing.keys())
    if rewrite or is_null:
        return _encoded({**found, **filled})
    # the object is not empty (it has `messages`), so a comma must follow the inserted fields
    return raw.replace(b"{", _encoded(missing)[:-1] + b",", 1) if missing else raw


def _encoded(body: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, UnicodeEncodeError) as error:
        raise invalid_request(f"body: holds what JSON in UTF-8 cannot say: {error}") from None
