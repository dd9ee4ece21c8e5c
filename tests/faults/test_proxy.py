"""Each method of the proxy does to a connection what it says."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.faults.proxy import FROM, LOOPBACK, TO, Proxy
from tests.support.waiting import until


@pytest.fixture
async def line() -> AsyncIterator[Proxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while said := await reader.read(1000):
                writer.write(said)
        writer.close()

    server = await asyncio.start_server(echo, LOOPBACK, 0)
    async with Proxy(LOOPBACK, server.sockets[0].getsockname()[1]) as proxy:
        yield proxy
    server.close()


async def call(line: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(LOOPBACK, line.port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    return reader, writer


@pytest.mark.parametrize("ways", [(), (FROM,), (TO,)], ids=["blackhole", "half-open", "half-open the other way"])
async def test_a_frozen_connection_passes_nothing_until_it_is_mended(line: Proxy, ways: tuple[str, ...]) -> None:
    reader, writer = await call(line)
    line.freeze(*ways)
    writer.write(b"there")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), timeout=0.1)
    await line.mend()
    assert await reader.readexactly(5) == b"there"


async def test_a_slow_connection_keeps_the_order(line: Proxy) -> None:
    reader, writer = await call(line)
    line.slow(delay_s=0.05, jitter_s=0.05)
    before = time.monotonic()
    for n in range(10):
        writer.write(bytes([n]))
        await writer.drain()
        await asyncio.sleep(0.001)
    assert await reader.readexactly(10) == bytes(range(10))
    assert time.monotonic() - before > 0.05


async def test_a_refusing_proxy_accepts_again_on_the_same_port(line: Proxy) -> None:
    port = line.port
    await line.refuse()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await call(line)
    await line.mend()
    assert line.port == port
    await call(line)


async def test_a_reset_reaches_the_client(line: Proxy) -> None:
    reader, _ = await call(line)
    line.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    await until(lambda: line.open == 0)


async def test_a_cut_ends_the_connection_in_the_middle_of_the_data(line: Proxy) -> None:
    reader, writer = await call(line)
    line.cut(after_bytes=3)
    writer.write(b"there")
    assert await reader.read() in (b"the", b"")


async def test_garbled_data_differs_and_is_longer(line: Proxy) -> None:
    reader, writer = await call(line)
    line.garble()
    writer.write(b"there")
    assert len(await reader.readexactly(12)) == 12
