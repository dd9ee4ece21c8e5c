"""Server-Sent Events: the same, however the bytes are cut into chunks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from lanekeeper import http
from lanekeeper.contract.problems import BrokerUnreachable, ReplyLost
from lanekeeper.http import Event, Events, EventTooLarge, OverHttp
from tests.support.web_server import web_server

STREAM = (
    b": a comment\r\nretry: 10\r\n\r\nid: 1\r\nevent: queued\r\ndata: {}\r\n\r\n"
    b"data:two\ndata: lines\n\nid\nevent: \xc3\xb4\rdata:  x\r\rdata: after the last blank line"
)
FOUND = [Event("queued", b"{}", "1"), Event("message", b"two\nlines", "1"), Event("ô", b" x", "")]


@given(st.lists(st.integers(0, len(STREAM))))
def test_chunks_do_not_change_the_events(cuts: list[int]) -> None:
    reading = Events()
    edges = [0, *sorted(cuts), len(STREAM)]
    assert [event for begin, end in pairwise(edges) for event in reading.read(STREAM[begin:end])] == FOUND


def test_an_event_without_data_is_none_and_an_id_with_nul_is_ignored() -> None:
    assert list(Events().read(b"\ndata: 1\n\n")) == [Event("message", b"1", "")]
    assert list(Events().read(b"event: started\n\nid: a\nid: b\0\ndata: 1\n\n")) == [Event("message", b"1", "a")]


@pytest.mark.parametrize("line", [b"data: " + b"x" * 50, b"x" * 50, b"data:\n" * 50])
def test_an_event_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(http, "LARGEST_BYTES", 40)
    reading = Events()
    with pytest.raises(EventTooLarge):
        _ = [event for at in range(0, len(line), 10) for event in reading.read(line[at : at + 10])]


def clocked(monkeypatch: pytest.MonkeyPatch, waits: Callable[[float], None]) -> Callable[[], float]:
    """The module's clock, which a second's pause moves on by a second; every pause is 1 s."""
    now_s = [100.0]

    async def sleep(pause_s: float) -> None:
        now_s[0] += pause_s
        waits(now_s[0])

    def clock() -> float:
        return now_s[0]

    loop = SimpleNamespace(time=clock)
    monkeypatch.setattr(http, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=lambda: loop))
    return clock


@asynccontextmanager
async def no_stream(path: str, headers: object) -> AsyncIterator[None]:
    if path:
        raise BrokerUnreachable("away")
    yield


class CallerLeaves(Exception):
    pass


@pytest.mark.parametrize(("end", "error", "lasts_s"), [(None, ReplyLost, 31), (130.0, CallerLeaves, 90)])
async def test_a_lost_stream_is_tried_again_for_30_s_or_as_long_as_its_caller_waits(
    monkeypatch: pytest.MonkeyPatch, end: float | None, error: type[Exception], lasts_s: int
) -> None:
    def waits(now_s: float) -> None:
        if now_s == 190:
            raise CallerLeaves

    pauses = Mock(return_value=1.0)
    monkeypatch.setattr(http, "pause_s", pauses)
    clock = clocked(monkeypatch, waits)
    gateway = OverHttp("http://host", api_key=None, ssl_context=None, tracing=None)
    monkeypatch.setattr(gateway, "_streamed", no_stream)
    with pytest.raises(error):
        await anext(gateway._events(Mock(id="id-1", end=end)))
    assert clock() == 100 + lasts_s
    assert [each.args for each in pauses.call_args_list][:3] == [(0,), (1,), (2,)]
    assert pauses.call_args.kwargs == {"first_s": 0.2, "cap_s": 5.0}


@pytest.mark.slow
async def test_a_large_body_has_more_time_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow line: the body arrives in ten pieces, and takes twice as long as an answer may."""
    monkeypatch.setattr(http, "ANSWERED_WITHIN_S", 0.5)

    async def read(request: web.BaseRequest) -> web.Response:
        size = 0
        async for piece in request.content.iter_chunked(200_000):
            size += len(piece)
            await asyncio.sleep(0.1)
        return web.json_response({"size": size})

    async with (
        web_server(read) as url,
        OverHttp(url, api_key=None, ssl_context=None, tracing=None) as gateway,
    ):
        answer = await gateway._call("POST", "/", within_s=30, body=b"x" * 2_000_000)

    assert answer.document == {"size": 2_000_000}
