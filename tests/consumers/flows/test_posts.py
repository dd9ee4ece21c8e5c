"""One post over HTTP: whatever the other side sends, it costs little and ends soon."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from consumers.addresses import PrivateAddress, Resolver
from consumers.flows.posts import HEAD_BYTES, INFORMATIONAL, BadAnswer, NotReached, PostAnswer, Poster
from tests.support.certificates import certificate
from tests.support.malicious import Stalls

pytestmark = pytest.mark.slow

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
HINT = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nRetry-After: 7\r\n\r\nok"


@asynccontextmanager
async def server(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[URL]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with listening:
        yield URL(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/hook?a=b%20c")


def saying(*pieces: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return talk


async def post(url: URL, *, within_s: float = 10, body: bytes = b"{}", private: bool = True) -> PostAnswer:
    poster = Poster(Resolver(private=private))
    try:
        return await poster.post(url, headers={"webhook-id": "m-1"}, body=body, within_s=within_s)
    finally:
        await poster.resolver.close()


async def test_a_post_is_what_it_says_and_the_answer_is_read_as_far_as_its_head() -> None:
    heard = bytearray()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.readuntil(b"\r\n\r\n"))
        heard.extend(await reader.readexactly(200_000))
        writer.write(HINT * INFORMATIONAL + OK)

    async with server(talk) as url:
        answer = await post(url, body=b"x" * 200_000)
    assert (answer.status, answer.headers["retry-after"]) == (200, "7")
    head, _, body = bytes(heard).partition(b"\r\n\r\n")
    first, *headers = head.decode().lower().split("\r\n")
    assert first == "post /hook?a=b%20c http/1.1"
    assert {f"host: 127.0.0.1:{url.port}", "connection: close", "content-length: 200000", "webhook-id: m-1"} == set(
        headers
    )
    assert body == b"x" * 200_000


async def test_an_answer_before_the_body_was_read_counts() -> None:
    async with server(saying(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")) as url:
        assert (await post(url, body=b"x" * 5_000_000)).status == 413


async def test_a_flood_of_informational_answers_is_ended_and_holds_the_process_up_for_no_time() -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(HINT * 2000)
            sent += 1
            await writer.drain()

    async with server(talk) as url:
        with Stalls() as stalls, pytest.raises(BadAnswer):
            await post(url)
    assert stalls.longest_s < 0.5
    assert sent < 100


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"HTTP/1.1 200", b"not http\r\n\r\n", b"HTTP/1.1 999999 x\r\n\r\n", b"HTTP/1.1 101 x\r\n\r\n",
        b"\0" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * HEAD_BYTES, b"HTTP/1.1 200 OK\r\na: " + b"b" * 10 * HEAD_BYTES,
        HINT * (INFORMATIONAL + 1) + OK,
    ],
)  # fmt: skip
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    async with server(saying(answer)) as url:
        with pytest.raises((BadAnswer, OSError)):
            await post(url)


async def test_a_slow_answer_ends_in_time_however_it_drips() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with server(talk) as url:
        with pytest.raises(TimeoutError):
            await post(url, within_s=0.2)


async def test_a_body_without_end_is_not_read() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    async with server(talk) as url:
        assert (await post(url, within_s=5)).status == 200


async def test_a_name_with_a_private_address_is_not_called_and_one_that_is_not_there_is_told() -> None:
    async with server(saying(OK)) as url:
        for host in ("localhost", "127.0.0.1", "localhost."):
            with pytest.raises(PrivateAddress):
                await post(url.with_host(host), private=False)
        for host in ("nowhere.invalid", "x" * 64 + ".example"):
            with pytest.raises(NotReached):
                await post(url.with_host(host))
        port = url.port
    assert port is not None
    with pytest.raises(NotReached):
        await post(url)


async def test_a_certificate_that_is_not_trusted_ends_it_before_anything_is_posted(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate(tmp_path, "localhost"))
    async with server(talk, tls) as url:
        with pytest.raises(ssl.SSLError):
            await post(url.with_scheme("https").with_host("localhost"))
    assert not any(heard)


async def test_a_trusted_certificate_is_one_for_the_host_in_the_url(tmp_path: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate(tmp_path, "localhost"))
    trusting = ssl.create_default_context(cafile=str(tmp_path / "localhost.pem"))
    async with server(saying(OK), tls) as url:
        secure = url.with_scheme("https")
        poster = Poster(Resolver(private=True), trusting)
        for host in ("localhost", "localhost."):
            assert (await poster.post(secure.with_host(host), headers={}, body=b"", within_s=10)).status == 200
        with pytest.raises(ssl.SSLError):
            await poster.post(secure, headers={}, body=b"", within_s=10)
        await poster.resolver.close()
