"""Turns a delivered message into a `Request`. Anything that is wrong or unknown raises an error that names it."""

import json
import re
import uuid
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import jiter

from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import PRIORITY_AT_MOST, UNREADABLE, BodyAddress, Message
from lanekeeper.contract.names import (
    ANTHROPIC_MESSAGES,
    ANTHROPIC_VERSION,
    BODY,
    BODY_SHA256,
    BROKER_TIMESTAMP_MS,
    DEAD_AT,
    DEADLINE_MS,
    DEATH,
    DIALECT,
    KEY,
    OPENAI_EMBEDDINGS,
    PIPELINE,
    SENT_MS,
    STREAM,
)
from lanekeeper.contract.problems import RequestProblem, invalid_request
from topology.codec import bodies, bounds
from topology.codec import headers as header_rules
from topology.codec.headers import NO_HOP, HopHeaders, RequestHeaders, ms_or_none
from topology.codec.media import NO_MEDIA, Media
from topology.delays import MAX_DELAY_MS
from topology.lanes import MIB, LaneSpec

Clock: TypeAlias = Literal["broker", "sender", "timestamp", "delivery"]
"""Who has stated when a request was published: the broker (header `timestamp_in_ms`), the sender (`x-lane-sent-ms`),
the property `timestamp`, or, without any of these, its first delivery."""


class Published(NamedTuple):
    """When a request was published, in ms since 1970. Its wait and its deadline count from then."""

    ms: int
    by: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a worker has read and checked of a delivered message."""

    id: str
    lane: str
    rank: int = 0
    """The lane's."""
    body: bytes
    """The JSON for the provider: as published, with missing fields added."""
    model: str
    dialect: str = ANTHROPIC_MESSAGES
    """The format of `body` and of the answer."""
    max_tokens: int
    stream: bool
    provider_headers: Mapping[str, str] = field(default_factory=dict)
    """The `anthropic-*` headers for the provider, by their names in lower case."""
    published: Published
    due_ms: int | None
    """It must not start before; ms since 1970."""
    debounce: str | None = None
    """Of the requests with this key, the last one published runs."""
    deadline_ms: int
    """It must be answered by then, unless its stream flows; ms since 1970."""
    call_s: float = 0
    """The time limit of one attempt; streamed, of the time to the first token, and of every pause after it."""
    states_stream: bool = True
    """False only if `body` certainly has no field `stream`."""
    kept: BodyAddress | None = None
    """Where the body is, if it was not fetched yet; then `body` is empty, and `model` and `max_tokens` are the
    lane's."""
    no_batch: bool = False
    """It may not be put into a provider's batch."""
    media: Media = NO_MEDIA
    handler: str = ""
    """The handler that is called in place of a model; `body` is then any JSON."""
    pipeline: str = ""
    """The pipeline whose steps are run; `body` is then its input, or its state (`state_of`)."""
    key: str = ""
    """The name of the API key with which a gateway was called."""
    user: str = ""
    """Which of the tenant's users asks: a hash of the body's `metadata.user_id`."""
    files: tuple[str, ...] = ()
    """The ids of the files at a provider that the body names."""
    gather_count: int = 1
    """The lane's `gather_embeddings`."""
    gather_window_s: float = 0.0
    is_fast: bool = False
    """It asks for fast mode (`speed: fast`), which has limits of its own."""
    other_models: tuple[str, ...] = ()
    """The models that the provider itself may ask for it, too (`bodies.models_beside`)."""

    @property
    def text_bytes(self) -> int:
        return len(self.body) - self.media.bytes

    @property
    def start_ms(self) -> int:
        """When the request's wait begins."""
        return self.published.ms if self.due_ms is None else max(self.due_ms, self.published.ms)


NOT_PACKED = ("identity", "utf-8")
"""kombu and Spring state the charset of JSON as its encoding."""
AMQP_1 = "amqp-1.0"
"""The `type` that RabbitMQ gives to a message that an AMQP 1.0 client sent as a value (a string, a list) in place of
data; its body is not what the client sent."""
AMQP_VALUE = b"\x00\x53\x77"
"""So that body begins."""
PACKED_BYTES = MIB
UNPACKED_BYTES = 8 * MIB
"""Unpacking this much takes 20 ms of CPU, whatever the size of the packed body."""
UNPACKED_TIMES = 1032
NESTED = 200
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
    handlers: Collection[str] = (),
    pipelines: Collection[str] = (),
) -> Request:
    """Check a message of `lane`, and convert it to a `Request`.

    `hop`: None for a message that no worker has published again. `raw`: the body, if the caller has already fetched or
    unpacked it, and checked it with `bounds`. If the message has only the body's address, and `raw` is None, the result
    has no body, but the address in `Request.kept`.

    `handlers`: the names that the property `type` may have besides `messages`; `pipelines`: those that the header
    `x-lane-pipeline` may have.

    Raises RequestProblem (invalid_request, unsupported_media, too_large, forbidden_model).
    """
    _check_properties(message, lane=lane, fresh=hop is None)
    headers = header_rules.read(message.headers)
    history = hop or NO_HOP
    flow = history.flow
    handler = _handler_of(message, headers, handlers)
    pipeline = _pipeline_of(message, headers, pipelines)
    if (handler or pipeline) and headers.dialect != ANTHROPIC_MESSAGES:
        raise invalid_request(f"header {DIALECT}: the body of a handler or pipeline has no dialect; leave it out")
    if flow is not None and flow.input_bytes:
        raw = message.body
    elif headers.kept is not None:
        _check_unpublished(message)
    elif raw is None:
        raw = unpacked(message)
        if (excess := bounds.excess(raw, max_values=max_values)) is not None:
            raise too_large(excess)
    if raw is None:
        content = bodies.Content(b"", handler or lane.model, lane.max_tokens)
    elif handler or pipeline:
        if flow is None:
            _parsed(raw)
        content = bodies.Content(raw, handler or lane.model, lane.max_tokens)
    else:
        content = bodies.READERS[headers.dialect](raw, _parsed(raw), headers.stream, lane)
    sent = published(message, history, now_ms=now_ms)
    due_ms = _due_ms(headers, history, sent_ms=sent.ms)
    allowed_ms = _allowed_ms(headers, lane) if flow is None else int(lane.deadline_max_s * 1000)
    return Request(
        id=request_id,
        lane=lane.name,
        rank=lane.rank,
        body=content.body,
        model=content.model,
        dialect=headers.dialect,
        max_tokens=content.max_tokens,
        stream=headers.stream,
        states_stream=content.states_stream,
        provider_headers=_provider_headers(headers, lane),
        published=sent,
        due_ms=due_ms,
        debounce=headers.debounce if flow is None else None,
        deadline_ms=(due_ms or sent.ms) + allowed_ms if flow is None else flow.deadline_ms,
        call_s=allowed_ms / 1000 if headers.long_call else lane.call_timeout_s,
        kept=headers.kept if raw is None else None,
        no_batch=headers.no_batch or headers.kept is not None,
        media=content.media,
        handler=handler,
        pipeline=pipeline,
        key=message.headers.get(KEY, ""),
        user=content.user,
        files=content.files,
        gather_count=lane.gather_embeddings,
        gather_window_s=lane.gather_window_s,
        is_fast=content.is_fast,
        other_models=content.other_models,
    )


def _provider_headers(headers: RequestHeaders, lane: LaneSpec) -> Mapping[str, str]:
    found = headers.provider_headers
    if lane.anthropic_version is None or ANTHROPIC_VERSION in found:
        return found
    return {**found, ANTHROPIC_VERSION: lane.anthropic_version}


def deadline_of(message: Message, *, lane: LaneSpec, hop: HopHeaders | None, now_ms: int) -> int:
    """`Request.deadline_ms`, without a look at the body. Raises RequestProblem."""
    if hop is not None and hop.flow is not None:
        return hop.flow.deadline_ms
    headers, history = header_rules.read(message.headers), hop or NO_HOP
    sent = published(message, history, now_ms=now_ms)
    return (_due_ms(headers, history, sent_ms=sent.ms) or sent.ms) + _allowed_ms(headers, lane)


def unpacked(message: Message) -> bytes:
    """The body, unpacked according to `content_encoding`. Raises RequestProblem (unsupported_media, too_large,
    invalid_request)."""
    if len(message.body) > PACKED_BYTES:
        raise larger_than_allowed(len(message.body))
    encoding = (message.content_encoding or "identity").lower()
    if encoding in NOT_PACKED:
        if message.body.startswith(AMQP_VALUE):
            raise _no_data_section()
        return message.body
    if encoding != "gzip":
        raise RequestProblem(
            "unsupported_media", f"content_encoding {encoding[:40]!r}: allowed are identity, utf-8 and gzip"
        )
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


def _no_data_section() -> RequestProblem:
    return invalid_request(
        "body: an AMQP 1.0 value (a string); allowed is JSON in UTF-8 as a data section: send the body as bytes"
    )


def larger_than_allowed(size: int) -> RequestProblem:
    """The error for a body of so many bytes in a message."""
    return RequestProblem(
        "too_large",
        f"body: {size} bytes, allowed are {PACKED_BYTES}; put a larger body into a store, and publish "
        f"its address and digest ({BODY}, {BODY_SHA256}) with an empty body",
    )


def weight(message: Message) -> int:
    """The largest size that a message's body can have after unpacking."""
    size = len(message.body)
    is_packed = (message.content_encoding or "identity").lower() not in NOT_PACKED
    return min(UNPACKED_BYTES, UNPACKED_TIMES * size) if is_packed else size


def too_large(excess: str) -> RequestProblem:
    """The error for a body that exceeds a limit of `bounds.py`."""
    return RequestProblem("too_large", f"body: {excess}")


def app_of(routing_key: str) -> str:
    """The application in `<lane>.<app>.<task>…`; `unknown` if there is none."""
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
        if not message.routing_key.isprintable():
            raise invalid_request(f"routing key {message.routing_key[:120]!r}: it has control characters")
        if DEATH in message.headers:
            raise invalid_request(f"header {DEATH}: not allowed on a fresh request")
    if fresh and message.message_id and not is_request_id(message.message_id):
        raise invalid_request(f"message_id: {REQUEST_ID}; found something else")
    if message.priority is not None and message.priority > PRIORITY_AT_MOST:
        raise invalid_request(f"priority: found {message.priority}, allowed are 0 to {PRIORITY_AT_MOST}")
    if message.type == AMQP_1:
        raise _no_data_section()
    if message.content_type and not _JSON_TYPE.fullmatch(message.content_type):
        raise RequestProblem(
            "unsupported_media", f"content_type {message.content_type[:60]!r}: allowed is application/json (UTF-8)"
        )


def _handler_of(message: Message, headers: RequestHeaders, known: Collection[str]) -> str:
    if message.type in (None, "", "messages"):
        return ""
    if message.type not in known:
        named = ", ".join(sorted(known)) or "none"
        raise invalid_request(
            f"type {message.type[:40]!r}: no handler has this name (registered: {named}); "
            "for the model leave it out, or say messages"
        )
    if headers.stream:
        raise invalid_request(f"header {STREAM}: a handler's answer is not streamed")
    return message.type


def _pipeline_of(message: Message, headers: RequestHeaders, known: Collection[str]) -> str:
    if headers.pipeline is None:
        return ""
    if headers.pipeline not in known:
        named = ", ".join(sorted(known)) or "none"
        raise invalid_request(f"header {PIPELINE}: {headers.pipeline[:40]!r} is no pipeline (declared: {named})")
    if message.type not in (None, "", "messages"):
        raise invalid_request(f"type {message.type[:40]!r} and header {PIPELINE}: give one of them")
    if headers.stream:
        raise invalid_request(f"header {STREAM}: a pipeline's answer is not streamed")
    if headers.kept is not None:
        raise invalid_request(f"header {BODY}: a pipeline's input is the message's body")
    return headers.pipeline


_STATE = b'{"input":'
_OUTPUTS = b',"outputs":{}}'


def state_of(body: bytes) -> bytes:
    """The state with which a pipeline begins: its input, as it was published, and no outputs."""
    return _STATE + body + _OUTPUTS


def input_of(state: bytes, length: int) -> bytes:
    """The body that the requester published, from the state of its pipeline."""
    return state[len(_STATE) : len(_STATE) + length]


def _check_unpublished(message: Message) -> None:
    if message.body:
        raise invalid_request(f"body: {len(message.body)} bytes, and header {BODY} says that it lies elsewhere")
    if (message.content_encoding or "identity").lower() not in NOT_PACKED:
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
    """Without the duplicate key that jiter quotes: it may be part of a prompt, unless it is a known field's name."""
    duplicate = _DUPLICATE_KEY.match(error)
    if duplicate is None or duplicate["key"] in bodies.KNOWN_FIELDS:
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


def _allowed_ms(headers: RequestHeaders, lane: LaneSpec) -> int:
    if headers.deadline_ms is None:
        return int(lane.deadline_s * 1000)
    if headers.deadline_ms > (max_ms := int(lane.deadline_max_s * 1000)):
        raise invalid_request(
            f"header {DEADLINE_MS}: found {headers.deadline_ms}, lane {lane.name} allows at most {max_ms}"
        )
    return headers.deadline_ms


def unpublished(prompt: str, *, model: str, max_tokens: int, dialect: str = ANTHROPIC_MESSAGES) -> Request:
    """For a direct call to a provider, without a message."""
    asked: dict[str, object] = {"model": model}
    if dialect == OPENAI_EMBEDDINGS:
        asked["input"] = prompt
    else:
        bound = "max_tokens" if dialect == ANTHROPIC_MESSAGES else "max_completion_tokens"
        asked |= {bound: max_tokens, "messages": [{"role": "user", "content": prompt}]}
    return Request(
        id=uuid.uuid4().hex,
        lane="",
        body=json.dumps(asked).encode(),
        model=model,
        dialect=dialect,
        max_tokens=max_tokens,
        stream=False,
        published=Published(0, "sender"),
        due_ms=None,
        deadline_ms=0,
    )


def published(message: Message, history: HopHeaders, *, now_ms: int) -> Published:
    """What the sender or the broker has stated, and never later than the first delivery to a worker."""
    seen_ms = history.first_seen_ms or now_ms
    stated = None if DEAD_AT in message.headers else _stated(message)
    # a dead letter that is published again has the timestamps of its first publish, so they are not used
    return Published(seen_ms, "delivery") if stated is None else Published(min(stated.ms, seen_ms), stated.by)


def _stated(message: Message) -> Published | None:
    stamped = message.headers.get(BROKER_TIMESTAMP_MS)
    if isinstance(stamped, int) and not isinstance(stamped, bool) and stamped > 0:
        return Published(stamped, "broker")
    if (sent_ms := ms_or_none(message.headers, SENT_MS)) is not None:
        return Published(sent_ms, "sender")
    if message.timestamp_s is not None and message.timestamp_s > 0:
        # take the end of that second, so that a delay counted from it is never too short
        return Published(int(message.timestamp_s) * 1000 + 999, "timestamp")
    return None
