"""Answers `/v1/requests`: clients submit a request, get its status, wait for its end, follow it, or cancel it."""

import re
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Final

from aiohttp import web

from lanekeeper.contract.problems import LanekeeperError, invalid_request
from service.config.gateway_section import GatewayKey
from service.gateway.answers import Answers
from service.gateway.bodies import Bodies
from service.gateway.call_reader import submitted_id_of
from service.gateway.documents import JSON, LargeStatus, answer, path_of
from service.gateway.error_answers import ABOUT_REQUEST
from service.gateway.polling import LARGEST_NUMBER, Poller
from service.gateway.problems import ApiError
from service.gateway.requests import Requests
from service.gateway.writing import EVENT_STREAM, event_stream, send_pieces
from service.side_tasks import beside

WAIT_AT_MOST_S: Final = 60.0
"""The highest value of `?wait=`, in seconds: proxies and clients seldom keep a call open for longer."""
LAST_EVENT_ID: Final = "Last-Event-ID"
BEGIN: Final = b"retry: 1000\n\n"
"""The first bytes of each event stream. They tell browsers to wait 1000 ms before they connect again."""
HEARTBEAT: Final = b": waiting\n\n"
_WAIT = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?)(?P<unit>ms|s|m)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(slots=True)
class RequestPaths:
    """The handlers of the path `/v1/requests` and of those below it. All of them raise ApiError, LanekeeperError."""

    requests: Requests
    poller: Poller
    _: KW_ONLY
    bodies: Bodies
    answers: Answers
    ping_every_s: float

    async def post(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `POST /v1/requests`: submit a request."""
        id, chose_id = submitted_id_of(request.headers)
        request[ABOUT_REQUEST] = id
        async with self.bodies.checked_call(request, caller, request_id=id, chose_id=chose_id, task="requests") as call:
            await self.requests.submit(call, caller)
        path = path_of(id)
        return answer({"id": id, "status_url": path, "events_url": f"{path}/events"}, status=202, Location=path)

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `GET /v1/requests/{id}` with the request's status, after waiting for its end if `?wait=` asks for
        it."""
        request[ABOUT_REQUEST] = id = request.match_info["id"]
        status = await self.requests.status(id, caller, wait_s=_wait_s(request.query.get("wait")))
        if not isinstance(status, LargeStatus):
            return answer(status)
        async with self.answers.fetched(status.result) as result:
            return await send_pieces(
                request,
                result.pieces(begin=status.begin, end=status.end),
                size=len(status.begin) + result.size + len(status.end),
                headers={"content-type": JSON, "cache-control": "no-store"},
            )

    async def delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `DELETE /v1/requests/{id}`: cancel a request."""
        request[ABOUT_REQUEST] = id = request.match_info["id"]
        outcome = await self.requests.cancel(id, caller)
        return answer({"id": id, "outcome": outcome}, status=200 if outcome == "ended" else 202)

    async def events(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `GET /v1/requests/{id}/events`: stream the request's entries (its stored steps and events) as
        Server-Sent Events, beginning after the entry that the header `Last-Event-ID` names. Answers 204 if that entry
        was the last one, because a browser does not connect again after a 204."""
        request[ABOUT_REQUEST] = id = request.match_info["id"]
        after = _number_of(request.headers.get(LAST_EVENT_ID))
        await self.requests.known(id, caller)
        if self.poller.closing.is_set():
            return _no_events_yet(id)
        writing = event_stream(request, id)
        try:
            async with (
                self.poller.following(),
                beside(writing.pings(HEARTBEAT, every_s=self.ping_every_s), name=f"heartbeats {id}"),
                aclosing(self.requests.entries(id, caller, after=after)) as entries,
            ):
                async for entry in entries:
                    head = b"id: %d\nevent: %b\ndata: " % (entry.number, entry.kind.encode())
                    if not writing.has_begun:
                        head = BEGIN + head
                    if not isinstance(entry.body, LargeStatus):
                        await writing.write(b"%b%b\n\n" % (head, _in_one_line(entry.body)))
                        continue
                    status = entry.body
                    async with self.answers.fetched(status.result) as result:
                        await writing.write_all(_event_of(head, result.pieces(begin=status.begin, end=status.end)))
        except ConnectionError:
            return writing.response
        except (ApiError, LanekeeperError):
            if not writing.has_begun:
                raise
            # The stream ends without its last entry. So the client connects again, and is then answered with the error.
        if writing.has_begun:
            return await writing.end()
        if self.poller.closing.is_set():
            return _no_events_yet(id)
        return web.Response(status=204, headers={"cache-control": "no-store"})


def _no_events_yet(id: str) -> web.Response:
    """The answer to a client that follows a request while the process stops: an event stream without events, which ends
    at once. When a stream ends, a browser connects again, and reaches another process; after a 503, the browser's
    EventSource would never connect again."""
    headers = {"content-type": EVENT_STREAM, "cache-control": "no-store", "connection": "close", "request-id": id}
    return web.Response(body=BEGIN, headers=headers)


def _wait_s(text: str | None) -> float:
    """Read `?wait=`: `20s`, `500ms`, `1m`; without a unit, seconds. Raises RequestProblem."""
    if text is None:
        return 0.0
    found = _WAIT.fullmatch(text)
    wait_s = float(found["number"]) * _UNITS[found["unit"] or "s"] if found else -1.0
    if not 0 <= wait_s <= WAIT_AT_MOST_S:
        raise invalid_request(f"parameter wait: found {text[:20]!r}, allowed are 0s to {WAIT_AT_MOST_S:g}s")
    return wait_s


def _number_of(text: str | None) -> int:
    """Read the header `Last-Event-ID`: the number of the last entry that the client has received; 0 if there is none.
    Raises RequestProblem."""
    if not text:
        return 0
    if text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= LARGEST_NUMBER:
        return int(text)
    raise invalid_request(f"header {LAST_EVENT_ID}: found {text[:20]!r}, allowed is an event's id")


async def _event_of(head: bytes, pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a Server-Sent Event: `head`, then `pieces` as the value of its field `data`."""
    yield head
    async for piece in pieces:
        yield _in_one_line(piece)
    yield b"\n\n"


def _in_one_line(json: bytes) -> bytes:
    """Replace line breaks by spaces, because they would end the event's field `data`. This does not change the JSON's
    values, because in JSON line breaks occur only between values."""
    return json.replace(b"\r", b" ").replace(b"\n", b" ")
