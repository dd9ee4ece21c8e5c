"""Of the updates of one key only the last runs; all others are answered `superseded`."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.brokers import Vhost
from tests.support.gate import call, gate, submit
from tests.support.processes import environment, lanekeeper
from tests.support.redis import redis_server
from tests.support.requester import requester
from tests.support.serving import HeldCalls, serving
from tests.support.waiting import until

DELAY_MS = 6_000
"""Longer than it takes until 100 requests have arrived, so that all are updates inside one delay."""


@pytest.fixture
async def api() -> AsyncIterator[HeldCalls]:
    async with HeldCalls() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sqlite", "redis"])
async def test_of_100_concurrent_updates_at_three_workers_exactly_the_last_runs(
    vhost: Vhost, api: HeldCalls, tmp_path: Path, engine: str
) -> None:
    environ = environment(vhost, api)
    async with AsyncExitStack() as stack:
        if engine == "redis":
            environ["LANEKEEPER_STORE_URL"] = stack.enter_context(redis_server(tmp_path)).url
        workers = [
            await stack.enter_async_context(lanekeeper("serve", environ=environ, folder=tmp_path)) for _ in range(3)
        ]
        await asyncio.gather(*(worker.ready() for worker in workers))
        app = await stack.enter_async_context(requester(vhost))
        now_ms = time.time_ns() // 1_000_000
        updates = [(now_ms + at // 4, f"u-{at:03d}") for at in range(100)]
        random.Random(5).shuffle(updates)

        async def status_of(sent_ms: int, id: str) -> str:
            headers = {"x-lane-debounce": "doc-1", "x-lane-delay-ms": DELAY_MS, "x-lane-sent-ms": sent_ms}
            reply = await app.ask({"prompt": f"update {id}"}, message_id=id, headers=headers)
            return reply.status if reply.status == "ok" else reply.code

        answers = dict(zip(updates, await asyncio.gather(*(status_of(*update) for update in updates)), strict=True))
        assert {update for update, answer in answers.items() if answer == "ok"} == {max(updates)}
        assert set(answers.values()) == {"ok", "superseded"}
        assert [call.prompt for call in api.calls if "update" in call.prompt] == [f"update {max(updates)[1]}"]


async def test_an_update_after_the_delay_runs_too_and_keys_of_others_are_left_alone(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_events()
        delayed = {"x-lane-debounce": "doc-1", "x-lane-delay-ms": 500}
        sent_ms = time.time_ns() // 1_000_000
        asked = [
            asyncio.create_task(app.ask({"prompt": f"{id} text"}, message_id=id, headers={**delayed, **headers}))
            for id, headers in (
                ("first", {"x-lane-sent-ms": sent_ms}),
                ("second", {"x-lane-sent-ms": sent_ms + 1}),
                ("other", {"x-lane-sent-ms": sent_ms, "x-lane-debounce": "doc-2"}),
            )
        ]
        first, second, other = await asyncio.gather(*asked)
        assert (first.code, first.json["status"], first.json["retryable"]) == ("superseded", 409, False)
        assert (second.status, other.status) == ("ok", "ok")
        longer = {**delayed, "x-lane-delay-ms": 9_000}
        again = await app.ask({"prompt": "second text"}, message_id="second", headers=longer)
        assert again.headers["x-lane-replayed"] is True, "what has ended is answered at once, and supersedes nothing"
        late = await app.ask({"prompt": "late text"}, message_id="late", headers=delayed)
        assert late.status == "ok"
        await until(lambda: "superseded" in app.events_of("first"))
        assert not worker.calls("first text")


async def test_an_update_over_http_tells_that_it_was_superseded(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        sent_ms = time.time_ns() // 1_000_000
        first, second = [
            await submit(
                url,
                f"over http {at}",
                x_lane_debounce="form",
                x_lane_delay_ms="1500",
                x_lane_sent_ms=str(sent_ms + at),
            )
            for at in range(2)
        ]
        assert (first.status, second.status) == (202, 202)
        ends = [await call("GET", f"{url}{each['status_url']}?wait=30s") for each in (first, second)]
        assert [each["status"] for each in ends] == ["failed", "completed"]
        assert ends[0]["problem"]["code"] == "superseded"
        assert not worker.calls("over http 0")
        refused = await submit(url, "without a delay", x_lane_debounce="form")
        assert (refused.status, "needs x-lane-delay-ms" in str(refused.body)) == (400, True)
