"""The client's transport over HTTP: calls to a gateway's `/v1/requests`.

A request is posted once; its events and its result are then fetched by its id. So neither the request nor a part of its
answer is lost if the connection breaks or the gateway restarts, and the next call may go to another gateway.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from lanekeeper.amqp.driver.backoff import pause_s
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, ReplyLost
from lanekeeper.errors import Cancelled, ControlRefused, NotEnded
from lanekeeper.http.calls import FIRST_PAUSE_S, PAUSE_CAP_S, Calls
from lanekeeper.http.documents import check_accepted, check_access, final_of_status
from lanekeeper.http.events import Event, Events, EventTooLarge
from lanekeeper.http.posting import body_of, headers_of
from lanekeeper.replies import Final, Part
from lanekeeper.telemetry.tracing import Tracing
from lanekeeper.transport import OutgoingRequest, until_ended

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth

REQUESTS = "/v1/requests"
WAIT_S = 20.0
"""For how many seconds one HTTP call waits for a request to end. The time is short enough that proxies do not close the
silent connection."""
CONTROL_WITHIN_S = 5.0
"""The time limit, in seconds, for a call that cancels a request or reads its result, in addition to the time for which
the call asks the gateway to wait."""
AWAY_S = 30.0
"""If a client waits for an answer without a time limit, and the gateway cannot be reached for this many seconds, the
client gives up."""


class OverHttp:
    """The `Transport` of a `Client` with the URL of a gateway: `http://` or `https://`."""

    user = ""

    def __init__(self, url: str, *, api_key: str | None, ssl_context: ssl.SSLContext | None, tracing: Tracing) -> None:
        """`url`: the gateway's address. `api_key`: sent with each call. Raises ValueError if no gateway can have this
        URL."""
        self._calls = Calls(url, api_key=api_key, ssl_context=ssl_context)
        self._tracing = tracing

    @property
    def trouble(self) -> str | None:
        return self._calls.trouble

    async def __aenter__(self) -> Self:
        """Open an HTTP session, and check with one call that the gateway can be reached and accepts the API key. Raises
        BrokerUnreachable, AccessRefused."""
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
        """Always None: a gateway of this version does not report the length of queues."""
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
        """Ask the gateway for a request's result once. The gateway answers when the request has ended, or after
        `WAIT_S` or `left_s`, whichever is shorter. Raises the errors of `result`."""
        waits_s = WAIT_S if left_s is None else min(WAIT_S, left_s)
        within_s = AWAY_S if left_s is None else min(CONTROL_WITHIN_S, left_s)
        path = _path(id)
        if waits_s > 0:
            path += f"?wait={waits_s:.3f}s"
        answer = await self._calls.call("GET", path, within_s=within_s, waits_s=waits_s)
        return final_of_status(id, answer.status, answer.body)

    async def _wait_for_result(self, outgoing: OutgoingRequest) -> Final:
        """Wait for the result of a request that was accepted. Raises Problem, AccessRefused, ReplyLost, TimeoutError at
        `outgoing.end`."""

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
        """Yield each event of a request's event stream once. A lost connection is opened again, and the stream
        continues after the last event received. Raises ReplyLost, AccessRefused."""
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
    """The URL path of the request with this id. Raises ControlRefused for an id that no request can have."""
    if not is_request_id(id) or not id.strip("."):  # `.` and `..` would name another path
        raise _refused(f"the request's id: {REQUEST_ID}")
    return f"{REQUESTS}/{quote(id, safe='')}"


def _refuse_tenant(tenant: str | None) -> None:
    """Raise ControlRefused if a tenant is given: over HTTP, the gateway derives it from the API key."""
    if tenant:
        raise _refused("tenant: over HTTP it follows from the key, and cannot be named")


def _refused(detail: str) -> ControlRefused:
    return ControlRefused({"code": "invalid_request", "status": 400, "detail": detail})
