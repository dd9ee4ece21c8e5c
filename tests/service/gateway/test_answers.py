"""Answers to clients that stop reading, and answers that lie beside the broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Unpack

import aiohttp
import pytest
from aiohttp import web
from typing_extensions import override

from consumers.background import background_task
from lanekeeper import Client, Final
from lanekeeper.bodies import BodyStore
from lanekeeper.client import Body
from lanekeeper.contract.messages import BodyAddress, Message
from lanekeeper.contract.names import STATUS
from lanekeeper.replies import final_of
from lanekeeper.requests import Options
from service.config.settings import BodiesSettings, Settings
from service.gateway import answers
from service.gateway.answers import event_stream, send_pieces
from tests.support.gate import Alone
from tests.support.waiting import until
from tests.support.web_server import web_server

PING = b"x" * 16 * 2**20
"""More than the kernel takes for a client that does not read."""


class Stream:
    """Ends while its ping waits until the client reads."""

    def __init__(self) -> None:
        self.begins_to_end = asyncio.Event()
        self.has_ended = False

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        stream = event_stream(request, "a")
        async with background_task(stream.pings(PING, every_s=0.01), name="pings"):
            await until(lambda: request.protocol.writing_paused)
        self.begins_to_end.set()
        await stream.end()
        self.has_ended = True
        return stream.response


@asynccontextmanager
async def called() -> AsyncIterator[tuple[Stream, aiohttp.ClientResponse]]:
    """A stream, and its answer that is not read yet."""
    stream = Stream()
    async with (
        web_server(stream.answer) as url,
        aiohttp.ClientSession() as session,
        session.get(url) as response,
    ):
        yield stream, response


async def test_a_stream_ends_after_its_client_has_read_all_though_a_ping_waited() -> None:
    async with called() as (stream, response):
        await stream.begins_to_end.wait()

        assert await response.read() == PING
        await until(lambda: stream.has_ended)


@pytest.mark.slow
async def test_a_stream_whose_end_nobody_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WRITE_WITHIN_S", 0.3)
    async with called() as (stream, response):
        await until(lambda: stream.has_ended)

        with pytest.raises(aiohttp.ClientError):
            await response.read()


ASKED = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
ANSWER = b'{"type": "message"}'


async def test_an_answer_to_head_has_no_body() -> None:
    """A proxy that keeps the connection would give the body to another caller, as the answer to its call."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/pieces":
            return await send_pieces(request, _pieces(), size=8, headers={})
        stream = event_stream(request, "a")
        with suppress(ConnectionError):
            await stream.write(b"data: {}\n\n")
            await until(lambda: False)  # it would go on
        return stream.response

    async def _pieces() -> AsyncIterator[bytes]:
        yield b"HTTP"
        yield b"/1.1"

    async with web_server(answer) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for path in ("/pieces", "/events", "/pieces"):
            writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert (b"content-length: 8\r\n" in head.lower()) == (path == "/pieces")
        writer.transport.abort()


class Told(Client):
    """Every request is answered by the same stored answer; nothing is published."""

    def __init__(self, settings: Settings, kept: BodyAddress) -> None:
        super().__init__(settings.broker_url)
        self._kept = kept

    @override
    async def request(
        self,
        body: Body,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Final:
        return final_of(Message(body=b"", routing_key="", headers={STATUS: "ok", **self._kept.headers}))


@asynccontextmanager
async def answered(kept: BodyAddress, bodies: BodiesSettings) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        Alone(client=lambda settings: Told(settings, kept), settings={"bodies": bodies}) as made,
        aiohttp.ClientSession() as session,
        session.post(f"{made.url}/v1/messages", json=ASKED) as got,
    ):
        yield got


async def test_after_the_url_was_changed_answers_are_fetched_from_the_old_one_if_it_is_allowed(tmp_path: Path) -> None:
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    store = BodyStore(old)
    kept = await store.keep_answer(ANSWER, for_s=1000)
    store.close()

    async with answered(kept, BodiesSettings(url=new, allow=(old, "https://files.example.com"))) as got:
        assert (got.status, await got.read()) == (200, ANSWER)
    async with answered(kept, BodiesSettings(url=new)) as got:
        assert got.status == 503
        assert "LANEKEEPER_BODIES__ALLOW" in (await got.json())["error"]["message"]
