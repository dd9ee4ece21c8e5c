"""One look into the store serves all who follow requests here."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs
from typing_extensions import override

from consumers.state.base import Identity, StoreUnavailable
from consumers.state.following import Look
from consumers.state.sqlite.store import SqliteStore
from service.config.gateway_section import GatewayKey
from service.gateway import polling
from service.gateway.polling import FAULTS_AT_MOST, Poller
from service.gateway.problems import ApiError
from service.gateway.request_paths import RequestPaths
from service.gateway.requests import Requests
from tests.support.waiting import until


class Store(SqliteStore):
    """News of the requests in `news`; `asked` lists how many were asked for in each look."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.news: set[str] = set()
        self.failing = False
        self.faults = 0
        """How many looks fail by a fault of ours."""

    @override
    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        self.asked.append(len(wanted))
        if self.failing:
            raise StoreUnavailable("away")
        if self.faults:
            self.faults -= 1
            raise ValueError("unforeseen")
        return [Look(last=after + 1) if me.id in self.news else None for me, after in wanted]


async def test_one_look_serves_all_and_ends_when_nobody_waits() -> None:
    store = Store()
    poller = Poller(store, followers=9)
    waiting = [asyncio.create_task(poller.news(Identity("", str(number)), number)) for number in range(70)]
    await until(lambda: store.asked[-1:] == [70])
    store.news = {"3", "4"}
    await until(lambda: store.asked[-1] == 68)
    store.news |= {str(number) for number in range(70)}
    looks = await asyncio.gather(*waiting)

    assert [look and look.last for look in looks] == list(range(1, 71))
    await poller.aclose()


@pytest.mark.slow
async def test_a_store_that_is_away_is_waited_for() -> None:
    store = Store()
    poller = Poller(store, followers=9)
    store.failing, store.news = True, {"a"}
    waiting = asyncio.create_task(poller.news(Identity("", "a"), 0))
    await until(lambda: store.asked == [1])
    store.failing = False

    assert await waiting == Look(last=1)


async def test_after_a_fault_of_ours_it_is_logged_and_looked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "AGAIN_S", 0.01)
    store = Store()
    poller = Poller(store, followers=9)
    store.faults, store.news = FAULTS_AT_MOST - 1, {"a"}

    with capture_logs() as logs:
        assert await poller.news(Identity("", "a"), 0) == Look(last=1)
    assert store.asked == [1] * FAULTS_AT_MOST
    assert [each["event"] for each in logs] == ["handler.failed"] * (FAULTS_AT_MOST - 1)
    await poller.aclose()


@pytest.mark.slow
async def test_a_fault_that_stays_is_told_to_all_who_wait_and_the_next_who_asks_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "AGAIN_S", 0.01)
    store = Store()
    poller = Poller(store, followers=9)
    store.faults, store.news = FAULTS_AT_MOST, {"b"}
    waiting = [asyncio.create_task(poller.news(Identity("", id), 0)) for id in ("a", "b")]
    for each in waiting:
        with pytest.raises(ApiError, match="a fault of Lanekeeper") as told:
            await each
        assert told.value.status == 500

    assert await poller.news(Identity("", "b"), 0) == Look(last=1)
    await poller.aclose()


async def test_when_the_process_stops_all_following_ends_and_none_begins() -> None:
    poller = Poller(Store(), followers=9)
    waiting = asyncio.create_task(poller.news(Identity("", "a"), 0))
    await asyncio.sleep(0)
    poller.close()

    assert await waiting is None
    assert await poller.news(Identity("", "a"), 0) is None
    with pytest.raises(ApiError, match="stops"):
        async with poller.following():
            pass


async def test_a_reader_of_events_is_sent_to_the_next_process_by_a_stream_that_ends() -> None:
    """A browser's EventSource connects again after a stream's end, and never after another status than 200."""

    class Known(Requests):
        def __init__(self, poller: Poller) -> None:
            self.poller = poller

        @override
        async def known(self, id: str, caller: GatewayKey) -> Any:
            """It is known."""

    poller = Poller(Store(), followers=9)
    paths = RequestPaths(
        Known(poller),
        poller,
        bodies=None,  # type: ignore[arg-type]
        answers=None,  # type: ignore[arg-type]
        ping_every_s=60,
    )
    request = make_mocked_request("GET", "/v1/requests/a/events", match_info={"id": "a"})
    asked_before = asyncio.create_task(paths.events(request, GatewayKey(tenant=None)))
    await until(lambda: poller.followers == 1)
    poller.close()

    for answer in (await asked_before, await paths.events(request, GatewayKey(tenant=None))):
        assert isinstance(answer, web.Response)
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert answer.body == b"retry: 1000\n\n"
    await poller.aclose()


async def test_more_followers_than_allowed_are_refused_to_be_tried_again() -> None:
    poller = Poller(Store(), followers=1)
    async with poller.following():
        with pytest.raises(ApiError) as refused:
            async with poller.following():
                pass
        assert refused.value.status == 529
    async with poller.following():
        pass
