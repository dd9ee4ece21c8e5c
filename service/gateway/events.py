"""Answers `GET /v1/requests/{id}/events`: streams a request's progress as Server-Sent Events, resumable on any
gateway."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass

from aiohttp import web

from consumers.state.following import Entry
from lanekeeper.contract.problems import LanekeeperError, invalid_request
from service.config.gateway_section import GatewayKey
from service.gateway.answers import Answer, Answers
from service.gateway.documents import refusal
from service.gateway.following import Following, LargeEnd
from service.gateway.messages import EVENT_STREAM, event_stream
from service.gateway.problems import ApiError
from service.side_tasks import beside

LAST_EVENT_ID = "Last-Event-ID"
BEGIN = b"retry: 1000\n\n"
"""The first bytes of each event stream. They tell browsers to wait 1000 ms before they connect again."""
HEARTBEAT = b": waiting\n\n"
LARGEST_NUMBER = 1 << 53


@dataclass(slots=True)
class Events:
    """Answers `GET /v1/requests/{id}/events`: streams a request's entries (its stored events, such as a change of
    status or a part of the answer) to a client as Server-Sent Events."""

    following: Following
    _: KW_ONLY
    answers: Answers
    ping_every_s: float

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Stream the entries after the one that the header `Last-Event-ID` names. Answers 204 if that was the last
        entry: a browser then does not connect again."""
        id = request.match_info["id"]
        writing = event_stream(request, id)
        try:
            after = number_of(request.headers.get(LAST_EVENT_ID))
            await self.following.requests.known(id, caller)
            if self.following.looking.closing.is_set():
                return _no_events_yet(id)
            async with (
                self.following.looking.following(),
                beside(writing.pings(every_s=self.ping_every_s, ping=HEARTBEAT), name=f"heartbeats {id}"),
                aclosing(self.following.entries(id, caller, after=after)) as entries,
            ):
                async for entry in entries:
                    begin = b"" if writing.has_begun else BEGIN
                    if isinstance(entry, Entry):
                        await writing.write(begin + event_of(entry))
                    else:
                        async with self.answers.fetched(entry.result) as result:
                            await writing.write_all(large_event(entry, result, begin=begin))
        except ConnectionError:
            return writing.response
        except (ApiError, LanekeeperError) as error:
            if not writing.has_begun:
                return refusal(error, id)
            # The stream ends without its last entry. The reader connects again, and gets the error then.
        if not writing.has_begun:
            no_more = web.Response(status=204, headers={"cache-control": "no-store"})
            return _no_events_yet(id) if self.following.looking.closing.is_set() else no_more
        return await writing.end()


def _no_events_yet(id: str) -> web.Response:
    """The answer of a process that stops: an event stream without events. When it ends, a browser connects again, and
    reaches another process; after a 503 its EventSource would never connect again."""
    headers = {"content-type": EVENT_STREAM, "cache-control": "no-store", "connection": "close", "request-id": id}
    return web.Response(body=BEGIN, headers=headers)


def number_of(text: str | None) -> int:
    """Read the header `Last-Event-ID`: the number of the last entry that the client has received; 0 if there is none.
    Raises RequestProblem."""
    if not text:
        return 0
    if text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= LARGEST_NUMBER:
        return int(text)
    raise invalid_request(f"header {LAST_EVENT_ID}: found {text[:20]!r}, allowed is an event's id")


def event_of(entry: Entry) -> bytes:
    """Convert an entry of a request's progress (a step or a part of its answer) to a Server-Sent Event."""
    return b"%b%b\n\n" % (_head(entry), _in_one_line(entry.body))


async def large_event(entry: LargeEnd, result: Answer, *, begin: bytes) -> AsyncGenerator[bytes, None]:
    """The Server-Sent Event for the last entry of a request with a large result, in pieces. `begin`: bytes to send
    before the event."""
    yield begin + _head(entry) + _in_one_line(entry.text)
    async for piece in result.pieces():
        yield _in_one_line(piece)
    yield entry.end + b"\n\n"


def _head(entry: Entry | LargeEnd) -> bytes:
    return b"id: %d\nevent: %b\ndata: " % (entry.number, entry.kind.encode())


def _in_one_line(json: bytes) -> bytes:
    """Replace line breaks by spaces, because they would end the event's field `data`. In JSON they occur only between
    values."""
    return json.replace(b"\r", b" ").replace(b"\n", b" ")
