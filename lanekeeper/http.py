"""The client's transport over HTTP: calls to a gateway's `/v1/requests`.

A request is posted once; its events and its result are then fetched by its id. So neither the request nor a part of its
answer is lost if the connection breaks or the gateway restarts, and the next call may go to another gateway. A call is
repeated while the gateway, or a proxy in front of it, cannot be reached: posted twice, it is still one request.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import aiohttp

from lanekeeper.backoff import pause_s
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_host, is_request_id
from lanekeeper.contract.messages import Depth, Message
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
    BrokerError,
    BrokerUnreachable,
    ClientMisused,
    ConfirmUnknown,
    InvalidArgument,
    InvalidUrl,
    PublishRefused,
    ReplyLost,
    TopologyMismatch,
)  # fmt: skip
from lanekeeper.groups import Found, Outcome
from lanekeeper.replies import Cancelled, ControlRefused, Final, NotEnded, Part, Problem, final_of, lost_answer
from lanekeeper.requests import PRIORITY, OutgoingRequest, time_in, until_ended

if TYPE_CHECKING:
    from lanekeeper.telemetry.tracing import Tracing

REQUESTS = "/v1/requests"
GROUPS = "/v1/groups"
FETCHED_AT_ONCE = 32
WAIT_S = 20.0
"""Of one call; so short that proxies do not close the silent connection."""
CONTROL_WITHIN_S = 5.0
AWAY_S = 30.0
IDEMPOTENCY_KEY = "idempotency-key"
PREFIX = "x-lane-"
CARRIED = n.TRACE_CONTEXT | {n.ANTHROPIC_BETA}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name in HTTP."""
_SPACE = re.compile(r"[ \t\r\n]*")
_COUNTS = ("in_progress", "completed", "failed", "cancelled")
_STATUS = {"queued": "waiting", "delayed": "waiting", "retrying": "waiting", "running": "running"}
_FIELDS = {
    "lane": n.LANE_NAME, "model": n.MODEL, "provider": n.PROVIDER, "attempts": n.ATTEMPT, "wait_ms": n.WAIT_MS,
    "run_ms": n.RUN_MS, "replayed": n.REPLAYED,
}  # fmt: skip
ANSWERED_WITHIN_S = 10.0
SLOWEST_BYTES_S = 256 * 1024
SILENT_S = 60.0
"""An event stream without any data, not even a comment, is lost after this time."""
LARGEST_BYTES = 64 * 1024 * 1024
"""Of an answer or an event: twice the default maximum of a model's answer with a store for large bodies."""
FIRST_PAUSE_S = 0.2
PAUSE_CAP_S = 5.0
RETRY_AFTER_CAP_S = 3600.0
LANE_FULL = 529
GONE = 410
_TEMPORARY = frozenset({408, 429, 503})
"""The call was not carried out, and may succeed a little later."""
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the end of a chunk may be half of \r\n


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer of the gateway, or of a proxy in front of it."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def document(self) -> Mapping[str, Any]:
        return document_of(self.body)


class OverHttp:
    """How a `Client` with the URL of a gateway reaches the workers. The methods are those of `Client`; `answer` and
    `replies` (its `request` and `stream`) raise TimeoutError at `outgoing.end`."""

    user = ""

    def __init__(
        self, url: str, *, api_key: str | None, ssl_context: ssl.SSLContext | None, tracing: "Tracing | None"
    ) -> None:
        try:
            parts = urlsplit(url)
            is_url = is_host(parts.hostname or "") and parts.port != 0 and not (parts.query or parts.fragment)
        except ValueError:
            is_url = False
        if not is_url or "@" in parts.netloc:
            raise InvalidUrl("a gateway's URL is http(s)://host[:port][/path]; its key is given as `api_key`")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgument("api_key: has a character that no key has")
        self.trouble: str | None = None
        self._address = url.rstrip("/")
        self._headers = {"accept-encoding": "identity"} | ({} if api_key is None else {"x-api-key": api_key})
        self._ssl = ssl_context or True
        self._session: aiohttp.ClientSession | None = None
        self._tracing = tracing

    async def __aenter__(self) -> Self:
        """Checks that the gateway can be reached, and takes the key. Raises BrokerUnreachable and AccessRefused."""
        self._session = aiohttp.ClientSession(
            # no limit for connections: a cancellation must not wait until other calls have got their answers
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )
        try:
            answer = await self._call("GET", f"{REQUESTS}/-", within_s=0)
            check_access(answer.status, answer.document)
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def publish(self, outgoing: OutgoingRequest) -> None:
        if not outgoing.id.strip("."):
            raise InvalidArgument("message_id: over HTTP it has another character than dots")
        if outgoing.content is not None:
            outgoing.message.body, outgoing.content = await asyncio.to_thread(outgoing.content.read), None
        if self._tracing is not None:
            self._tracing.carry(outgoing.message)
        answer = await self._call(
            "POST",
            REQUESTS,
            within_s=outgoing.publish_within_s,
            absent_within_s=outgoing.absent_within_s,
            full_within_s=outgoing.full_within_s,
            headers=headers_of(outgoing),
            body=body_of(outgoing.message),
        )
        check_accepted(answer.status, answer.body)

    async def answer(self, outgoing: OutgoingRequest) -> Final:
        async with asyncio.timeout_at(outgoing.end):
            await self.publish(outgoing)
            return await self._wait_for_result(outgoing)

    async def replies(self, outgoing: OutgoingRequest) -> AsyncGenerator[Sequence[Part | Final], None]:
        async with asyncio.timeout_at(outgoing.end):
            await self.publish(outgoing)
        seq = 0
        async with aclosing(self._events(outgoing)) as events:
            while True:
                async with asyncio.timeout_at(outgoing.end):
                    event = await anext(events, None)
                if event is None:
                    break
                outgoing.end = time_in(outgoing.timeout_s)
                match event.kind:
                    case "event":
                        yield [Part(kind="event", seq=seq, body=event.data)]
                        seq += 1
                    case "restart":
                        yield [Part(kind="restart", seq=0, body=event.data)]
                        seq = 1
                    case "completed" | "failed" | "cancelled":
                        yield [final_of_status(outgoing.id, 200, event.data)]
                        return
                    case _:
                        pass  # a report about the request's progress
        async with asyncio.timeout_at(outgoing.end):
            final = await self._wait_for_result(outgoing)
        yield [final]

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        _refuse_tenant(tenant)
        return await until_ended(partial(self._fetch_result, id), end=end)

    async def results(self, ids: Sequence[str], *, tenant: str | None) -> Mapping[str, Found]:
        _refuse_tenant(tenant)
        found: dict[str, Found] = {}
        left = list(dict.fromkeys(ids))
        while left:
            some, left = left[:FETCHED_AT_ONCE], left[FETCHED_AT_ONCE:]
            found |= zip(some, await asyncio.gather(*map(self._found, some)), strict=True)
        return found

    async def _found(self, id: str) -> Found:
        try:
            return await self._fetch_result(id, 0)
        except (Problem, NotEnded) as error:
            return error
        except ControlRefused as error:
            if error.fields.get("status") != GONE:
                raise
            return lost_answer(id, str(error))  # one lost answer must not hide all others

    async def group(self, id: str, *, tenant: str | None) -> Mapping[str, Any]:
        return await self._about_group("GET", id, tenant)

    async def cancel_group(self, id: str, *, tenant: str | None) -> Mapping[str, Any]:
        return await self._about_group("DELETE", id, tenant)

    async def _about_group(self, method: str, id: str, tenant: str | None) -> Mapping[str, Any]:
        _refuse_tenant(tenant)
        answer = await self._call(method, f"{GROUPS}/{quote(id, safe='')}", within_s=CONTROL_WITHIN_S)
        document = answer.document
        check_access(answer.status, document)
        if answer.status == 404:
            return {"id": id, "status": "unknown", "counts": dict.fromkeys(_COUNTS, 0)}
        if answer.status >= 300:
            raise ControlRefused(document or {"status": answer.status, "detail": f"answered {answer.status}"})
        if "counts" not in document:
            raise no_gateway(answer.status)
        return document

    async def group_results(
        self, id: str, *, tenant: str | None, told: set[str]
    ) -> AsyncGenerator[tuple[str, Outcome], None]:
        held = bytearray()
        async with self._streamed(f"{GROUPS}/{quote(id, safe='')}/results", {}) as response:
            if response.status != 200:
                status, body = response.status, await _read(response)
                check_access(status, document_of(body))
                raise ControlRefused(document_of(body) or {"status": status, "detail": f"answered {status}"})
            async for chunk in response.content.iter_any():
                held += chunk
                *lines, rest = held.split(b"\n")
                held = rest
                if len(held) > LARGEST_BYTES:
                    raise BrokerUnreachable(f"a line of more than {LARGEST_BYTES} bytes: no gateway sends that")
                for line in lines:
                    each = str(document_of(bytes(line)).get("id"))
                    if each not in told:
                        yield each, _outcome(each, bytes(line))

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        _refuse_tenant(tenant)
        return await self._cancel(id, within_s=CONTROL_WITHIN_S)

    async def send_cancellation(self, id: str, *, tenant: str | None, within_s: float) -> None:
        for failures in count():
            try:
                await self._cancel(id, within_s=within_s)
                return
            except ControlRefused as error:
                if error.fields.get("status") != 404:
                    raise
            # 404: the request may have been posted a moment ago, so try again; the caller sets the time limit
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S))

    async def depth(self, lane: str) -> Depth | None:
        return None

    async def _cancel(self, id: str, *, within_s: float) -> Cancelled:
        answer = await self._call("DELETE", _path(id), within_s=within_s)
        document = answer.document
        check_access(answer.status, document)
        if answer.status >= 300:
            raise ControlRefused(document or {"status": answer.status, "detail": f"answered {answer.status}"})
        if "outcome" not in document:
            raise no_gateway(answer.status)
        outcome: Cancelled = document["outcome"]
        return outcome

    async def _fetch_result(self, id: str, left_s: float | None) -> Final:
        waits_s = WAIT_S if left_s is None else min(WAIT_S, left_s)
        within_s = AWAY_S if left_s is None else min(CONTROL_WITHIN_S, left_s)
        path = _path(id)
        if waits_s > 0:
            path += f"?wait={waits_s:.3f}s"
        answer = await self._call("GET", path, within_s=within_s, waits_s=waits_s)
        return final_of_status(id, answer.status, answer.body)

    async def _wait_for_result(self, outgoing: OutgoingRequest) -> Final:

        async def ask(left_s: float | None) -> Final:
            try:
                return await self._fetch_result(outgoing.id, left_s)
            except NotEnded as error:
                if error.status == "unknown":  # the gateway lost its record: post again, under the same id
                    await self.publish(outgoing)
                raise

        try:
            return await until_ended(ask, end=outgoing.end)
        except NotEnded:
            raise TimeoutError from None
        except AccessRefused:
            raise
        except (BrokerError, ControlRefused) as error:
            raise ReplyLost(f"the result could not be fetched: {error}; `result` can fetch it later") from error

    async def _events(self, outgoing: OutgoingRequest) -> "AsyncGenerator[Event, None]":
        """Each event once: a lost stream continues after the last one received. Raises ReplyLost."""
        last = ""
        failures = 0
        lost_at: float | None = None
        loop = asyncio.get_running_loop()
        path = f"{_path(outgoing.id)}/events"
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
            try:
                async with self._streamed(path, headers) as response:
                    if response.status != 200:
                        return  # such as a lost record; the caller asks for the result next, whose error says why
                    reading = Events()
                    async for chunk in response.content.iter_any():
                        failures, lost_at = 0, None
                        for event in reading.read(chunk):
                            last = event.id
                            yield event
            except BrokerUnreachable as error:
                lost_at = loop.time() if lost_at is None else lost_at
                if outgoing.end is None and loop.time() > lost_at + AWAY_S:
                    raise ReplyLost(f"the connection was lost: {error}; `result` can fetch the answer") from error
            except EventTooLarge as error:
                raise ReplyLost(f"{error}; `result` can fetch the answer") from error
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S))
            failures += 1

    async def _call(
        self,
        method: str,
        path: str,
        *,
        within_s: float,
        absent_within_s: float | None = None,
        full_within_s: float = 0,
        waits_s: float = 0,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> HttpAnswer:
        """Repeated until there is an answer, for at most `within_s`; `absent_within_s` while no gateway can be reached;
        `full_within_s` while the lane is full. `waits_s`: how long the gateway is asked to wait, not included in these.
        Raises PublishRefused, BrokerUnreachable, ConfirmUnknown (it may have been carried out)."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        failures = 0
        maybe_published = False
        while True:
            timeout_s = min(ANSWERED_WITHIN_S, max(1.0, began + within_s - loop.time())) + waits_s
            wait_s = pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S)
            error: BrokerError | None
            try:
                answer = await self._call_once(method, path, timeout_s, headers, body)
                if answer.retry_after_s is not None:
                    wait_s = max(wait_s, answer.retry_after_s)
                if (error := _error_of(method, answer, self._address)) is None:
                    self.trouble = None
                    return answer
            except ClientMisused as misused:
                misused.maybe_published = maybe_published
                raise
            except BrokerError as caught:
                error = caught
            maybe_published = error.maybe_published = maybe_published or error.maybe_published
            end = began + within_s
            if isinstance(error, PublishRefused):
                wait_s = max(wait_s, error.retry_after_s)
                end = min(end, began + full_within_s)
            else:
                self.trouble = str(error)
                if absent_within_s is not None and not maybe_published:
                    end = min(end, began + absent_within_s)
            if loop.time() + wait_s > end or isinstance(error.__cause__, aiohttp.ClientSSLError):
                raise error
            failures += 1
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _streamed(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body is read while it arrives. Raises BrokerUnreachable, also from the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWERED_WITHIN_S, sock_read=SILENT_S)
        async with self._response("GET", path, timeout, headers, None) as response:
            if response.status >= 500:
                raise BrokerUnreachable(f"the gateway at {self._address} answered {response.status}")
            yield response

    async def _call_once(
        self, method: str, path: str, timeout_s: float, headers: Mapping[str, str] | None, body: bytes | None
    ) -> HttpAnswer:
        if body is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        else:
            timeout = aiohttp.ClientTimeout(total=timeout_s + len(body) / SLOWEST_BYTES_S)
        async with self._response(method, path, timeout, headers, body) as response:
            return HttpAnswer(response.status, await _read(response), seconds_of(response.headers.get("retry-after")))

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None,
        body: bytes | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """aiohttp's errors, also from the block, become BrokerUnreachable (for a GET, or without a connection) or
        ConfirmUnknown."""
        if self._session is None or self._session.closed:
            raise ClientMisused(f"the client of the gateway at {self._address} is not open: use it inside `async with`")
        try:
            async with self._session.request(
                method, self._address + path, headers=headers, data=body, timeout=timeout, allow_redirects=False
            ) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = f"no connection to the gateway at {self._address}: {str(error) or type(error).__name__}"
            raise BrokerUnreachable(why) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"the gateway at {self._address} did not answer: {str(error) or type(error).__name__}"
            raise (BrokerUnreachable if method == "GET" else ConfirmUnknown)(why) from error


def _path(id: str) -> str:
    if not isinstance(id, str) or not is_request_id(id) or not id.strip("."):  # `.` and `..` would name another path
        raise _refused(f"the request's id: {REQUEST_ID}")
    return f"{REQUESTS}/{quote(id, safe='')}"


def _refuse_tenant(tenant: str | None) -> None:
    if tenant:
        raise _refused("tenant: over HTTP it follows from the key, and cannot be named")


def _refused(detail: str) -> ControlRefused:
    return ControlRefused({"code": "invalid_request", "status": 400, "detail": detail})


# ---- a request as an HTTP call ---------------------------------------------------------------------------------------


def headers_of(outgoing: OutgoingRequest) -> dict[str, str]:
    """Raises Problem for options that a gateway does not accept."""
    message = outgoing.message
    if message.priority != PRIORITY:
        raise _invalid(f"priority: found {message.priority}; over HTTP only {PRIORITY} is available")
    if n.TENANT in message.headers:
        raise _invalid("tenant: over HTTP it follows from the key, and cannot be named")
    found = {
        "content-type": "application/json",
        IDEMPOTENCY_KEY: outgoing.id,
        n.LANE_NAME: outgoing.key.partition(".")[0],
    }
    if message.type is not None:
        found[n.TYPE] = message.type
    for name, value in message.headers.items():
        if name == n.STREAM:
            continue  # over HTTP, the body has the field `stream`
        if not name.startswith(PREFIX) and name not in CARRIED:
            raise _invalid(f"header {name}: not passed on over HTTP")
        found[name] = _text(name, value)
    for name, text in found.items():
        if not (text.isprintable() and _TOKEN.fullmatch(name)):
            raise _invalid(f"header {name[:100]!r}: has a line break, or another character that HTTP does not allow")
    return found


def body_of(message: Message) -> bytes:
    """With `"stream": true` if the parts are wanted; Problem if the body says the contrary."""
    if not message.headers.get(n.STREAM):
        return message.body
    try:
        found = json.loads(message.body)
    except (ValueError, RecursionError):
        return message.body  # the gateway's error says what is wrong with it
    if not isinstance(found, dict) or found.get("stream") is True:
        return message.body
    if "stream" in found:
        raise _invalid(f"stream: found {found['stream']!r}, and the parts are asked for")
    begin, _, rest = message.body.partition(b"{")  # all other bytes stay as the caller gave them
    return b'%b{"stream":true%b%b' % (begin, b"," if found else b"", rest)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return value.decode("ascii") if isinstance(value, bytes) else str(value)
    except ValueError as error:  # such as an integer of more than 4300 digits
        raise _invalid(f"header {name}: cannot be written: {error}") from error


def _invalid(detail: str) -> Problem:
    return Problem({"code": "invalid_request", "status": 400, "detail": detail})


# ---- answers as values and errors ------------------------------------------------------------------------------------


def check_accepted(status: int, body: bytes) -> None:
    """Raises Problem if the gateway refuses the request, AccessRefused if it refuses the key, TopologyMismatch if there
    is no gateway at this address."""
    document = document_of(body)
    if status < 300 and "id" in document:
        return
    check_access(status, document)
    if status < 400 or (status in (404, 405) and document.get("code") not in PROBLEMS):
        raise no_gateway(status, str(document.get("detail", "")))
    code = "too_large" if status == 413 else "invalid_request"
    raise Problem({"code": code, "status": status, **document})


def no_gateway(status: int, detail: str = "") -> TopologyMismatch:
    """Such as the page of a proxy that wants a login, with status 200."""
    return TopologyMismatch(
        f"answered {status}: no requests are taken at this address; is it a gateway's, of a version that has "
        f"{REQUESTS}? {detail}"
    )


def check_access(status: int, document: Mapping[str, Any]) -> None:
    """AccessRefused, unless the code is in `PROBLEMS`: then it concerns this request, not the key."""
    if status == 401 or (status == 403 and document.get("code") not in PROBLEMS):
        raise AccessRefused(f"the gateway answered {status}: {document.get('detail', 'no detail')}")


def final_of_status(id: str, status: int, body: bytes) -> Final:
    """The answer to `GET /v1/requests/{id}`. Raises Problem, NotEnded, AccessRefused, ControlRefused."""
    document = document_of(body)
    check_access(status, document)
    if status == 404:
        raise NotEnded(id, "unknown")
    if status != 200:
        raise ControlRefused(document or {"status": status, "detail": f"the gateway answered {status}"})
    headers = {name: document[field] for field, name in _FIELDS.items() if field in document}
    headers[n.REQUEST_ID] = document.get("id", id)
    if "webhook" in document:
        headers[n.WEBHOOK_LOG] = json.dumps(document["webhook"])
    if "result" in document:
        return final_of(Message(body=_member_bytes(body, "result"), headers={**headers, n.STATUS: "ok"}))
    if isinstance(problem := document.get("problem"), dict):
        return final_of(Message(body=json.dumps(problem).encode(), headers=headers))
    if "status" not in document:
        raise no_gateway(status)
    named = str(document["status"])
    attempts = int(document.get("attempts", 0))
    raise NotEnded(
        id, _STATUS.get(named, named), attempts=attempts, due_at=document.get("due_at"), step=document.get("step")
    )


def _outcome(id: str, line: bytes) -> Outcome:
    try:
        return final_of_status(id, 200, line)
    except Problem as problem:
        return problem


def _member_bytes(body: bytes, name: str) -> bytes:
    """Cut out of the text, because parsing the value and encoding it again could change its bytes."""
    text = body.decode()
    decode = json.JSONDecoder().raw_decode
    at = _skip_space(text, 0) + 1
    while True:
        key, at = decode(text, _skip_space(text, at))
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = decode(text, start)
        if key == name:
            return text[start:end].encode()
        at = _skip_space(text, end) + 1


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


# ---- calls -----------------------------------------------------------------------------------------------------------


def seconds_of(retry_after: str | None) -> float | None:
    """The seconds of a `retry-after`; None if it is absent or no whole number."""
    try:
        return min(RETRY_AFTER_CAP_S, max(0, int(retry_after or "")))
    except ValueError:
        return None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for chunk in response.content.iter_any():
        found += chunk
        if len(found) > LARGEST_BYTES:
            raise BrokerUnreachable(f"an answer of more than {LARGEST_BYTES} bytes: no gateway sends that")
    return bytes(found)


def _error_of(method: str, answer: HttpAnswer, address: str) -> BrokerError | None:
    """What an answer means if the same call may succeed later; None if it is final."""
    status = answer.status
    if status < 500 and status not in _TEMPORARY:
        return None
    found = answer.document
    if status == 429 and "code" in found:
        return None  # a worker or the gateway refused this one call; a repetition would not help
    why = f"the gateway at {address} answered {status}: {found.get('detail', 'no detail')}"
    if status == LANE_FULL and method == "POST":
        refused = PublishRefused(why)
        if answer.retry_after_s is not None:
            refused.retry_after_s = answer.retry_after_s
        return refused
    if status in _TEMPORARY or method == "GET":
        return BrokerUnreachable(why)
    return ConfirmUnknown(why)  # the gateway may have failed after it carried out the call


def document_of(body: bytes) -> Mapping[str, Any]:
    """A JSON object; empty if the body is something else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Event:
    """A Server-Sent Event. `id`: the latest in the stream."""

    kind: str
    data: bytes
    id: str


class EventTooLarge(ValueError):
    """More than `LARGEST_BYTES`."""


class Events:
    """Reads Server-Sent Events, as the HTML standard defines them, from chunks of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0
        self._id = ""

    def read(self, chunk: bytes) -> Iterator[Event]:
        self._rest += chunk
        if self._size + len(self._rest) > LARGEST_BYTES:
            raise EventTooLarge(f"an event of more than {LARGEST_BYTES} bytes")
        begin, at = 0, self._searched
        while (found := _LINE_END.search(self._rest, at)) is not None:
            line = bytes(self._rest[begin : found.start()])
            begin = at = found.end()
            if line:
                self._field(line)
            elif (event := self._event()) is not None:
                yield event
        del self._rest[:begin]
        self._searched = max(0, len(self._rest) - 1)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
                self._size += len(value) + 1
            case b"event":
                self._kind = value.decode(errors="replace")
            case b"id" if b"\0" not in value:
                self._id = value.decode(errors="replace")
            case _:
                pass  # a comment (empty name), or a field that the standard says to ignore

    def _event(self) -> Event | None:
        found = Event(self._kind or "message", b"\n".join(self._data), self._id) if self._data else None
        self._kind, self._data, self._size = "", [], 0
        return found
