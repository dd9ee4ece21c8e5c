"""Requests over HTTP: a gateway's `/v1/requests`.

A request is posted, and followed by its id. So a lost connection, or a gateway that restarts, loses neither the request
nor a part of its answer: the next call may go to another gateway.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from lanekeeper.amqp.driver.backoff import pause_s
from lanekeeper.asking_again import until_ended
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable
from lanekeeper.errors import Cancelled, ControlRefused, NotEnded, ReplyLost
from lanekeeper.http.calls import FIRST_PAUSE_S, PAUSE_CAP_S, Calls
from lanekeeper.http.documents import final_of_status, see_that_it_may, see_that_it_was_accepted
from lanekeeper.http.events import Event, Events, EventTooLarge
from lanekeeper.http.posting import body_of, headers_of
from lanekeeper.replies import Final, Part
from lanekeeper.telemetry.tracing import Tracing
from lanekeeper.transport import Asked

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth

REQUESTS = "/v1/requests"
WAIT_S = 20.0
"""How long a call waits for the end of a request: shorter than proxies allow a call to be silent."""
CONTROL_WITHIN_S = 5.0
AWAY_S = 30.0
"""How long a gateway may be away while an answer without a deadline is waited for."""


class OverHttp:
    """The transport for `http://` and `https://`."""

    user = ""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        ssl_context: ssl.SSLContext | None,
        tracing: Tracing,
    ) -> None:
        """Raises ValueError if the URL cannot be a gateway's."""
        self._calls = Calls(url, api_key=api_key, ssl_context=ssl_context)
        self._tracing = tracing

    @property
    def trouble(self) -> str | None:
        return self._calls.trouble

    async def __aenter__(self) -> Self:
        """Raises BrokerUnreachable, AccessRefused."""
        await self._calls.__aenter__()
        try:
            answer = await self._calls.call("GET", f"{REQUESTS}/-", within_s=0)
            see_that_it_may(answer.status, answer.document)
        except BaseException:
            await self._calls.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._calls.__aexit__()

    async def publish(self, asked: Asked) -> None:
        _path(asked.id)
        if asked.content is not None:
            asked.message.body, asked.content = await asyncio.to_thread(asked.content.read), None
        self._tracing.carry(asked.message)
        answer = await self._calls.call(
            "POST",
            REQUESTS,
            within_s=asked.publish_within_s,
            absent_within_s=asked.absent_within_s,
            full_within_s=asked.full_within_s,
            headers=headers_of(asked),
            body=body_of(asked.message),
        )
        see_that_it_was_accepted(answer.status, answer.body)

    async def answer(self, asked: Asked) -> Final:
        async with asyncio.timeout_at(asked.end):
            await self.publish(asked)
            return await self._ended(asked)

    async def replies(self, asked: Asked) -> AsyncGenerator[Part | Final, None]:
        async with asyncio.timeout_at(asked.end):
            await self.publish(asked)
        seq = 0
        async with aclosing(self._events(asked)) as events:
            while True:
                async with asyncio.timeout_at(asked.end):
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
                        yield final_of_status(asked.id, 200, event.data)
                        return
                    case _:
                        pass  # what happens to the request meanwhile
        async with asyncio.timeout_at(asked.end):
            final = await self._ended(asked)
        yield final

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        _see_that_no_tenant_is_named(tenant)

        async def ask(left_s: float | None) -> Final:
            return await self._look(id, left_s)

        return await until_ended(ask, end=end)

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        _see_that_no_tenant_is_named(tenant)
        return await self._cancel(id, within_s=CONTROL_WITHIN_S)

    async def cancel_unheard(self, id: str, *, tenant: str | None, within_s: float) -> None:
        failures = 0
        while True:
            try:
                await self._cancel(id, within_s=within_s)
                return
            except ControlRefused as error:
                if error.fields.get("status") != 404:
                    raise
            # it may have been posted a moment ago; the caller bounds this
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S))
            failures += 1

    async def depth(self, lane: str) -> "Depth | None":
        """A gateway of this version does not tell it."""
        return None

    async def _cancel(self, id: str, *, within_s: float) -> Cancelled:
        answer = await self._calls.call("DELETE", _path(id), within_s=within_s)
        document = answer.document
        see_that_it_may(answer.status, document)
        if answer.status >= 300:
            raise ControlRefused(document or {"status": answer.status, "detail": f"answered {answer.status}"})
        outcome: Cancelled = document["outcome"]
        return outcome

    async def _look(self, id: str, left_s: float | None) -> Final:
        """One question for a result, which waits for it. Raises what `result` raises."""
        waits_s = WAIT_S if left_s is None else min(WAIT_S, left_s)
        within_s = AWAY_S if left_s is None else min(CONTROL_WITHIN_S, left_s)
        path = _path(id)
        if waits_s > 0:
            path += f"?wait={waits_s:.3f}s"
        answer = await self._calls.call("GET", path, within_s=within_s, waits_s=waits_s)
        return final_of_status(id, answer.status, answer.body)

    async def _ended(self, asked: Asked) -> Final:
        """Wait for the result of a request that was accepted. Raises Problem, AccessRefused, ReplyLost, TimeoutError at
        `asked.end`."""

        async def ask(left_s: float | None) -> Final:
            try:
                return await self._look(asked.id, left_s)
            except NotEnded as error:
                if error.status == "unknown":  # its record was lost; with the same id it is the same request
                    await self.publish(asked)
                raise

        try:
            return await until_ended(ask, end=asked.end)
        except NotEnded:
            raise TimeoutError from None
        except AccessRefused:
            raise
        except (BrokerError, ControlRefused) as error:
            raise ReplyLost(f"the result could not be fetched: {error}; `result` can fetch it later") from error

    async def _events(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """The request's events, each once, over as many connections as it takes. Raises ReplyLost, AccessRefused."""
        last = ""
        failures = 0
        lost_at: float | None = None
        loop = asyncio.get_running_loop()
        path = f"{_path(asked.id)}/events"
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
            try:
                async with self._calls.streamed(path, headers) as response:
                    see_that_it_may(response.status, {})
                    if response.status != 200:
                        return  # its record was lost; the result tells more
                    reading = Events()
                    async for chunk in response.content.iter_any():
                        failures, lost_at = 0, None
                        for event in reading.read(chunk):
                            last = event.id
                            yield event
            except BrokerUnreachable as error:
                lost_at = loop.time() if lost_at is None else lost_at
                if asked.end is None and loop.time() > lost_at + AWAY_S:
                    raise ReplyLost(f"the connection was lost: {error}; `result` can fetch the answer") from error
            except EventTooLarge as error:
                raise ReplyLost(f"{error}; `result` can fetch the answer") from error
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S))
            failures += 1


def _path(id: str) -> str:
    """The path of a request. Raises ControlRefused for an id that no request can have."""
    if not is_request_id(id) or not id.strip("."):  # a path of dots is another path
        raise ControlRefused({"code": "invalid_request", "status": 400, "detail": f"the request's id: {REQUEST_ID}"})
    return f"{REQUESTS}/{quote(id, safe='')}"


def _see_that_no_tenant_is_named(tenant: str | None) -> None:
    """Raises ControlRefused: over HTTP the tenant follows from the key."""
    if tenant:
        detail = "tenant: over HTTP it follows from the key, and cannot be named"
        raise ControlRefused({"code": "invalid_request", "status": 400, "detail": detail})
