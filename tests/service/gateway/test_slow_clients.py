"""Clients that send slowly, or stop in the middle: each holds a bounded time and no place."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.gateway import bodies, server
from tests.service.gateway.test_calls_refused import Opened
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # slow clients are waited for

HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
SHORT_S = 0.3


@pytest.fixture
async def opened(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opened]:
    """A gateway whose times are short."""
    monkeypatch.setattr(bodies, "BODY_WITHIN_S", SHORT_S)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", SHORT_S)
    made = Opened(calls=100)
    async with made.server:
        yield made


async def sent(opened: Opened, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.server.port)
    writer.write(data)
    return reader, writer


@pytest.mark.parametrize("data", [b"", b"POST /v1/mess", HEAD, HEAD + b"x-a: b"], ids=["none", "line", "some", "half"])
async def test_a_connection_whose_headers_never_end_is_closed(opened: Opened, data: bytes) -> None:
    reader, writer = await sent(opened, data)

    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_headers_that_trickle_do_not_hold_the_connection(opened: Opened) -> None:
    reader, writer = await sent(opened, HEAD)

    async def trickle() -> None:
        while True:
            writer.write(b"x-a: b\r\n")
            await writer.drain()
            await asyncio.sleep(SHORT_S / 10)

    trickling = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(30):
            said = await reader.read()
    except ConnectionError:
        said = b""
    trickling.cancel()
    assert not said.startswith(b"HTTP/1.1 2")


async def test_a_body_that_trickles_is_refused_and_its_place_is_free_again(opened: Opened) -> None:
    callers = [await sent(opened, HEAD + b"Content-Length: 100000\r\n\r\n{") for _ in range(50)]
    for _ in range(5):
        for _, writer in callers:
            writer.write(b" ")
    for reader, writer in callers:
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
    await until(lambda: opened.routes.calls == 0)


async def test_a_client_that_closes_its_half_in_the_middle_of_a_body_leaves_no_call(opened: Opened) -> None:
    reader, writer = await sent(opened, HEAD + b"Content-Length: 100000\r\n\r\n{")
    await until(lambda: opened.routes.calls == 1)
    writer.write_eof()

    async with asyncio.timeout(30):
        assert not (await reader.read()).startswith(b"HTTP/1.1 2")
    await until(lambda: opened.routes.calls == 0)
    writer.close()
