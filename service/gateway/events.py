"""`GET /v1/requests/{id}/events`: a request's entries as Server-Sent Events, resumable on any gateway."""

from contextlib import aclosing

from aiohttp import web

from consumers.state.following import Entry
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.config.gateway_section import GatewayKey
from service.gateway.documents import refusal
from service.gateway.following import Following
from service.gateway.looking import Looking
from service.gateway.messages import EVENT_STREAM, Writing
from service.gateway.problems import ApiError
from service.gateway.requests import Requests
from service.side_tasks import beside

LAST_EVENT_ID = "Last-Event-ID"
BEGIN = b"retry: 1000\n\n"
"""How long a browser waits before it connects again."""
HEARTBEAT = b": waiting\n\n"
LARGEST_NUMBER = 1 << 53


class Events:
    """Writes the entries of one request to each reader."""

    def __init__(self, requests: Requests, following: Following, looking: Looking, *, ping_every_s: float) -> None:
        self._requests = requests
        self._following = following
        self._looking = looking
        self._ping_every_s = ping_every_s

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """204 where the reader has had the last event: a browser then stops asking."""
        id = request.match_info["id"]
        writing = Writing(request, id)
        try:
            after = number_of(request.headers.get(LAST_EVENT_ID))
            await self._requests.known(id, caller)
            if self._looking.closing.is_set():
                return _no_events_yet(id)
            async with (
                self._looking.following(),
                beside(writing.pings(every_s=self._ping_every_s, ping=HEARTBEAT), name=f"heartbeats {id}"),
                aclosing(self._following.entries(id, caller, after=after)) as entries,
            ):
                async for entry in entries:
                    await writing.write(event_of(entry) if writing.has_begun else BEGIN + event_of(entry))
        except ConnectionError:
            return writing.response
        except (ApiError, LanekeeperError) as error:
            if not writing.has_begun:
                return refusal(error, id)
            # the reader connects again, and hears then what is wrong
        if not writing.has_begun:
            return _no_events_yet(id) if self._looking.closing.is_set() else web.Response(status=204)
        return await writing.end()


def _no_events_yet(id: str) -> web.Response:
    """A stream without entries, from a process that stops. Its end makes a browser connect again; a 503 would end its
    EventSource for good."""
    headers = {"content-type": EVENT_STREAM, "cache-control": "no-store", "connection": "close", "request-id": id}
    return web.Response(body=BEGIN, headers=headers)


def number_of(text: str | None) -> int:
    """The number after which entries are wanted. Raises RequestProblem."""
    if not text:
        return 0
    if text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= LARGEST_NUMBER:
        return int(text)
    raise RequestProblem("invalid_request", f"header {LAST_EVENT_ID}: found {text[:20]!r}, allowed is an event's id")


def event_of(entry: Entry) -> bytes:
    """One event. Line breaks in JSON stand between values alone, and would end the field."""
    body = entry.body.replace(b"\r", b" ").replace(b"\n", b" ")
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (entry.number, entry.kind.encode(), body)
