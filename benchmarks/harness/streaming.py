"""Streams for measurements: a provider that sends events at a fixed rate, readers that note when they came, and between
them the shortest proxy that can be written with aiohttp.

Each event of content carries the time at which it was sent (CLOCK_MONOTONIC, which all processes of a machine share),
so a reader knows how late it is. All are minimal, because they share the cores with what is measured.

    python -m benchmarks.harness.streaming provide PORT
    python -m benchmarks.harness.streaming forward PORT URL
    python -m benchmarks.harness.streaming read SPEC        (a `Reading` as JSON; prints a `Read` as JSON)
"""

import asyncio
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final, cast
from urllib.parse import urlsplit

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.harness.load import MODEL
from benchmarks.harness.requesters import HEADERS
from tests.support.private_broker import LOOPBACK

_WANTED: Final = re.compile(rb"rate=(\d+) events=(\d+)")
_SENT: Final = re.compile(rb'"text":\s*"@([\d.]+) ')
_MARK: Final = b'"text_delta"'
_KEPT: Final = 40
"""So many bytes of a piece are looked at again with the next: a mark may be cut."""
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nrequest-id: req_1\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_MESSAGE: Final[dict[str, Any]] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": [], "stop_reason": None,
    "stop_sequence": None, "usage": {"input_tokens": 25, "output_tokens": 1},
}  # fmt: skip


def body(*, rate: int, events: int) -> bytes:
    prompt = f"rate={rate} events={events} Tell me what a lane is."
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"model": MODEL, "max_tokens": 2000, "stream": True, "messages": messages}).encode()


def _chunk(*events: dict[str, Any]) -> bytes:
    data = b"".join(
        b"event: %b\ndata: %b\n\n" % (each["type"].encode(), json.dumps(each, separators=(",", ":")).encode())
        for each in events
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


_BEGIN: Final = _HEAD + _chunk(
    {"type": "message_start", "message": _MESSAGE},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
)
_END: Final = (
    _chunk(
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 500},
        },
        {"type": "message_stop"},
    )
    + b"0\r\n\r\n"
)


class Providing(asyncio.Protocol):
    """A connection to the provider."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, given = self._buffer.partition(b"\r\n\r\n")
        size = re.search(rb"content-length: *(\d+)", head.lower())
        if separator and size is not None and len(given) >= int(size[1]) and (asked := _WANTED.search(given)):
            self._buffer = b""
            self._transport.write(_BEGIN)
            self._every_s, left = 1 / int(asked[1]), int(asked[2])
            self._next(self._loop.time() + self._every_s, left)

    def _next(self, at_s: float, left: int) -> None:
        self._loop.call_at(at_s, self._send, at_s, left)

    def _send(self, at_s: float, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(_END)
            return
        event = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
            b'"text":"@%.6f lanes"}}\n\n' % time.monotonic()
        )
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        self._next(at_s + self._every_s, left - 1)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which streams to read: all begin together."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    streams: int
    rate: int
    events: int
    count_at: float
    """The time (CLOCK_MONOTONIC) at which to note how many events have been read."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """What was read. `first_ms`: from the call to the first event of content; `late_ms`: the last such event."""

    early: int
    """How many events had been read at the time `count_at`."""
    first_ms: list[float]
    late_ms: list[float]


class Noted:
    """What came of one stream."""

    all: ClassVar[list["Noted"]] = []

    def __init__(self) -> None:
        self.all.append(self)
        self.began_s = time.monotonic()
        self.first_s = self.late_s = 0.0
        self.count = 0
        self._rest = b""

    def add(self, data: bytes) -> None:
        now_s = time.monotonic()
        data = self._rest + data
        self.count += data.count(_MARK)
        if found := _SENT.findall(data):
            self.late_s = now_s - float(found[-1])
            self.first_s = self.first_s or now_s
        self._rest = data[max(data.rfind(_MARK) + len(_MARK), len(data) - _KEPT) :] if self.count else b""


class Calling(asyncio.Protocol):
    """An HTTP call that reads one stream."""

    def __init__(self, call: bytes) -> None:
        self._call = call
        self.came = b""
        self.noted = Noted()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._call)

    def data_received(self, data: bytes) -> None:
        self.noted.add(data)
        self.came = (self.came + data)[-1000:]
        if self.came.endswith(b"\r\n0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"broke off: {exc} {self.came[:500]!r}"))


async def over_http(given: Reading) -> list[Noted]:
    at, content = urlsplit(given.url), body(rate=given.rate, events=given.events)
    lines = [f"{name}: {value}" for name, value in {**HEADERS, **given.headers}.items()]
    head = "\r\n".join(
        ["POST /v1/messages HTTP/1.1", f"host: {at.netloc}", f"content-length: {len(content)}", *lines, "", ""]
    )

    async def one() -> Noted:
        transport, reading = await asyncio.get_running_loop().create_connection(
            lambda: Calling(head.encode() + content), str(at.hostname), int(at.port or 80)
        )
        async with asyncio.timeout(300):
            await reading.ended
        transport.close()
        if reading.noted.count != given.events:
            raise SystemExit(f"not whole: {reading.noted.count} of {given.events} events: {reading.came!r}")
        return reading.noted

    return await asyncio.gather(*(one() for _ in range(given.streams)))


async def over_amqp(given: Reading) -> list[Noted]:
    from lanekeeper import Client
    from lanekeeper.contract.names import Names
    from lanekeeper.replies import Part

    content = body(rate=given.rate, events=given.events)
    async with Client(given.url, names=Names(os.environ["BENCH_NAMESPACE"])) as client:

        async def one() -> Noted:
            noted = Noted()
            async for reply in client.stream(content, key="normal.bench.load"):
                if isinstance(reply, Part):
                    noted.add(reply.body)
            return noted

        return await asyncio.gather(*(one() for _ in range(given.streams)))


async def read(given: Reading) -> None:
    early: list[int] = []
    asyncio.get_running_loop().call_later(
        given.count_at - time.monotonic(), lambda: early.append(sum(each.count for each in Noted.all))
    )
    noted = await (over_amqp if given.url.startswith("amqp") else over_http)(given)
    if lost := [each.count for each in noted if each.count != given.events]:
        raise SystemExit(f"lost: {len(lost)} of {given.streams} streams are not whole: {lost[:10]} of {given.events}")
    first_ms = [1000 * (each.first_s - each.began_s) for each in noted]
    print(
        "READ "
        + json.dumps(asdict(Read(early=early[0], first_ms=first_ms, late_ms=[1000 * each.late_s for each in noted])))
    )


async def provide(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Providing, LOOPBACK, port, backlog=1024)
    await server.serve_forever()


async def forward(port: int, url: str) -> None:
    """Pass each call on to `url`, and each piece of its answer back as it comes."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def call(request: web.Request) -> web.StreamResponse:
            async with session.post(url + request.path, data=await request.read(), headers=HEADERS) as answer:
                response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            return response

        app = web.Application()
        app.router.add_post("/{path:.*}", call)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, port, backlog=1024).start()
        await asyncio.Event().wait()


def main(do: str, given: str, url: str = "") -> None:
    match do:
        case "provide":
            uvloop.run(provide(int(given)))
        case "forward":
            uvloop.run(forward(int(given), url))
        case _:
            uvloop.run(read(Reading(**json.loads(given))))


if __name__ == "__main__":
    main(*sys.argv[1:])
