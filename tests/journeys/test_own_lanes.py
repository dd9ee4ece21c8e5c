"""Lanes of one's own: one, five and sixteen of them; one added and one removed while the system runs."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from service.status import collect_status
from tests.support import forks
from tests.support.brokers import Vhost
from tests.support.processes import COMMAND, environment, lanekeeper
from tests.support.requester import Ledger, requester
from tests.support.serving import HeldCalls, serving
from tests.support.waiting import STARTED_S, until

OFF = {"enabled": False}


def own(name: str, rank: int) -> dict[str, str]:
    prefix = f"LANEKEEPER_LANES__{name.upper()}"
    return {f"{prefix}__RANK": str(rank), f"{prefix}__SIDE_QUEUES": "1"}


@pytest.mark.parametrize(
    "lanes",
    [
        {"critical": OFF, "normal": OFF, "batch": OFF, "only": {"rank": 7}},
        {"gold": {"rank": 5}, "free": {"rank": 25}},
        {f"own-{n}": {"rank": 7 * n + 1} for n in range(13)},
    ],
    ids=["one", "five", "sixteen"],
)
async def test_every_lane_answers_and_all_are_in_the_order_of_their_ranks(
    vhost: Vhost, lanes: Mapping[str, Mapping[str, Any]]
) -> None:
    few = {name: {"side_queues": 1, **lane} for name, lane in lanes.items()}
    async with serving(vhost, lanes=few) as worker, requester(vhost) as app:
        specs = worker.settings.lane_specs()
        for spec in specs:
            answer = await app.ask({"prompt": f"in {spec.name}"}, key=f"{spec.name}.tests.ask")
            assert (answer.status, answer.headers["x-lane-name"]) == ("ok", spec.name)
        delayed = await app.ask(
            {"prompt": "later"}, key=f"{specs[-1].name}.tests.ask", headers={"x-lane-delay-ms": 100}
        )
        assert delayed.status == "ok"

        found = await collect_status(worker.parts.broker.consuming, lanes=specs, names=worker.settings.names())
        assert [lane.lane for lane in found.lanes] == [spec.name for spec in sorted(specs, key=lambda spec: spec.rank)]
        assert all(lane.consumers and lane.answered for lane in found.lanes)


async def test_a_lane_of_ones_own_goes_first_by_its_rank(vhost: Vhost) -> None:
    """The provider allows one call at a time; what came first is of the lane that is least urgent."""
    lanes = {"gold": {"rank": 5, "side_queues": 1}}
    budget = {"concurrency": 1, "requests_per_min": 1e6, "input_tokens_per_min": 1e9, "output_tokens_per_min": 1e9}
    async with serving(vhost, lanes=lanes, budget=budget) as worker, requester(vhost) as app:
        first = await app.publish({"prompt": "first [[held]]"}, key="batch.tests.ask")
        await until(lambda: worker.api.running == 1)
        asked = []
        for lane in (*["batch"] * 12, "gold", "gold"):
            asked.append(await app.publish({"prompt": f"of {lane}"}, key=f"{lane}.tests.ask"))
        await until(lambda: sum(len(pool.jobs) for pool in worker.parts.pools) >= 6)
        worker.api.release()
        for each in (first, *asked):
            assert (await app.final(each)).status == "ok"

        order = [call.prompt for call in worker.calls("of ")]
        assert order[:6].count("of gold") == 2, order


@asynccontextmanager
async def load(ledger: Ledger, *lanes: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Asks in these lanes until the block ends, or what this yields is called."""
    number = 0

    async def ask() -> None:
        nonlocal number
        while not over.is_set():
            number += 1
            lane = lanes[number % len(lanes)]
            delay = {"x-lane-delay-ms": 300} if number % 3 == 0 else {}
            await ledger.ask(lane, f"{lane} {number}", id=f"{lane}-{number}", headers=delay)
            await asyncio.sleep(0.05)

    over, asking = asyncio.Event(), asyncio.create_task(ask())

    async def stop() -> None:
        over.set()
        await asking

    try:
        yield stop
    finally:
        await stop()


async def command(environ: Mapping[str, str], folder: Path, *line: str) -> tuple[int, str]:
    process = await forks.begin(COMMAND, *line, environ=environ, folder=folder)
    out, err = await asyncio.wait_for(process.communicate(), timeout=STARTED_S)
    assert process.returncode is not None
    return process.returncode, (out + err).decode()


async def test_lanes_are_added_under_load_and_removed_again_with_nothing_lost(vhost: Vhost, tmp_path: Path) -> None:
    ledger = Ledger(vhost.amqp_url)
    async with HeldCalls() as api:
        old = environment(vhost, api)
        new = {**old, **own("gold", 5), **own("free", 25)}
        async with lanekeeper("serve", environ=old, folder=tmp_path) as first, ledger.writing(), ledger.reading():
            await first.ready()
            async with load(ledger, "critical", "normal", "batch") as stop:
                assert (await command(new, tmp_path, "topology", "apply"))[0] == 0
                await ledger.ask("gold", "before a worker has the lane", id="gold-early")
                async with lanekeeper("serve", environ=new, folder=tmp_path) as second:
                    await second.ready()
                    async with load(ledger, "gold", "free"):
                        await until(lambda: len(ledger.finals) > 100)  # of both sets of lanes, by two processes
                        first.send(signal.SIGTERM)
                        assert await first.ended() == 0
                        last = max(int(id.rpartition("-")[2]) for id in ledger.confirmed if id != "gold-early")
                        await until(lambda: any(id.endswith(f"-{last + 20}") for id in ledger.finals))
                    await until(lambda: not [id for id in ledger.lost if id.startswith(("gold", "free"))])

                    async with lanekeeper("serve", environ=old, folder=tmp_path) as third:
                        await third.ready()
                        code, told = await command(old, tmp_path, "topology", "apply", "--remove-lane", "gold")
                        assert code == 1
                        assert "lane gold is still consumed from lane.gold" in told
                        second.send(signal.SIGTERM)
                        assert await second.ended() == 0
                        await ledger.ask("gold", "nobody works the lane", id="gold-late")
                        code, told = await command(old, tmp_path, "topology", "apply", "--remove-lane", "gold")
                        assert code == 1
                        assert "lane gold cannot be removed: lane.gold holds" in told
                        assert "lanekeeper consume --lane gold" in told

                        async with lanekeeper("consume", "--lane", "gold", environ=new, folder=tmp_path) as fourth:
                            await until(lambda: "gold-late" in ledger.finals)
                            fourth.send(signal.SIGTERM)
                            assert await fourth.ended() == 0
                        for lane in ("gold", "free"):
                            await until(lambda: removed(old, tmp_path, lane))  # noqa: B023
                        code, told = await command(old, tmp_path, "topology", "plan")
                        assert (code, told) == (0, "nothing to change\n")
                        await stop()
                        await until(lambda: not ledger.lost)
        ledger.check()
    assert len(api.calls) == len(ledger.confirmed), "each was called once"


async def removed(environ: Mapping[str, str], folder: Path, lane: str) -> bool:
    """The management API shows some seconds late that a queue holds nothing."""
    code, told = await command(environ, folder, "topology", "apply", "--remove-lane", lane)
    assert code == 0 or "holds" in told, told
    return code == 0


async def test_what_comes_back_to_a_removed_lane_is_answered_and_parked(vhost: Vhost, tmp_path: Path) -> None:
    old = environment(vhost)
    lanes = {"gold": {"rank": 5, "side_queues": 1}}
    async with requester(vhost) as app:
        async with serving(vhost, lanes=lanes):
            await app.read_dead()
            await app.read_events()
            delay = {"x-lane-delay-ms": 60_000}
            asked = await app.publish({"prompt": "x"}, key="gold.tests.ask", headers=delay, message_id="g-1")
            await until(lambda: "deferred" in app.events_of("g-1"))  # its delivery is acknowledged
        await until(lambda: removed(old, tmp_path, "gold"), within_s=45)
        async with serving(vhost):
            reply = await app.final(asked, within_s=120)
            assert reply.code == "unroutable", reply.json
            assert (await app.buried("g-1")).routing_key == "gold.tests.ask"


async def test_check_tells_what_waits_in_queues_of_a_lane_that_was_switched_off(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost, LANEKEEPER_LANES__BATCH__ENABLED="false")
    async with requester(vhost) as app:
        async with serving(vhost):
            pass
        for _ in range(3):
            await app.publish({"prompt": "nobody reads it"}, key="batch.tests.x")
        _, told = await command(environ, tmp_path, "check")
        assert "3 in lane.batch;" in " ".join(told.split())

        with a_user(vhost, sees="^(?!lane\\.batch).*$") as amqp_url:  # as the exported worker of the other lanes
            management = str(URL(vhost.management_url).with_user(vhost.user).with_password(vhost.password))
            theirs = {**environ, "LANEKEEPER_AMQP_URL": amqp_url, "LANEKEEPER_MANAGEMENT_URL": management}
            _, told = await command(theirs, tmp_path, "check")
            assert "run: lanekeeper topology" in " ".join(told.split()), told


@contextmanager
def a_user(vhost: Vhost, *, sees: str) -> Iterator[str]:
    name = f"w-{vhost.name}"
    rights = {"configure": "^amq\\.gen.*$", "write": sees, "read": sees}
    vhost.api("PUT", f"users/{name}", {"password": "secret", "tags": ""})
    try:
        vhost.api("PUT", f"permissions/{vhost.quoted}/{name}", rights)
        yield str(URL(vhost.amqp_url).with_user(name).with_password("secret"))
    finally:
        vhost.api("DELETE", f"users/{name}")


async def test_a_call_over_http_without_a_lane_goes_to_the_nearest_to_normal(vhost: Vhost, tmp_path: Path) -> None:
    async with HeldCalls() as api:
        environ = environment(vhost, api, LANEKEEPER_LANES__NORMAL__ENABLED="false", **own("standard", 18))
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as service:
            url = (await service.ready()).removesuffix("/healthz")
            body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
            async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/messages", json=body) as answer:
                assert (answer.status, answer.headers["x-lane-name"]) == (200, "standard")
            headers = {"x-lane-name": "normal"}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{url}/v1/messages", json=body, headers=headers) as answer,
            ):
                assert answer.status == 400
                assert "allowed is one of critical, standard, batch" in await answer.text()
