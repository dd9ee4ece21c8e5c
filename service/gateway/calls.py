"""Receives HTTP calls (`POST /v1/messages`, `/v1/chat/completions`, `/v1/requests`, …), and turns them into requests
for a lane, checked by the same rules as a worker's. A wrong body or header is refused here, so that the request neither
waits in a lane's queue nor becomes a dead letter.

A large body is written to a temporary file while it arrives, and from there to the store of large bodies, so that many
can arrive at the same time with only a piece of each in memory. The HTTP server unpacks nothing by itself: a packed
body is unpacked here, when its caller is known and it is whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import tempfile
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, BinaryIO, Final

import jiter
from aiohttp import web
from multidict import MultiMapping

from consumers.flows.pipelines import PipelineSpec
from consumers.job import content_hash
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import invalid_request
from lanekeeper.requests import ANSWER_LATE_S, Options
from service.config.settings import GatewayKey
from service.gateway.access import lane_of, only_value, require_allowed_model, require_allowed_pipeline
from service.gateway.problems import ApiError
from service.gateway.shares import SharedLimit, SharedTaken, Shares
from topology.codec import bounds
from topology.codec import headers as header_rules
from topology.codec.decoding import Request, decode, too_large
from topology.codec.fields import without_field
from topology.codec.headers import UNSUPPORTED, read_provider_headers, unknown_header
from topology.lanes import LaneSpec

MESSAGES = "messages"
SUBMITTED = "requests"
TIMEOUTS = ("x-stainless-timeout", "x-stainless-read-timeout")
"""Where the vendors' SDKs send the timeout of a call, in seconds. The first is that of TypeScript's, and of Python's if
the call itself sets a timeout; the second is Python's timeout of the call or else of the client."""
TIMEOUT_MS = 600_000
"""The deadline of a call whose caller waits for the answer, and names none: the SDKs' default timeout."""
LONGEST_S = 1e9
IDEMPOTENCY_KEY = "Idempotency-Key"
PREFIX = "x-lane-"
REFUSED_HEADERS = {
    n.STREAM: "the body's `stream` says it",
    n.PARTS_TOGETHER: "the gateway reads the parts",
    n.LONG_CALL: "calls whose caller waits for the answer are long ones by themselves",
    n.TENANT: "the tenant follows from the key",
    n.KEY: "it follows from the key",
    n.BODY: "the body comes with the call",
    n.BODY_SHA256: "the body comes with the call",
}
_ACCEPTED = (n.PUBLIC | {n.LANE_NAME, n.TYPE}) - REFUSED_HEADERS.keys()
_OF_BATCHES = frozenset({n.LANE_NAME, n.DEADLINE_MS, n.NO_BATCH, n.PARK_INVALID, n.WEBHOOK})
"""The headers that the creation of a Message Batch may have, for all of its requests."""
BODY_WITHIN_S: Final = 30.0
LEAST_BYTES_PER_S: Final = 256 * 1024
HELD_BYTES: Final = 128 * 1024
PIECE_BYTES: Final = 256 * 1024
BODIES_BYTES: Final = 256 * 1024 * 1024
FILED_BYTES: Final = 2 * 1024 * 1024 * 1024
COUNTED_BYTES: Final = 4 * 1024 * 1024
ENCODINGS: Final = ("identity", "gzip", "deflate")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A call whose headers and body were checked, and what is needed to publish it as a request."""

    body: bytes | BinaryIO
    key: str
    stream: bool
    timeout_s: float
    options: Options
    request: Request
    sha256: str | None = None
    wants_usage: bool = False
    """Whether a stream of chat completions ends with the usage."""
    choices: int = 1
    """How many chat completions a stream is asked for."""
    is_background: bool = False
    """Whether the caller of `/v1/responses` does not wait for the answer."""
    previous: str | None = None
    """The id of the response that the caller of `/v1/responses` continues."""

    @property
    def body_hash(self) -> bytes:
        if self.sha256 is not None:
            return content_hash(self.sha256)
        assert isinstance(self.body, bytes)
        return content_hash(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCall:
    """What all requests of a Message Batch have in common."""

    caller: GatewayKey
    lane: LaneSpec
    key: str
    headers: Mapping[str, str | int | bool]
    is_live: bool
    """Whether they go into no provider's batch."""


def request_id_of(headers: MultiMapping[str]) -> str:
    """The id for the request of a call: its `Idempotency-Key`, or a random one. Raises RequestProblem."""
    chosen = only_value(headers, IDEMPOTENCY_KEY)
    if chosen is None:
        return uuid.uuid4().hex
    if not is_request_id(chosen):
        raise invalid_request(f"header {IDEMPOTENCY_KEY}: {REQUEST_ID}")
    return chosen


def limit_of(query: Mapping[str, str], default: int, least: int, most: int) -> int:
    """The parameter `limit`. Raises ApiError."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and least <= int(limit) <= most):
        raise ApiError(400, f"limit: allowed is a whole number from {least} to {most}")
    return int(limit)


def page_in(ids: Sequence[str], query: Mapping[str, str], limit: int) -> tuple[slice, bool]:
    """The page of a list that Anthropic's API would show, and whether there are more. Raises KeyError for the id of
    none."""
    place = {id: number for number, id in enumerate(ids)}
    start = place[query["after_id"]] + 1 if "after_id" in query else 0
    end = place[query["before_id"]] if "before_id" in query else len(ids)
    has_more = end - start > limit
    if "before_id" in query and "after_id" not in query:
        return slice(max(0, end - limit), end), has_more
    return slice(start, max(start, min(end, start + limit))), has_more


def refuse_unknown(query: Mapping[str, str], known: Collection[str]) -> None:
    """A misspelt name must not widen what is meant. Raises ApiError."""
    if unknown := sorted(set(query) - set(known)):
        allowed = ", ".join(sorted(known)) or "none"
        raise ApiError(400, f"query: unknown name {unknown[0][:40]!r}; known: {allowed}")


def submitted_id_of(headers: MultiMapping[str]) -> str:
    """Like `request_id_of`, for an id in a URL's path, where HTTP clients change `.` and `..`."""
    id = request_id_of(headers)
    if id in (".", ".."):
        raise invalid_request(f"header {IDEMPOTENCY_KEY}: dots alone are no path: {REQUEST_ID}")
    return id


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReader:
    """Checks calls. `app`: the second word of routing keys, which topic permissions require."""

    lanes: Mapping[str, LaneSpec]
    app: str
    max_values: int
    cancel_abandoned: bool
    names_keys: bool = False
    """Whether requests name the caller's key, because there are caps for keys."""
    handlers: Collection[str] = ()
    pipelines: Mapping[str, PipelineSpec] = field(default_factory=dict)
    has_batches: bool = True
    """Whether a provider may have batches, as far as this process knows."""

    def read(
        self,
        call_headers: MultiMapping[str],
        body: bytes,
        caller: GatewayKey,
        *,
        request_id: str,
        task: str = MESSAGES,
        dialect: str | None = None,
    ) -> CheckedCall:
        """`task`: the third word of the routing key; `SUBMITTED`: nobody waits for the answer. `dialect`: that of the
        path; None: the one that the caller names."""
        lane = lane_of(caller, only_value(call_headers, n.LANE_NAME), self.lanes)
        headers: dict[str, str | int | bool] = {**_headers(call_headers)}
        if (excess := bounds.excess(body, max_values=self.max_values)) is not None:
            raise too_large(excess)
        asked = _fields(body)
        response = asked if dialect == n.OPENAI_RESPONSES else _NOTHING
        previous, is_background = response.get("previous_response_id"), response.get("background") is True
        if is_background:  # Lanekeeper keeps the answer, so that the provider need not
            body = without_field(body, "background")
            task = SUBMITTED
        is_awaited = task != SUBMITTED
        handler = None if is_awaited or dialect is not None else only_value(call_headers, n.TYPE)
        if handler is not None:
            del headers[n.TYPE]
        if dialect is not None:
            if n.DIALECT in headers:
                raise invalid_request(f"header {n.DIALECT}: not allowed here, the path says it")
            if dialect != n.ANTHROPIC_MESSAGES:
                headers[n.DIALECT] = dialect
        if n.TYPE in headers:
            raise invalid_request(f"header {n.TYPE}: a handler is called by POST /v1/requests")
        pipeline = headers.get(n.PIPELINE)
        if (is_awaited or dialect is not None) and pipeline is not None:
            raise invalid_request(f"header {n.PIPELINE}: a pipeline is run by POST /v1/requests")
        if is_awaited:  # the caller waits, so its own timeout is the deadline, and one attempt may take all of it
            headers.setdefault(n.DEADLINE_MS, min(_timeout_ms(call_headers), int(1000 * lane.deadline_max_s)))
            headers[n.LONG_CALL] = True
            headers.setdefault(n.PARK_INVALID, False)  # the caller gets the error, and sends what is right
        if self.names_keys and caller.name:
            headers[n.KEY] = caller.name
        key = f"{lane.name}.{self.app}.{task}"
        stream = asked.get("stream") is True and handler is None and pipeline is None
        now_ms = int(time.time() * 1000)
        message = Message(body=body, routing_key=key, headers={**headers, n.STREAM: "true"} if stream else headers)
        message.type = handler
        request = decode(
            message,
            lane=lane,
            request_id=request_id,
            hop=None,
            now_ms=now_ms,
            raw=body,
            handlers=self.handlers,
            pipelines=self.pipelines.keys(),
        )
        options = Options(message_id=request_id, headers=headers)
        if handler is not None:
            options["handler"] = handler
        elif request.pipeline:
            require_allowed_pipeline(caller, self.pipelines[request.pipeline], lane, self.lanes)
        else:
            _require_allowed_models(caller, request)
        if caller.tenant is not None:
            options["tenant"] = caller.tenant
        if IDEMPOTENCY_KEY in call_headers or not self.cancel_abandoned:
            options["cancel_abandoned"] = False
        return CheckedCall(
            body=body,
            key=key,
            stream=stream,
            timeout_s=(request.deadline_ms - now_ms) / 1000 + ANSWER_LATE_S,
            options=options,
            request=request,
            wants_usage=stream and _wants_usage(asked),
            choices=_choices(asked) if stream else 1,
            is_background=is_background,
            previous=previous if isinstance(previous, str) else None,
        )

    def read_batch(self, call_headers: MultiMapping[str], caller: GatewayKey, *, sent_ms: int) -> BatchCall:
        """Checks the headers of a call that creates a Message Batch. Raises RequestProblem, ApiError."""
        lane = self._lane_of_batch(caller, only_value(call_headers, n.LANE_NAME))
        found = _headers(call_headers)
        if wrong := sorted(name for name in found if name.startswith(PREFIX) and name not in _OF_BATCHES):
            raise invalid_request(f"header {wrong[0]}: not allowed for a Message Batch")
        headers: dict[str, str | int | bool] = {n.PARK_INVALID: False, **found, n.SENT_MS: sent_ms}
        if self.names_keys and caller.name:
            headers[n.KEY] = caller.name
        asked = header_rules.read(headers)
        deadline_s = lane.deadline_s if asked.deadline_ms is None else asked.deadline_ms / 1000
        may_wait = deadline_s >= lane.batches.least_s and not asked.no_batch
        is_live = not (lane.batches.enabled and self.has_batches and may_wait)
        key = f"{lane.name}.{self.app}.batches"
        return BatchCall(caller=caller, lane=lane, key=key, headers=headers, is_live=is_live)

    def _lane_of_batch(self, caller: GatewayKey, named: str | None) -> LaneSpec:
        """`named`; else the first of the caller's that has batches, as far as there is one."""
        if named is None:
            allowed = [self.lanes[name] for name in caller.lanes or self.lanes]
            if (found := next((lane for lane in allowed if lane.batches.enabled), None)) is not None:
                return found
        return lane_of(caller, named, self.lanes)

    def read_item(self, batch: BatchCall, params: bytes, *, request_id: str) -> Request:
        """Checks a request of a Message Batch. Raises RequestProblem."""
        if (excess := bounds.excess(params, max_values=self.max_values)) is not None:
            raise too_large(excess)
        if _fields(params).get("stream") is True:
            raise invalid_request("stream: not supported in batches")
        message = Message(body=params, routing_key=batch.key, headers=batch.headers)
        request = decode(
            message, lane=batch.lane, request_id=request_id, hop=None, now_ms=int(time.time() * 1000), raw=params
        )
        _require_allowed_models(batch.caller, request)
        return request


def _require_allowed_models(caller: GatewayKey, request: Request) -> None:
    for model in (request.model, *request.other_models):
        require_allowed_model(caller.models, model)


def _headers(call_headers: MultiMapping[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in dict.fromkeys(map(str.lower, call_headers)):
        if name in REFUSED_HEADERS:
            raise invalid_request(f"header {name}: not allowed here, {REFUSED_HEADERS[name]}")
        if name.startswith(PREFIX) and name not in n.OURS:
            if name not in _ACCEPTED and name not in UNSUPPORTED:
                raise unknown_header(name, known=_ACCEPTED)
            found[name] = only_value(call_headers, name) or ""
        elif name in n.TRACE_CONTEXT or name.startswith(n.ANTHROPIC):
            found[name] = ",".join(call_headers.getall(name))
    return found


def provider_headers_of(call_headers: MultiMapping[str]) -> dict[str, str]:
    """The headers for the provider of a call that becomes no request. Raises RequestProblem."""
    names = (name for name in dict.fromkeys(map(str.lower, call_headers)) if name.startswith(n.ANTHROPIC))
    return read_provider_headers({name: ",".join(call_headers.getall(name)) for name in names})


def _timeout_ms(headers: MultiMapping[str]) -> int:
    for name in TIMEOUTS:
        with suppress(ValueError):  # Python's SDK also sends NOT_GIVEN and None
            if 0 <= (timeout_s := float(headers.get(name, ""))) < math.inf:
                return max(1, round(1000 * min(timeout_s or 1, LONGEST_S)))
    return TIMEOUT_MS


_NOTHING: Mapping[str, Any] = {}


def _fields(body: bytes) -> Mapping[str, Any]:
    """Those of a JSON object; of what is none, and is refused by `decode`, none."""
    try:
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError:
        return _NOTHING
    return found if isinstance(found, dict) else _NOTHING


def _wants_usage(asked: Mapping[str, Any]) -> bool:
    options = asked.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _choices(asked: Mapping[str, Any]) -> int:
    n = asked.get("n")
    return n if isinstance(n, int) and n > 1 else 1


class Bodies:
    """Receives bodies: those over `over_bytes` in files, none over `most_bytes`. Counts calls until they end."""

    def __init__(self, call_reader: CallReader, shares: Shares, *, over_bytes: int, most_bytes: int) -> None:
        self._call_reader = call_reader
        self._shares = shares
        self._files = SharedLimit(FILED_BYTES, "large bodies")
        self._over_bytes = over_bytes
        self._most_bytes = most_bytes

    @asynccontextmanager
    async def checked_call(
        self,
        request: web.Request,
        caller: GatewayKey,
        *,
        request_id: str,
        task: str = MESSAGES,
        dialect: str | None = None,
    ) -> AsyncIterator[CheckedCall]:
        packed = _packed(request, most_bytes=self._most_bytes)
        with (
            self._shares.calls.taken(caller.tenant),
            self._shares.memory.taken(caller.tenant, 0) as memory,
            self._files.taken(caller.tenant, 0) as files,
            ExitStack() as stack,
        ):
            came = await self._received(request, stack, memory, files, most_bytes=self._most_bytes)

            def check() -> tuple[CheckedCall, int]:
                whole = _unpacked(came if isinstance(came, bytes) else came.read(), packed, most_bytes=self._most_bytes)
                call = self._call_reader.read(
                    request.headers, whole, caller, request_id=request_id, task=task, dialect=dialect
                )
                assert isinstance(call.body, bytes)
                whole, is_as_it_came = call.body, call.body is whole and not packed
                if len(whole) <= self._over_bytes:
                    return call, len(whole)
                if isinstance(came, bytes) or not is_as_it_came:
                    file: BinaryIO = stack.enter_context(tempfile.TemporaryFile())
                    file.write(whole)
                else:
                    file = came
                file.seek(0)
                sha256 = hashlib.sha256(whole).hexdigest()
                filed = replace(call, body=file, sha256=sha256, request=replace(call.request, body=b""))
                return filed, len(whole)

            size = len(came) if isinstance(came, bytes) and not packed else math.inf
            call, unpacked = await self._shares.parsing.run(size, check)
            is_filed = unpacked > self._over_bytes
            files.change(unpacked if is_filed else 0)
            memory.change(0 if is_filed else unpacked)
            yield call

    @asynccontextmanager
    async def in_memory(
        self, request: web.Request, caller: GatewayKey, *, check: Callable[[bytes], None]
    ) -> AsyncIterator[bytes]:
        most = COUNTED_BYTES
        packed = _packed(request, most_bytes=most)
        with (
            self._shares.calls.taken(caller.tenant),
            self._shares.memory.taken(caller.tenant, 0) as memory,
            self._files.taken(caller.tenant, 0) as files,
            ExitStack() as stack,
        ):
            came = await self._received(request, stack, memory, files, most_bytes=most, over_bytes=most)
            assert isinstance(came, bytes)

            def checked() -> bytes:
                whole = _unpacked(came, packed, most_bytes=most)
                check(whole)
                return whole

            body = await self._shares.parsing.run(math.inf if packed else len(came), checked)
            memory.change(len(body))
            yield body

    @asynccontextmanager
    async def in_file(self, request: web.Request, caller: GatewayKey, *, most_bytes: int) -> AsyncIterator[BinaryIO]:
        """The body in a temporary file, unpacked."""
        packed = _packed(request, most_bytes=most_bytes)
        with (
            self._shares.calls.taken(caller.tenant),
            self._shares.memory.taken(caller.tenant, 0) as memory,
            self._files.taken(caller.tenant, 0) as files,
            ExitStack() as stack,
        ):
            came = await self._received(request, stack, memory, files, most_bytes=most_bytes)
            if packed is None and not isinstance(came, bytes):
                yield came
                return
            file = stack.enter_context(await asyncio.to_thread(tempfile.TemporaryFile))
            source = BytesIO(came) if isinstance(came, bytes) else came
            files.change(files.amount + (len(came) if packed is None and isinstance(came, bytes) else most_bytes))
            await asyncio.to_thread(_unpack_into, file, source, packed, most_bytes)
            memory.change(0)
            yield file

    async def _received(
        self,
        request: web.BaseRequest,
        stack: ExitStack,
        memory: SharedTaken,
        files: SharedTaken,
        *,
        most_bytes: int,
        over_bytes: int | None = None,
    ) -> bytes | BinaryIO:
        """In a file if it is larger than `over_bytes` (None: than bodies in messages may be)."""
        over = self._over_bytes if over_bytes is None else over_bytes
        announced = request.content_length
        most = most_bytes if announced is None else announced
        file: BinaryIO | None = None
        held = bytearray()
        async with _arriving(BODY_WITHIN_S + max(0, most - over) / LEAST_BYTES_PER_S):
            send_100(request)
            async for piece in request.content.iter_any():
                held += piece
                if files.amount + len(held) > most_bytes:
                    raise _too_large(most_bytes)
                if file is None and max(len(held), announced or 0) > over:
                    file = stack.enter_context(await asyncio.to_thread(tempfile.TemporaryFile))
                if file is None or len(held) < HELD_BYTES:
                    memory.change(len(held))
                else:
                    files.change(files.amount + len(held))
                    await asyncio.to_thread(file.write, held)
                    held = bytearray()
                    memory.change(0)
        if file is None:
            return bytes(held)
        files.change(files.amount + len(held))
        await asyncio.to_thread(file.write, held)
        memory.change(0)
        file.seek(0)
        return file


def send_100(request: web.BaseRequest) -> None:
    """Let the client send its body, if it waits for that."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@asynccontextmanager
async def _arriving(within_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {within_s:g} s", "timeout_error") from None
    except web.RequestPayloadError:
        raise _wrongly_packed() from None


def _packed(request: web.BaseRequest, *, most_bytes: int) -> str | None:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise ApiError(415, f"header content-encoding: allowed are {', '.join(ENCODINGS)}")
    if (request.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)
    return None if encoding == "identity" else encoding


def _unpacked(body: bytes, packed: str | None, *, most_bytes: int) -> bytes:
    if packed is None:
        return body
    return b"".join(_pieces_of(BytesIO(body), packed, most_bytes=most_bytes, piece_bytes=len(body) + 1))


def _unpack_into(file: BinaryIO, source: BinaryIO, packed: str | None, most_bytes: int) -> None:
    source.seek(0)
    pieces = iter(lambda: source.read(PIECE_BYTES), b"")
    file.writelines(pieces if packed is None else _pieces_of(source, packed, most_bytes=most_bytes))
    file.flush()


def _pieces_of(source: BinaryIO, packed: str, *, most_bytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    came = source.read(piece_bytes)
    wbits = 16 + zlib.MAX_WBITS
    if packed == "deflate":  # some senders leave out the head that the standard demands
        wbits = zlib.MAX_WBITS if came[:1] and came[0] & 0x0F == 8 else -zlib.MAX_WBITS
    unpacker, size = zlib.decompressobj(wbits), 0
    while came:
        try:
            piece = unpacker.decompress(came, most_bytes - size + 1)
        except zlib.error:
            raise _wrongly_packed() from None
        if (size := size + len(piece)) > most_bytes:
            raise _too_large(most_bytes)
        yield piece
        came = unpacker.unconsumed_tail or source.read(piece_bytes)
        if unpacker.eof:
            break
    if not unpacker.eof or unpacker.unused_data or came:
        raise _wrongly_packed()


def _wrongly_packed() -> ApiError:
    return ApiError(400, "body: not as its headers content-encoding and transfer-encoding say")


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"body: larger than {most_bytes} bytes")
