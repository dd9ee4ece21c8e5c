"""Submitted requests: how they are followed, what is told of their place, and what may happen while they are sent."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Unpack, cast
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs
from typing_extensions import override

from consumers.state.base import Identity, Look, StoreUnavailable
from consumers.state.sqlite.store import SqliteStore
from lanekeeper import BrokerError, Client, ClientMisused, LanekeeperError
from lanekeeper.bodies import BodiesUnavailable
from lanekeeper.client import Body
from lanekeeper.requests import Options
from service.config.settings import BodiesSettings, GatewayKey, Settings
from service.gateway import requests
from service.gateway.access import Access, hash_of
from service.gateway.app import SpeakerCheck
from service.gateway.requests import FAULTS_AT_MOST, Poller, RequestPaths, SubmittedRequests
from tests.support.completions import answered
from tests.support.gate import Alone
from tests.support.waiting import until

CALLER = GatewayKey(tenant=None)
ACCESS = Access({}, local=CALLER)
OVER_BYTES = 4096


class Store(SqliteStore):
    """News of the requests in `news`; `asked` lists how many were asked for in each look."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.news: set[str] = set()
        self.failing = 0
        """How many looks find that it is away."""
        self.faults = 0
        """How many looks fail by a fault of ours."""

    @override
    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        self.asked.append(len(wanted))
        if self.failing:
            self.failing -= 1
            raise StoreUnavailable("away")
        if self.faults:
            self.faults -= 1
            raise ValueError("unforeseen")
        return [Look(last=after + 1) if me.id in self.news else None for me, after in wanted]


async def test_a_store_that_is_away_is_waited_for_and_a_fault_of_ours_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "AGAIN_S", 0.01)
    store = Store()
    poller = Poller(store, ACCESS, followers=9)
    store.failing, store.faults, store.news = 5, FAULTS_AT_MOST - 1, {"a"}

    with capture_logs() as logs:
        assert await poller.news(Identity("", "a"), 0) == Look(last=1)
    assert store.asked == [1] * (5 + FAULTS_AT_MOST)
    assert [each["event"] for each in logs] == ["handler.failed"] * (FAULTS_AT_MOST - 1)
    await poller.aclose()


async def test_a_reader_of_events_is_sent_to_the_next_process_by_a_stream_that_ends() -> None:
    """A browser's EventSource connects again after a stream's end, and never after another status than 200."""

    class Known(SubmittedRequests):
        def __init__(self, poller: Poller) -> None:
            self.poller = poller

        @override
        async def known(self, id: str, caller: GatewayKey) -> Any:
            """It is known."""

    poller = Poller(Store(), ACCESS, followers=9)
    paths = RequestPaths(
        Known(poller),
        bodies=None,  # type: ignore[arg-type]
        answers=None,  # type: ignore[arg-type]
        ping_every_s=60,
    )
    request = make_mocked_request("GET", "/v1/requests/a/events", match_info={"id": "a"})
    asked_before = asyncio.create_task(paths.events(request, CALLER))
    await until(lambda: poller.followers == 1)
    poller.close()

    for answer in (await asked_before, await paths.events(request, CALLER)):
        assert isinstance(answer, web.Response)
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert answer.body == b"retry: 1000\n\n"
    await poller.aclose()


class Publishing(Client):
    """Publishes nothing. Each `publish` ends when the test says so, and then has read the body."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.broker_url)
        self.begun = 0
        self.may_end = asyncio.Event()
        self.bodies: list[bytes] = []
        self.fails: LanekeeperError | None = None

    @override
    async def publish(self, body: Body, *, key: str, **options: Unpack[Options]) -> str:
        self.begun += 1
        if self.fails is not None:
            raise self.fails
        await self.may_end.wait()

        self.bodies.append(body if isinstance(body, bytes) else cast(BinaryIO, body).read())
        return ""

    @override
    async def depth(self, lane: str) -> None:
        return None


@asynccontextmanager
async def gateway(folder: Path, **spec: Any) -> AsyncIterator[tuple[Alone, Publishing, aiohttp.ClientSession]]:
    made: list[Publishing] = []

    def client(settings: Settings) -> Publishing:
        made.append(Publishing(settings))
        return made[0]

    bodies = {"bodies": BodiesSettings(over_bytes=OVER_BYTES)}
    async with (
        Alone(client=client, folder=folder, settings=bodies, **spec) as at,
        aiohttp.ClientSession(at.url) as session,
    ):
        yield at, made[0], session


async def status_of(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path) as got:
        return got.status


def said(size: int) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * size}]}


@pytest.mark.parametrize("key", [".", ".."])
async def test_a_key_that_no_path_can_end_in_is_refused_by_its_header(tmp_path: Path, key: str) -> None:
    async with gateway(tmp_path) as (_, client, session):
        submitted = "/v1/requests"
        async with session.post(submitted, json=said(9), headers={"Idempotency-Key": key}) as got:
            assert got.status == 400
            assert "Idempotency-Key" in (await got.json())["detail"]
        async with session.ws_connect("/v1/ws") as ws:
            await ws.send_json({"type": "submit", "id": key, "body": said(9)})
            answer = await ws.receive_json()
            assert (answer["type"], answer["problem"]["status"]) == ("problem", 400)
            assert "Idempotency-Key" in answer["problem"]["detail"]
        assert client.begun == 0


async def test_a_large_body_whose_client_goes_away_is_published_and_stopping_waits_for_it(tmp_path: Path) -> None:
    body = json.dumps(said(2 * OVER_BYTES)).encode()
    async with gateway(tmp_path) as (at, client, session):
        _, writer = await asyncio.open_connection("127.0.0.1", at.server.port)
        head = b"POST /v1/requests HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await until(lambda: client.begun == 1)
        writer.close()
        await writer.wait_closed()
        assert await status_of(session, "/healthz") == 200  # by now the server has heard that the other one has gone
        stopping = asyncio.create_task(at.server.drained(within_s=60))
        assert await status_of(session, "/readyz") == 503
        assert (at.routes.calls, stopping.done()) == (1, False)
        client.may_end.set()
        await stopping

        assert client.bodies == [body]


async def test_a_request_whose_body_finds_no_room_is_refused_and_not_known(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (_, client, session):
        client.fails = BodiesUnavailable("the store of bodies is full")
        async with session.post("/v1/requests", json=said(9), headers={"Idempotency-Key": "a"}) as refused:
            assert refused.status == 503
            assert (await refused.json())["detail"] == "the store of bodies is full"

        assert await status_of(session, "/v1/requests/a") == 404


@pytest.mark.parametrize("kind", [BrokerError, ClientMisused])
@pytest.mark.parametrize(("maybe_published", "status"), [(True, 200), (False, 404)])
async def test_a_request_that_may_be_published_stays_known_also_if_the_gateway_stops_meanwhile(
    tmp_path: Path, kind: type[BrokerError | ClientMisused], maybe_published: bool, status: int
) -> None:
    async with gateway(tmp_path) as (_, client, session):
        client.fails = error = kind("the connection is closed")
        error.maybe_published = maybe_published
        async with session.post("/v1/requests", json=said(9), headers={"Idempotency-Key": "a"}) as refused:
            assert refused.status == 503
        assert await status_of(session, "/v1/requests/a") == status


@pytest.mark.slow
async def test_what_a_websocket_submits_is_a_call_like_others(tmp_path: Path) -> None:
    async with gateway(tmp_path, calls=1) as (at, client, session), session.ws_connect("/v1/ws") as socket:
        await socket.send_json({"type": "submit", "body": said(9), "id": "a", "subscribe": False})
        await until(lambda: client.begun == 1)
        assert at.routes.calls == 1
        await socket.send_json({"type": "submit", "body": said(9), "id": "b", "subscribe": False})
        refused = await socket.receive_json(timeout=30)
        client.may_end.set()
        submitted = await socket.receive_json(timeout=30)

        assert (refused["type"], refused["id"], refused["problem"]["status"]) == ("problem", "b", 529)
        assert (submitted["type"], submitted["id"]) == ("submitted", "a")
        await until(lambda: at.routes.calls == 0)


async def test_an_operator_finds_any_tenants_request_by_its_id_without_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeakerCheck, "check", AsyncMock())
    keys = {
        hash_of("crm"): {"tenant": "crm"},
        hash_of("look"): {"tenant": "ops", "operator": "look"},
    }

    async with Alone(folder=tmp_path, keys=keys) as made, aiohttp.ClientSession() as session:

        async def get(id: str, key: str, method: str = "GET") -> tuple[int, Any]:
            asked = session.request(method, f"{made.url}/v1/requests/{id}", headers={"x-api-key": key})
            async with asked as got:
                return got.status, await got.json()

        await made.store.note(Identity("crm", "k-1"), answered("secret"))
        await made.store.note(Identity("crm", "twice"), answered("secret"))
        await made.store.note(Identity("shop", "twice"), answered("secret"))
        status, found = await get("k-1", "look")
        assert (status, found["tenant"], found["status"]) == (200, "crm", "completed")
        assert "result" not in found
        assert (await get("twice", "look"))[0] == 409
        assert (await get("twice?tenant=shop", "look"))[1]["tenant"] == "shop"
        assert (await get("nobodys", "look"))[0] == 404
        assert (await get("k-1", "look", "DELETE"))[0] == 404, "it may not act"
        assert (await get("k-1?tenant=crm", "look", "DELETE"))[0] == 403
        assert (await get("twice?tenant=shop", "crm"))[0] == 403
        assert "tenant" not in (await get("k-2", "crm"))[1]
