"""Bodies beside the broker: from which stores they are read, and which are removed when a request has ended."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from consumers import large_bodies
from consumers.large_bodies import Fetching, LargeAnswers, WebBodies
from consumers.outcomes import Answered
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyStore, BodyTooLarge
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress, Message


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BodyStore]:
    store = BodyStore(f"file://{tmp_path}/own")
    yield store
    store.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[BodyStore]:
    store = BodyStore(f"file://{tmp_path}/other")
    yield store
    store.close()


async def room(size: int) -> None:
    """There is always some."""


def naming(kept: BodyAddress) -> Message:
    return Message(body=b"", message_id="m-1", headers={n.BODY: kept.address, n.BODY_SHA256: kept.sha256})


async def test_a_body_at_another_address_is_refused(own: BodyStore, other: BodyStore) -> None:
    with pytest.raises(BodyError, match="LANEKEEPER_BODIES__ALLOW"):
        await Fetching(own, most_bytes=10).fetch(await other.keep([b"{}"]), room=room)
    with pytest.raises(BodyError, match="LANEKEEPER_BODIES__ALLOW"):
        await Fetching(None, most_bytes=10).fetch(await own.keep([b"{}"]), room=room)


async def test_an_answer_is_sent_in_a_message_if_the_bucket_for_it_is_not_there(
    own: BodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_bucket(_: str) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(own, "_created", no_bucket)
    monkeypatch.setattr(large_bodies, "SOON_S", 0.05)
    answer = Answered(body=b"x" * 20, model="m", provider="p")
    answers = LargeAnswers(cast(Publisher, AnySize()), bodies=own, over_bytes=10)

    assert await answers.sendable(answer) is answer
    with pytest.raises(BodiesUnavailable, match="bucket"):
        await own.keep([b"{}"])


class AnySize:
    """A broker that takes messages of any size."""

    async def exceeded_limit(self, size: int) -> None:
        return None


async def test_when_its_request_has_ended_a_body_is_removed_from_the_own_store_only(
    own: BodyStore, other: BodyStore
) -> None:
    fetching = Fetching(own, others=[other], most_bytes=10)
    mine, theirs = await own.keep([b"{}"]), await other.keep([b"{}"])
    for each in (mine, theirs):
        fetching.forget(naming(each))
    fetching.forget(Message(body=b"{}"))
    await fetching._background.finish(within_s=10)

    with pytest.raises(BodyError):
        await fetching.fetch(mine, room=room)
    assert await fetching.fetch(theirs, room=room) == b"{}"


CONTENT = b'{"prompt": "hi"}' * 10
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@asynccontextmanager
async def host() -> AsyncIterator[str]:
    """A host with a body, a redirect to it, and some failures."""

    async def streamed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(CONTENT)
        return response

    async def body(request: web.Request) -> web.Response:
        return web.Response(body=CONTENT)

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/in/body")

    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["status"]))

    app = web.Application()
    app.router.add_get("/in/body", body)
    app.router.add_get("/in/streamed", streamed)
    app.router.add_get("/in/redirect", elsewhere)
    app.router.add_get("/in/broken/{status}", broken)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_an_allowed_address_is_fetched_and_checked() -> None:
    async with host() as url:
        bodies = WebBodies([f"{url}/in"], private=True)
        for path in ("body", "streamed"):
            for most_bytes in (1000, len(CONTENT)):
                assert (
                    await bodies.fetch(BodyAddress(f"{url}/in/{path}", SHA256), most_bytes=most_bytes, room=room)
                    == CONTENT
                )
        with pytest.raises(BodyError, match="SHA-256"):
            await bodies.fetch(BodyAddress(f"{url}/in/body", "0" * 64), most_bytes=1000, room=room)


@pytest.mark.parametrize(
    ("path", "most_bytes", "error", "told"),
    [
        ("body", 100, BodyTooLarge, "allowed are 100"),
        ("streamed", 100, BodyTooLarge, "more than 100"),
        ("redirect", 1000, BodyError, "302; redirects are not followed"),
        ("broken/300", 1000, BodyError, "300; redirects are not followed"),
        ("broken/399", 1000, BodyError, "399; redirects are not followed"),
        *((f"broken/{each}", 1000, BodyError, f"answered {each}$") for each in (400, 401, 403, 404, 410, 422, 499)),
        *((f"broken/{each}", 1000, BodiesUnavailable, str(each)) for each in (204, 408, 425, 429, 500, 503)),
    ],
)
async def test_what_is_too_large_or_gone_is_an_error_and_what_may_be_temporary_is_asked_for_again(
    path: str, most_bytes: int, error: type[Exception], told: str
) -> None:
    async with host() as url:
        with pytest.raises(error, match=told):
            await WebBodies([url], private=True).fetch(
                BodyAddress(f"{url}/in/{path}", SHA256), most_bytes=most_bytes, room=room
            )


async def test_a_private_address_is_refused_as_a_number_and_behind_a_name() -> None:
    async with host() as url:
        named = url.replace("127.0.0.1", "localhost")
        for each in (url, named, url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), "http://169.254.169.254"):
            with pytest.raises(BodyError, match="private address"):
                await WebBodies([each]).fetch(BodyAddress(f"{each}/in/body", SHA256), most_bytes=1000, room=room)


@pytest.mark.parametrize("number", ["64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1", "fd00::1"])
async def test_a_private_address_inside_another_is_refused(number: str) -> None:
    url = f"http://[{number}]"
    with pytest.raises(BodyError, match="private address"):
        await WebBodies([url]).fetch(BodyAddress(f"{url}/in/body", SHA256), most_bytes=1000, room=room)


def test_the_usual_ports_need_not_be_named() -> None:
    assert WebBodies(["http://files.example.com"]).holds("http://files.example.com:80/a")
    assert not WebBodies(["http://files.example.com"]).holds("http://files.example.com:81/a")


async def test_an_error_does_not_quote_the_address_which_may_hold_a_signature() -> None:
    async def rubbish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"no HTTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(rubbish, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BodiesUnavailable) as caught:
            await WebBodies([url], private=True).fetch(
                BodyAddress(f"{url}/body?signature=secret", SHA256), most_bytes=1000, room=room
            )
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("https://files.example.com/in/a", True),
        ("https://files.example.com:443/in/a?signed=1", True),
        ("https://files.example.com/in", True),
        ("https://files.example.com/inside", False),
        ("https://files.example.com/in/../secret", False),
        ("https://files.example.com/in/%2e%2E/secret", False),
        ("https://files.example.com/in/..%2Fsecret", False),
        ("https://files.example.com/in/%2e%2e%5csecret", False),
        ("https://files.example.com/in/..;a/secret", False),
        ("https://files.example.com:8443/in/a", False),
        ("http://files.example.com/in/a", False),
        ("https://user@files.example.com/in/a", False),
        ("https://files.example.com.evil.org/in/a", False),
        ("https://evil.org/https://files.example.com/in/a", False),
        ("https://files.example.com\\@evil.org/in/a", False),
        ("https://[::1/in/a", False),
    ],
)
def test_only_what_is_below_an_allowed_url_is_called(address: str, allowed: bool) -> None:
    assert WebBodies(["https://files.example.com/in/"]).holds(address) is allowed


async def test_a_name_that_cannot_be_resolved_now_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no answer from the name server")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    url = "http://files.example.com"
    with pytest.raises(BodiesUnavailable):
        await WebBodies([url]).fetch(BodyAddress(f"{url}/body", SHA256), most_bytes=1000, room=room)
