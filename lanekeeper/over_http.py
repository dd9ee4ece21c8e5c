"""The client's transport over HTTP: calls to a gateway's `/v1/requests`.

A request is posted once; its events and its result are then fetched by its id. So neither the request nor a part of its
answer is lost if the connection breaks or the gateway restarts, and the next call may go to another gateway.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from lanekeeper.backoff import pause_s
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
    BrokerError,
    BrokerUnreachable,
    ReplyLost,
    TopologyMismatch,
)
from lanekeeper.errors import Cancelled, ControlRefused, NotEnded
from lanekeeper.http import FIRST_PAUSE_S, PAUSE_CAP_S, Calls, Event, Events, EventTooLarge, document_of
from lanekeeper.replies import Final, Part, Problem, final_of
from lanekeeper.requests import PRIORITY, OutgoingRequest, time_in, until_ended

if TYPE_CHECKING:
    from lanekeeper.amqp.connection import Depth
    from lanekeeper.telemetry.tracing import Tracing

REQUESTS = "/v1/requests"
WAIT_S = 20.0
"""Of one call; so short that proxies do not close the silent connection."""
CONTROL_WITHIN_S = 5.0
"""For a cancellation or a result, besides the time for which the gateway is asked to wait."""
AWAY_S = 30.0
"""Without a time limit of the caller: how long the gateway may be away."""
IDEMPOTENCY_KEY = "idempotency-key"
PREFIX = "x-lane-"
CARRIED = n.TRACE_CONTEXT | {n.ANTHROPIC_BETA}
_SPACE = re.compile(r"[ \t\r\n]*")
_STATUS = {"queued": "waiting", "delayed": "waiting", "retrying": "waiting", "running": "running"}
_FIELDS = {
    "lane": n.LANE_NAME, "model": n.MODEL, "provider": n.PROVIDER, "attempts": n.ATTEMPT, "wait_ms": n.WAIT_MS,
    "run_ms": n.RUN_MS, "replayed": n.REPLAYED,
}  # fmt: skip


class OverHttp:
    """How a `Client` with the URL of a gateway reaches the workers. The methods are those of `Client`; `answer` and
    `replies` (its `request` and `stream`) raise TimeoutError at `outgoing.end`."""

    user = ""

    def __init__(
        self, url: str, *, api_key: str | None, ssl_context: ssl.SSLContext | None, tracing: "Tracing | None"
    ) -> None:
        self._calls = Calls(url, api_key=api_key, ssl_context=ssl_context)
        self._tracing = tracing

    @property
    def trouble(self) -> str | None:
        return self._calls.trouble

    async def __aenter__(self) -> Self:
        """Checks that the gateway can be reached, and takes the key. Raises BrokerUnreachable and AccessRefused."""
        await self._calls.__aenter__()
        try:
            answer = await self._calls.call("GET", f"{REQUESTS}/-", within_s=0)
            check_access(answer.status, answer.document)
        except BaseException:
            await self._calls.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._calls.__aexit__()

    async def publish(self, outgoing: OutgoingRequest) -> None:
        _path(outgoing.id)
        if outgoing.content is not None:
            outgoing.message.body, outgoing.content = await asyncio.to_thread(outgoing.content.read), None
        if self._tracing is not None:
            self._tracing.carry(outgoing.message)
        answer = await self._calls.call(
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

    async def replies(self, outgoing: OutgoingRequest) -> AsyncGenerator[Part | Final, None]:
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
                        yield Part(kind="event", seq=seq, body=event.data)
                        seq += 1
                    case "restart":
                        yield Part(kind="restart", seq=0, body=b"{}")
                        seq = 1
                    case "completed" | "failed" | "cancelled":
                        yield final_of_status(outgoing.id, 200, event.data)
                        return
                    case _:
                        pass  # a report about the request's progress
        async with asyncio.timeout_at(outgoing.end):
            final = await self._wait_for_result(outgoing)
        yield final

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        _refuse_tenant(tenant)
        return await until_ended(partial(self._fetch_result, id), end=end)

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        _refuse_tenant(tenant)
        return await self._cancel(id, within_s=CONTROL_WITHIN_S)

    async def send_cancellation(self, id: str, *, tenant: str | None, within_s: float) -> None:
        failures = 0
        while True:
            try:
                await self._cancel(id, within_s=within_s)
                return
            except ControlRefused as error:
                if error.fields.get("status") != 404:
                    raise
            # 404: the request may have been posted a moment ago, so try again; the caller sets the time limit
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S))
            failures += 1

    async def depth(self, lane: str) -> "Depth | None":
        return None

    async def _cancel(self, id: str, *, within_s: float) -> Cancelled:
        answer = await self._calls.call("DELETE", _path(id), within_s=within_s)
        document = answer.document
        check_access(answer.status, document)
        if answer.status >= 300:
            raise ControlRefused(document or {"status": answer.status, "detail": f"answered {answer.status}"})
        outcome: Cancelled = document["outcome"]
        return outcome

    async def _fetch_result(self, id: str, left_s: float | None) -> Final:
        """Ask once; the gateway answers at the end, or after `WAIT_S` or `left_s`."""
        waits_s = WAIT_S if left_s is None else min(WAIT_S, left_s)
        within_s = AWAY_S if left_s is None else min(CONTROL_WITHIN_S, left_s)
        path = _path(id)
        if waits_s > 0:
            path += f"?wait={waits_s:.3f}s"
        answer = await self._calls.call("GET", path, within_s=within_s, waits_s=waits_s)
        return final_of_status(id, answer.status, answer.body)

    async def _wait_for_result(self, outgoing: OutgoingRequest) -> Final:
        """Raises Problem, AccessRefused, ReplyLost, TimeoutError at `outgoing.end`."""

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

    async def _events(self, outgoing: OutgoingRequest) -> AsyncGenerator[Event, None]:
        """Each event once: a lost stream continues after the last one received. Raises ReplyLost, AccessRefused."""
        last = ""
        failures = 0
        lost_at: float | None = None
        loop = asyncio.get_running_loop()
        path = f"{_path(outgoing.id)}/events"
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
            try:
                async with self._calls.streamed(path, headers) as response:
                    check_access(response.status, {})
                    if response.status != 200:
                        return  # the gateway lost its record; the caller asks for the result next
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


def _path(id: str) -> str:
    """Raises ControlRefused for an id that no request can have."""
    if not isinstance(id, str) or not is_request_id(id) or not id.strip("."):  # `.` and `..` would name another path
        raise _refused(f"the request's id: {REQUEST_ID}")
    return f"{REQUESTS}/{quote(id, safe='')}"


def _refuse_tenant(tenant: str | None) -> None:
    """Over HTTP it follows from the key."""
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
    if outgoing.tenant is not None or n.TENANT in message.headers:
        raise _invalid("tenant: over HTTP it follows from the key, and cannot be named")
    found = {
        "content-type": "application/json",
        IDEMPOTENCY_KEY: outgoing.id,
        n.LANE_NAME: outgoing.key.partition(".")[0],
    }
    for name, value in message.headers.items():
        if name == n.STREAM:
            continue  # over HTTP, the body has the field `stream`
        if not name.startswith(PREFIX) and name not in CARRIED:
            raise _invalid(f"header {name}: not passed on over HTTP")
        found[name] = text = _text(value)
        if not text.isprintable() or (isinstance(value, bytes) and not value.isascii()):
            raise _invalid(f"header {name}: has a line break, or another character that HTTP does not allow")
    return found


def body_of(message: Message) -> bytes:
    """With `"stream": true` if the parts are wanted; Problem if the body says the contrary."""
    if not message.headers.get(n.STREAM):
        return message.body
    try:
        found = json.loads(message.body)
    except ValueError:
        return message.body  # the gateway's error says what is wrong with it
    if not isinstance(found, dict) or found.get("stream") is True:
        return message.body
    if "stream" in found:
        raise _invalid(f"stream: found {found['stream']!r}, and the parts are asked for")
    begin, _, rest = message.body.partition(b"{")  # all other bytes stay as the caller gave them
    return b'%b{"stream":true%b%b' % (begin, b"," if found else b"", rest)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _invalid(detail: str) -> Problem:
    return Problem({"code": "invalid_request", "status": 400, "detail": detail})


# ---- answers as values and errors ------------------------------------------------------------------------------------


def check_accepted(status: int, body: bytes) -> None:
    """Raises Problem if the gateway refuses the request, AccessRefused if it refuses the key, TopologyMismatch if there
    is no gateway at this address."""
    if status < 300:
        return
    document = document_of(body)
    check_access(status, document)
    if status < 400 or (status in (404, 405) and document.get("code") not in PROBLEMS):
        raise TopologyMismatch(
            f"answered {status}: no requests are taken at this address; is it a gateway's, of a version that has "
            "/v1/requests? " + str(document.get("detail", ""))
        )
    code = "too_large" if status == 413 else "invalid_request"
    raise Problem({"code": code, "status": status, **document})


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
    if "result" in document:
        return final_of(Message(body=_member_bytes(body, "result"), headers={**headers, n.STATUS: "ok"}))
    if isinstance(problem := document.get("problem"), dict):
        raise Problem(problem)
    named = str(document.get("status"))
    attempts = int(document.get("attempts", 0))
    raise NotEnded(id, _STATUS.get(named, named), attempts=attempts, due_at=document.get("due_at"))


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
