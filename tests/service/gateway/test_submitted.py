"""A request that is being submitted: what its client, the store of bodies and the process may do meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Unpack

import aiohttp
import pytest
from pydantic import SecretStr
from typing_extensions import override

from lanekeeper import Client
from lanekeeper.bodies import BodiesUnavailable
from lanekeeper.options import Options
from service.config.bodies_section import BodiesSettings
from service.config.copies import with_store
from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway.app import Gateway
from service.gateway.server import Server
from tests.support.gate import opened
from tests.support.waiting import until

OVER_BYTES = 4096


class Publishing(Client):
    """Publishes nothing. Each `publish` ends when the test says so, and then has read the body."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.broker_url)
        self.begun = 0
        self.may_end = asyncio.Event()
        self.bodies: list[bytes] = []
        self.is_full = False

    @override
    async def publish(self, body: Mapping[str, Any] | bytes | BinaryIO, *, key: str, **options: Unpack[Options]) -> str:
        self.begun += 1
        if self.is_full:
            raise BodiesUnavailable("the store of bodies is full")
        await self.may_end.wait()
        assert not isinstance(body, Mapping)
        self.bodies.append(body if isinstance(body, bytes) else body.read())
        return ""


class Opened:
    """A gateway whose requests are published by `client`."""

    def __init__(self, client: Publishing, routes: Gateway, server: Server, session: aiohttp.ClientSession) -> None:
        self.client = client
        self.routes = routes
        self.server = server
        self.session = session

    async def status_of(self, path: str) -> int:
        async with self.session.get(self.server.url + path) as got:
            return got.status


@asynccontextmanager
async def gateway(folder: Path, **spec: Any) -> AsyncIterator[Opened]:
    settings = Settings(
        amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"),
        gateway=GatewaySettings(port=0, **spec),
        bodies=BodiesSettings(over_bytes=OVER_BYTES),
    )
    settings = with_store(settings, f"sqlite:///{folder}/store.sqlite")
    client = Publishing(settings)
    async with opened(settings) as store, aiohttp.ClientSession() as session:
        routes = Gateway(settings, client, store)
        async with Server(routes.reasons, host="127.0.0.1", port=0, routes=routes) as server:
            yield Opened(client, routes, server, session)


def said(size: int) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * size}]}


@pytest.mark.slow
async def test_a_request_that_was_sent_long_ago_is_known_as_soon_as_it_is_accepted(tmp_path: Path) -> None:
    async with gateway(tmp_path) as at:
        at.client.may_end.set()
        named = {"Idempotency-Key": "old", "x-lane-sent-ms": "0"}
        async with at.session.post(f"{at.server.url}/v1/requests", json=said(9), headers=named) as got:
            assert got.status == 202
        assert await at.status_of("/v1/requests/old") == 200


@pytest.mark.parametrize("key", [".", ".."])
async def test_a_key_that_no_path_can_end_in_is_refused_by_its_header(tmp_path: Path, key: str) -> None:
    async with gateway(tmp_path) as at:
        submitted = f"{at.server.url}/v1/requests"
        async with at.session.post(submitted, json=said(9), headers={"Idempotency-Key": key}) as got:
            assert got.status == 400
            assert "Idempotency-Key" in (await got.json())["detail"]
        async with at.session.ws_connect(f"{at.server.url}/v1/ws") as ws:
            await ws.send_json({"type": "submit", "id": key, "body": said(9)})
            answer = await ws.receive_json()
            assert (answer["type"], answer["problem"]["status"]) == ("problem", 400)
            assert "Idempotency-Key" in answer["problem"]["detail"]
        assert at.client.begun == 0


async def test_a_large_body_whose_client_goes_away_is_published_and_stopping_waits_for_it(tmp_path: Path) -> None:
    body = json.dumps(said(2 * OVER_BYTES)).encode()
    async with gateway(tmp_path) as at:
        _, writer = await asyncio.open_connection("127.0.0.1", at.server.port)
        head = b"POST /v1/requests HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await until(lambda: at.client.begun == 1)
        writer.close()
        await writer.wait_closed()
        assert await at.status_of("/healthz") == 200  # by now the server has heard that the other one has gone
        stopping = asyncio.create_task(at.server.drained(within_s=60))
        assert await at.status_of("/readyz") == 503
        assert (at.routes.calls, stopping.done()) == (1, False)
        at.client.may_end.set()
        await stopping

        assert at.client.bodies == [body]


async def test_a_request_whose_body_finds_no_room_is_refused_and_not_known(tmp_path: Path) -> None:
    async with gateway(tmp_path) as at:
        at.client.is_full = True
        async with at.session.post(
            f"{at.server.url}/v1/requests", json=said(9), headers={"Idempotency-Key": "a"}
        ) as refused:
            assert refused.status == 503
            assert (await refused.json())["detail"] == "the store of bodies is full"

        assert await at.status_of("/v1/requests/a") == 404


async def test_what_a_websocket_submits_is_a_call_like_others(tmp_path: Path) -> None:
    async with gateway(tmp_path, calls=1) as at, at.session.ws_connect(f"{at.server.url}/v1/ws") as socket:
        await socket.send_json({"type": "submit", "body": said(9), "id": "a", "subscribe": False})
        await until(lambda: at.client.begun == 1)
        assert at.routes.calls == 1
        await socket.send_json({"type": "submit", "body": said(9), "id": "b", "subscribe": False})
        refused = await socket.receive_json(timeout=30)
        at.client.may_end.set()
        submitted = await socket.receive_json(timeout=30)

        assert (refused["type"], refused["id"], refused["problem"]["status"]) == ("problem", "b", 529)
        assert (submitted["type"], submitted["id"]) == ("submitted", "a")
        await until(lambda: at.routes.calls == 0)
