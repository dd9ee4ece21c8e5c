"""A worker is killed while it works, or told to stop: others take over, and no request is lost.

Worker processes over one simulated provider in the test, which sees every call.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pamqp.commands import Basic

from tests.support.brokers import Vhost
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Got, Ledger, requester
from tests.support.serving import HeldCalls, serving
from tests.support.waiting import until


@pytest.fixture
async def api() -> AsyncIterator[HeldCalls]:
    async with HeldCalls() as started:
        yield started


@pytest.fixture
def environ(vhost: Vhost, api: HeldCalls) -> dict[str, str]:
    return environment(vhost, api, LANEKEEPER_LANES__BATCH__SLOTS="4")


def prompts(api: HeldCalls, words: str) -> list[str]:
    return [call.prompt for call in api.calls if words in call.prompt]


@pytest.mark.every_version
async def test_the_requests_of_a_killed_worker_are_taken_over(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    ledger = Ledger(vhost.amqp_url)
    async with (
        lanekeeper("serve", environ=environ, folder=tmp_path) as first,
        lanekeeper("serve", environ=environ, folder=tmp_path) as second,
    ):
        await asyncio.gather(first.ready(), second.ready())
        async with ledger.writing(), ledger.reading():
            for n in range(16):
                await ledger.ask("batch", f"job {n} [[held]]", id=f"job-{n}")
            await until(lambda: api.running == 8)
            first.send(signal.SIGKILL)
            died = time.monotonic()
            await until(lambda: [call for call in api.calls if call.outcome == "client_gone"])
            cut = {call.prompt for call in api.calls if call.outcome == "client_gone"}
            api.release()  # the other worker needs a slot
            again = await until(lambda: [call for call in api.calls if call.prompt in cut and call.started_s > died])
            await until(lambda: not ledger.lost)
        ledger.check()
        repeated = len(api.calls) - 16
        print(f"first takeover {again[0].started_s - died:.2f} s after the kill; {repeated} calls repeated")
        assert 1 <= repeated <= 4, "what was in its hands, and nothing else"
        assert not second.has_ended
        second.send(signal.SIGTERM)
        assert await second.ended() == 0


@pytest.mark.oldest_version
async def test_a_request_that_kills_its_worker_every_time_is_dead_lettered_and_others_are_answered(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    lives: list[int] = []
    async with (
        requester(vhost) as app,
        lanekeeper("serve", environ=environ, folder=tmp_path, module="tests.support.reborn") as worker,
    ):
        await worker.ready()
        await app.read_dead()
        poison = await app.publish({"prompt": "bang [[fault: hang]]"}, message_id="poison-1")
        neighbours: list[tuple[int, str]] = []

        def stands() -> bool:
            return bool(app.finals(poison)) or len(prompts(api, "bang")) == len(lives) + 1

        while not app.finals(poison):
            life = len(lives)
            neighbours += [(life, await app.publish({"prompt": f"neighbour {life} {n}"})) for n in range(5)]
            for _, each in neighbours:
                assert (await app.final(each)).status == "ok"
            await until(stands)
            if app.finals(poison):
                break
            lives.append(int(worker.lines[-1].removeprefix("life ")))
            os.kill(lives[-1], signal.SIGKILL)
            await until(lambda: len(worker.lines) == len(lives) + 1)
        reply = await app.final(poison)
        assert reply.code == "poison"
        assert reply.json["status"] == 500
        assert "5 times" in reply.json["detail"]
        assert len(prompts(api, "bang")) == len(lives) == 4
        buried = await app.buried("poison-1")
        assert buried.headers["x-lane-dead-code"] == "poison"
        assert buried.json == {"prompt": "bang [[fault: hang]]"}
        assert len(app.dead_of("poison-1")) == 1
        assert len(prompts(api, "neighbour")) == len(neighbours), "an answer that was sent is stored: no second call"
        for life, each in neighbours:
            assert len(app.finals(each)) <= 1 + len(lives) - life, "a kill before the ack repeats the reply, no more"
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0


async def test_a_worker_that_is_stopped_takes_no_more_requests_and_finishes_the_running_ones(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    ledger = Ledger(vhost.amqp_url)
    async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
        await worker.ready()
        async with ledger.writing(), ledger.reading(), requester(vhost) as app:
            for n in range(12):
                await ledger.ask("batch", f"job {n} [[held]]", id=f"job-{n}")
            await until(lambda: api.running == 4)
            worker.send(signal.SIGTERM)
            assert (await worker.tells("service.stopping"))["running"] == 4
            await until(lambda: app.holds(8, "lane.batch"))
            api.release()
            assert await worker.ended() == 0
            assert worker.told("service.stopped")[0]["orphaned"] == 0
            await until(lambda: len(ledger.finals) == 4)
            assert len(api.calls) == 4, "nothing was taken after the signal"
            assert {call.outcome for call in api.calls} == {"ok"}

        async with serving(vhost) as own, ledger.reading():
            own.api.release()
            await until(lambda: not ledger.lost)
            ledger.check()
            assert len(api.calls) + len(own.api.calls) == 12, "no call was made twice"
            assert ledger.repeated == 0


async def test_a_worker_told_to_stop_returns_requests_that_wait_for_the_budget_at_once(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    """Their call has not begun; the grace time is only for running calls."""
    environ = {**environ, "LANEKEEPER_BUDGET__REQUESTS_PER_MIN": "1", "LANEKEEPER_LANES__BATCH__SLOTS": "4"}
    ledger = Ledger(vhost.amqp_url)
    async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
        await worker.ready()
        async with ledger.writing(), ledger.reading(), requester(vhost) as app:
            for n in range(8):
                await ledger.ask("batch", f"job {n} [[held]]", id=f"job-{n}")
            await until(lambda: api.running == 1)
            await until(lambda: app.holds(4, "lane.batch"))  # three wait for the budget
            worker.send(signal.SIGTERM)
            await until(lambda: app.holds(7, "lane.batch"))
            given_back = [Got.of(await app.channel.basic_get("lane.batch")) for _ in range(7)]
            if vhost.version.startswith("4.3"):
                assert not any(each.headers.get("x-delivery-count") for each in given_back)
            api.release()
            assert await worker.ended() == 0
            stopping, stopped = worker.told("service.stopping")[0], worker.told("service.stopped")[0]
            assert (stopping["running"], stopped["orphaned"]) == (4, 0)
            assert stopping["grace_s"] == 25
            await until(lambda: len(ledger.finals) == 1)
            assert [call.outcome for call in api.calls] == ["ok"], "what ran a call has finished it"

    async with serving(vhost) as own, ledger.reading():
        own.api.release()
        await until(lambda: not ledger.lost)
        ledger.check()
        assert len(api.calls) + len(own.api.calls) == 8, "no call was made twice"
        assert ledger.repeated == 0


async def test_requests_that_do_not_end_within_the_grace_time_are_returned(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    """From RabbitMQ 4.3 on this is not counted as a delivery, so stopping a worker never makes a request poison."""
    environ = {**environ, "LANEKEEPER_GRACE_S": "0.3"}
    async with requester(vhost) as app:
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
            await worker.ready()
            asked = await app.publish({"prompt": "long [[fault: hang]]"}, message_id="long-1")
            await until(lambda: api.running == 1)
            worker.send(signal.SIGTERM)
            assert await worker.ended() == 0
            assert worker.told("service.stopped")[0]["orphaned"] == 1
        await until(lambda: app.holds(1, "lane.critical"))
        waiting = await app.channel.basic_get("lane.critical")
        assert Got.of(waiting).properties.message_id == "long-1"
        assert isinstance(waiting.delivery, Basic.GetOk)
        assert waiting.delivery.redelivered
        if vhost.version.startswith("4.3"):
            assert not Got.of(waiting).headers.get("x-delivery-count")
        assert not app.finals(asked)


async def test_a_second_signal_ends_a_worker_at_once_and_no_request_is_lost(
    vhost: Vhost, api: HeldCalls, environ: dict[str, str], tmp_path: Path
) -> None:
    async with requester(vhost) as app:
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
            await worker.ready()
            asked = await app.publish({"prompt": "long [[held]]"})
            await until(lambda: api.running == 1)
            worker.send(signal.SIGTERM)
            await worker.tells("service.stopping")
            told = time.monotonic()
            worker.send(signal.SIGTERM)
            assert await worker.ended() == 130
            assert time.monotonic() - told < 15, "it did not wait for the call"
        async with serving(vhost) as own:
            own.api.release()
            assert (await app.final(asked)).status == "ok"
