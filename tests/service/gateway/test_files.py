"""`/v1/files`: Anthropic's own SDK, unmodified, against the gateway; and what strangers, slow clients and broken
providers do to it."""

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from anthropic.types import FileNotDownloadableError, StorageQuotaExceededError

from consumers.state.base import StoredFile, StoreUnavailable
from service.config.settings import FilesSettings
from service.gateway import files
from service.gateway.access import hash_of
from service.simulated.app import SimulatedAPI
from tests.service.gateway.test_lookups import get, sdk
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import Alone
from tests.support.waiting import until
from tests.support.web_server import web_server

pytestmark = pytest.mark.slow

KEYS = {hash_of("crm"): {"tenant": "crm", "lanes": ["normal"]}, hash_of("shop"): {"tenant": "shop"}}
BETA = "files-api-2025-04-14"
BEGIN = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b'
FORM = BEGIN + b"\r\n--b--\r\n"
FORM_TYPE = {"content-type": "multipart/form-data; boundary=b"}


def text(content: bytes = b"hello", name: str = "a.txt") -> Any:
    return (name, io.BytesIO(content), "text/plain")


async def ids(client: AsyncAnthropic, **asked: Any) -> list[str]:
    return [each.id async for each in client.beta.files.list(**asked)]


def without_ids(found: Any) -> dict[str, Any]:
    return {name: value for name, value in found.to_dict().items() if name not in ("id", "created_at", "expires_at")}


async def test_the_sdk_gets_the_same_as_from_the_api(tmp_path: Path) -> None:
    async def calls(client: AsyncAnthropic) -> list[Any]:
        first = await client.beta.files.upload(file=text(), betas=[BETA])
        second = await client.files.upload(file=text(b"x" * 300_000, "b.bin"), expires_in_seconds=3600)
        again = await client.files.retrieve_metadata(first.id)
        listed = await client.beta.files.list(limit=1)
        assert await ids(client, limit=1) == [second.id, first.id], "over two pages"
        assert await ids(client, ids=[first.id, "file_x"]) == [first.id]
        gone = await client.files.delete(second.id)
        with pytest.raises(anthropic.NotFoundError):
            await client.files.retrieve_metadata(second.id)
        with pytest.raises(FileNotDownloadableError):
            await client.files.download(first.id)
        assert await ids(client) == [first.id]
        return [without_ids(each) for each in (first, second, again, listed.data[0])] + [gone.type]

    async with (
        SimulatedAPI() as api,
        SimulatedAPI() as same,
        Alone(folder=tmp_path, provider=api.base_url) as made,
        sdk(made.url) as ours,
        sdk(same.base_url) as own,
    ):
        assert await calls(ours) == await calls(own)


async def test_nobody_sees_the_file_of_another_tenant(tmp_path: Path) -> None:
    async with (
        SimulatedAPI() as api,
        Alone(folder=tmp_path, provider=api.base_url, keys=KEYS) as made,
        sdk(made.url, "crm") as crm,
        sdk(made.url, "shop") as shop,
    ):
        id = (await crm.files.upload(file=text())).id
        for call in (shop.files.retrieve_metadata, shop.files.delete, shop.files.download):
            with pytest.raises(anthropic.NotFoundError) as caught:
                await call(id)
            assert caught.value.body["error"] == {"type": "not_found_error", "message": f"File not found: {id}"}  # type: ignore[index]
        assert await ids(shop) == await ids(shop, ids=[id]) == []
        block: Any = {"type": "document", "source": {"type": "file", "file_id": id}}
        asked: Any = {"model": "claude-sonnet-5-5", "messages": [{"role": "user", "content": [block]}]}
        assert (await crm.messages.count_tokens(**asked)).input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await shop.messages.count_tokens(**asked)
        assert await ids(crm) == [id]


async def test_a_file_that_a_tool_made_is_downloaded_and_no_browser_shows_it_under_the_gateways_address(
    tmp_path: Path,
) -> None:
    async with FaultyAPI() as api, Alone(folder=tmp_path, provider=api.base_url) as made, sdk(made.url) as client:
        page = api.files.make("a.html", b"<script>alert(1)</script>" * 10_000, media_type="text/html")
        await noted(made, page.id)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{made.url}/v1/files/{page.id}/content") as got:
                assert await got.read() == page.content
                assert got.headers["content-disposition"] == 'attachment; filename="a.html"'
                assert got.headers["content-security-policy"] == "sandbox"
                assert got.headers["x-content-type-options"] == "nosniff"
            async with session.head(f"{made.url}/v1/files/{page.id}/content") as head:
                assert (head.status, head.headers["content-length"]) == (200, str(page.size))
        assert await (await client.files.download(page.id)).read() == page.content


async def test_a_download_that_the_provider_has_packed_is_whole(tmp_path: Path) -> None:
    """The length that it tells is the packed one."""
    content = b"0123456789" * 1000

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=gzip.compress(content), headers={"content-encoding": "gzip"})

    async with web_server(answer) as at, Alone(folder=tmp_path, provider=at) as made, sdk(made.url) as client:
        await noted(made, "file_1")
        assert await (await client.files.download("file_1")).read() == content


async def noted(made: Alone, id: str, **fields: Any) -> None:
    file = StoredFile(**{"id": id, "tenant": "", "provider": "anthropic", "created_ms": 1, **fields})
    assert await made.store.keep_file(file)


async def sent(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={**FORM_TYPE, **headers}) as session,
        session.post(f"{url}/v1/files", data=body) as got,
    ):
        return got.status, await got.json()


async def test_of_a_call_only_the_form_the_version_and_the_betas_reach_the_provider(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        names = {name.lower() for name in request.headers}
        seen.append((request.method, request.raw_path, names, await request.read(), request.headers["authorization"]))
        return web.json_response({"id": f"file_{len(seen)}"}, headers={"set-cookie": "a=b"})

    name = b"../../v1/messages\r\nx-evil: 1"
    async with web_server(answer) as at, Alone(folder=tmp_path, provider=at) as made:
        form = FORM % (name.replace(b"\r\n", b"%0d%0a"), b"x")
        assert (await sent(f"{made.url}", form, **{"x-evil": "1", "anthropic-beta": BETA, "cookie": "c=d"}))[0] == 200
        for id in ("..%2F..%2Fmessages", "..", "%2e%2e%2fmodels", "file_1%3Fa=b", "file_1%23", "file_2", "a%00b"):
            for end in ("", "/content"):
                status, found, _ = await get(f"{made.url}/v1/files/{id}{end}?page=../x&beta=yes")
                assert (status, found["error"]["type"]) == (404, "not_found_error"), id
        ((method, path, names, body, key),) = seen
        assert (method, path, body, key) == ("POST", "/v1/files", form, "Bearer sk-secret")
        assert names == {
            *("host", "accept", "accept-encoding", "authorization", "anthropic-beta", "anthropic-version"),
            *("connection", "content-length", "content-type", "user-agent"),
        }


@pytest.mark.parametrize(
    ("status", "given", "wanted"),
    [
        (400, b'{"type":"error",\n"error":{"type":"invalid_request_error","message":"\xc3\xa4"}}', 400),
        (529, b'{"type": "error", "error": {"type": "overloaded_error", "message": "later"}}', 529),
        (401, b'{"type": "error", "error": {"type": "authentication_error", "message": "invalid x-api-key"}}', 503),
        (400, b'{"type": "error", "error": {"type": "x", "message": "key sk-secret"}}', 400),
        (502, b"<html>Bad Gateway</html>", 502),
        (200, b'{"ok": true}', 502),
        (302, b"", 502),
    ],
)
async def test_an_error_is_the_providers_own_whole_and_never_about_its_key(
    tmp_path: Path, status: int, given: bytes, wanted: int
) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(status=status, body=given, headers={"content-type": "application/json", "retry-after": "7"})

    async with web_server(answer) as at, Alone(folder=tmp_path, provider=at) as made:
        async with (
            aiohttp.ClientSession(headers=FORM_TYPE) as session,
            session.post(f"{made.url}/v1/files", data=FORM % (b"a", b"x")) as got,
        ):
            found = await got.read()
        assert got.status == wanted
        assert b"sk-secret" not in found
        if wanted == status and b"sk-secret" not in given and given.startswith(b"{"):
            assert (found, got.headers["retry-after"]) == (given, "7")
        assert json.loads(found)["type"] == "error"
        assert await made.store.files("") == []


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    async with SimulatedAPI() as api, Alone(folder=tmp_path, provider=api.base_url) as made:
        for framing in ("content-length: 500000", "transfer-encoding: chunked"):
            _, writer = await asyncio.open_connection("127.0.0.1", made.server.port)
            lines = (
                "POST /v1/files HTTP/1.1",
                "host: localhost",
                f"content-type: {FORM_TYPE['content-type']}",
                framing,
            )
            head = "\r\n".join(lines) + "\r\n\r\n"
            begin = BEGIN % (b"a", b"x" * 1000)
            writer.write(head.encode() + (begin if "length" in framing else b"%x\r\n%b\r\n" % (len(begin), begin)))
            await writer.drain()
            await until(lambda: made.routes.calls == 1)
            writer.close()
            await until(lambda: made.routes.calls == 0)
        assert api.files.ids == []
        assert await made.store.files("") == []


async def test_a_file_that_has_arrived_is_noted_although_its_client_has_left(tmp_path: Path) -> None:
    came, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        came.set()
        await go_on.wait()
        return web.json_response({"id": "file_1", "size_bytes": 3})

    async with web_server(answer) as at, Alone(folder=tmp_path, provider=at) as made:
        calling = asyncio.create_task(sent(made.url, FORM % (b"a", b"x")))
        await came.wait()
        calling.cancel()
        await asyncio.wait([calling])
        go_on.set()

        async def is_noted() -> bool:
            return [file.id for file in await made.store.files("")] == ["file_1"]

        await until(is_noted)


async def test_a_file_whose_owner_cannot_be_noted_is_deleted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SimulatedAPI() as api, Alone(folder=tmp_path, provider=api.base_url) as made, sdk(made.url) as client:

        async def away(file: StoredFile) -> bool:
            raise StoreUnavailable("away")

        monkeypatch.setattr(made.store, "keep_file", away)
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.files.upload(file=text())
        assert caught.value.status_code == 503
        assert api.files.ids == []


async def test_no_more_is_taken_than_the_provider_takes_and_a_slow_client_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, offered = asyncio.Event(), 0

    async def answer(request: web.BaseRequest) -> web.Response:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal offered
        for _ in range(1000):
            offered += 100_000
            yield b"x" * 100_000

    async with web_server(answer) as at, Alone(folder=tmp_path, provider=at) as made:
        calling = asyncio.create_task(sent(made.url, pieces()))
        await begun.wait()
        before = -1
        while before != offered:
            before = offered
            await asyncio.sleep(0.2)
        assert offered < 20_000_000, "what fits into the buffers of four sockets"
        calling.cancel()
        await asyncio.wait([calling])

    async def slow() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.sleep(60)

    monkeypatch.setattr(files, "PIECE_WITHIN_S", 0.2)
    async with SimulatedAPI() as api, Alone(folder=tmp_path, provider=api.base_url) as made:
        status, found = await sent(made.url, slow())
        assert (status, found["error"]["type"]) == (408, "timeout_error")
        assert api.files.ids == []


async def test_too_large_is_413_and_over_the_quota_the_error_of_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield BEGIN % (b"a", b"x" * 60_000)
        yield b"x" * 60_000

    limits = FilesSettings.model_construct(per_tenant=2, bytes_per_tenant=1024 * 1024)
    async with (
        SimulatedAPI() as api,
        Alone(folder=tmp_path, provider=api.base_url, settings={"files": limits}) as made,
        sdk(made.url) as client,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(files, "MOST_BYTES", 100_000)
            assert (await sent(made.url, b"x" * 100_001))[0] == 413
            assert (await sent(made.url, pieces()))[0] == 413
        with pytest.raises(StorageQuotaExceededError):
            await client.files.upload(file=text(b"x" * 1024 * 1024))
        assert api.files.ids == []
        for _ in range(2):
            await client.files.upload(file=text())
        with pytest.raises(StorageQuotaExceededError):
            await client.files.upload(file=text())
        await client.files.delete(api.files.ids[0])
        await client.files.upload(file=text())


async def test_what_is_deleted_at_the_provider_is_not_listed_and_can_be_forgotten(tmp_path: Path) -> None:
    async with SimulatedAPI() as api, Alone(folder=tmp_path, provider=api.base_url) as made, sdk(made.url) as client:
        await noted(made, "file_gone")
        kept = await client.files.upload(file=text())
        assert await ids(client) == [kept.id]
        with pytest.raises(anthropic.NotFoundError):
            await client.files.delete("file_gone")
        assert [file.id for file in await made.store.files("")] == [kept.id]


async def test_a_download_that_breaks_off_is_not_taken_for_whole(tmp_path: Path) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * 100_000)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with (
        web_server(answer) as at,
        Alone(folder=tmp_path, provider=at) as made,
        aiohttp.ClientSession() as session,
    ):
        await noted(made, "file_1")
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"{made.url}/v1/files/file_1/content") as got:
                await got.read()


async def test_a_gateway_without_the_providers_key_says_so(tmp_path: Path) -> None:
    async with Alone(folder=tmp_path) as made:
        status, found = await sent(made.url, FORM % (b"a", b"x"))
        assert (status, found["error"]["type"]) == (501, "api_error")


@pytest.mark.parametrize("path", ["/v1/skills", "/v1/files/a/b/c", "/v1/sessions/x/events", "/v1/nothing?beta=true"])
async def test_every_other_path_is_a_404_of_the_api_that_says_what_is_there(tmp_path: Path, path: str) -> None:
    async with Alone(folder=tmp_path) as made:
        status, found, headers = await get(made.url + path)
        assert (status, found["error"]["type"]) == (404, "not_found_error")
        assert path.partition("?")[0] in found["error"]["message"]
        assert "/v1/files" in found["error"]["message"]
        assert headers["request-id"] == found["request_id"]
