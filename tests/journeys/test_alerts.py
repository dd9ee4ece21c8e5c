"""Each alert fires on a live system for its cause, as Prometheus sees it, and ends with it; and each query of the
dashboard finds what workers tell."""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from opentelemetry.sdk.resources import Resource

from service.gateway.server import Server
from service.metrics import Metrics, of_http
from service.private_broker import LOOPBACK, PrivateBroker, free_ports
from service.simulated.app import SimulatedAPI
from service.worker.figures import sources
from tests.support.brokers import memory_alarm
from tests.support.defaults import store_url
from tests.support.engine import GUARD, see_that_it_is_installed
from tests.support.processes import environment, lanekeeper
from tests.support.redis import redis_server
from tests.support.requester import Requester, requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until
from topology.lanes import DEFAULT_LANES

HOUSE = Path(__file__).parents[2]
RULES = HOUSE / "deploy" / "prometheus" / "rules.yml"
BOARD = HOUSE / "deploy" / "grafana" / "dashboards" / "lanekeeper.json"
THIRD = {"rank": 400, "slots": 1, "side_queues": 0}
WINDOWS = {"1d": "90s", "10m": "10s", "5m": "15s", "2m": "5s", "1m": "10s"}
"""In place of the rules' windows; what alerts must hold `for` is a second, else all is as it is shipped."""


class Prometheus:
    """Debian's, with our rules, over some processes."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.seen: dict[str, float] = {}
        """When each alert was seen to fire first."""

    async def get(self, path: str, **params: str) -> Any:
        async with self._session.get(f"{self._url}/api/v1/{path}", params=params) as got:
            return (await got.json())["data"]

    async def firing(self) -> set[str]:
        found = await self.get("alerts")
        return {each["labels"]["alertname"] for each in found["alerts"] if each["state"] == "firing"}

    async def fires(self, *names: str) -> None:
        """Wait until each of them has fired since the start."""
        try:
            await until(lambda: self.seen.keys() >= set(names))
        except AssertionError:
            oldest = await self.get("query", query="lanekeeper_lane_oldest_seconds")
            raise AssertionError(f"silent: {set(names) - self.seen.keys()}; {oldest}") from None

    async def watch(self) -> None:
        began_s = time.monotonic()
        while True:
            for name in await self.firing() - self.seen.keys():
                self.seen[name] = time.monotonic() - began_s
                print(f"{self.seen[name]:5.1f} s: {name} fires")
            await asyncio.sleep(0.2)


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    see_that_it_is_installed("prometheus")
    text = RULES.read_text()
    text = re.sub(r"\bfor: \w+", "for: 1s", text)
    text = re.sub(r"\[(\w+)\]", lambda window: f"[{WINDOWS[window[1]]}]", text)
    (folder / "rules.yml").write_text(text)
    job = {"job_name": "lanekeeper", "static_configs": [{"targets": targets}]}
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    places = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = ["prometheus", *places, f"--web.listen-address={LOOPBACK}:{port}", "--log.level=error"]
    guard = await asyncio.create_subprocess_exec(
        "sh", "-c", GUARD, "guard", *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        async with aiohttp.ClientSession() as session:
            found = Prometheus(session, url)

            async def answers() -> bool:
                try:
                    return bool(await found.get("targets"))
                except aiohttp.ClientError:
                    return False

            await until(answers)
            watching = asyncio.create_task(found.watch())
            try:
                yield found
            finally:
                watching.cancel()
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        await guard.wait()


@asynccontextmanager
async def measured(worker: RunningWorker) -> AsyncIterator[str]:
    """The address at which a worker of this process answers `/metrics`."""
    metrics = Metrics(Resource.create())
    metrics.add(*sources(worker.parts, tenants=(), store_url=worker.settings.store))
    server = Server(worker.parts.reasons, host=LOOPBACK, port=0, scrape=metrics.scrape)
    metrics.add(lambda: of_http(server.times, is_ready=server.is_ready))
    async with server:
        yield server.url.removeprefix("http://")
    metrics.close()


@asynccontextmanager
async def going_on(publish: Callable[[int], Awaitable[object]], *, every_s: float) -> AsyncIterator[None]:
    async def go_on() -> None:
        number = 0
        while True:
            await publish(number)
            number += 1
            await asyncio.sleep(every_s)

    going = asyncio.create_task(go_on())
    try:
        yield
    finally:
        going.cancel()


@pytest.mark.slow
async def test_each_alert_fires_for_its_cause_on_a_live_system(own_broker: PrivateBroker, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        redis = stack.enter_context(redis_server(tmp_path))
        apis = [await enter(SimulatedAPI()) for _ in range(3)]
        last: dict[str, Any] = {"store_url": store_url(own_broker.amqp_url + "-last"), "namespace": "three"}
        environs = [
            environment(
                own_broker,
                apis[0],
                LANEKEEPER_LANES__FLOOD__RANK="400",
                LANEKEEPER_LANES__FLOOD__SLOTS="1",
                LANEKEEPER_LANES__FLOOD__SIDE_QUEUES="0",
                LANEKEEPER_LANES__FLOOD__TARGET_WAIT_S="1",
                LANEKEEPER_CAPS__LANES__NORMAL__REQUESTS="60",
            ),
            environment(
                own_broker,
                apis[1],
                LANEKEEPER_NAMESPACE="two",
                LANEKEEPER_STORE_URL=redis.url,
                LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1",
            ),
            environment(
                own_broker,
                apis[2],
                LANEKEEPER_NAMESPACE="three",
                LANEKEEPER_STORE_URL=store_url(own_broker.amqp_url + "-three"),
                LANEKEEPER_LANES__THIRD__RANK="400",
                LANEKEEPER_LANES__THIRD__SLOTS="1",
                LANEKEEPER_LANES__THIRD__SIDE_QUEUES="0",
            ),
        ]
        running = [await enter(lanekeeper("serve", environ=environ, folder=tmp_path)) for environ in environs]
        urls = [await each.ready() for each in running]
        last_worker = await enter(serving(own_broker, works=("critical",), lanes={"third": THIRD}, **last))
        targets = [url.removeprefix("http://") for url in (*urls, await enter(measured(last_worker)))]
        for target in targets:
            await until(partial(all_lanes_are_consumed, target))
        prometheus_ = await enter(prometheus(tmp_path, targets))
        app = await enter(requester(own_broker))
        await asyncio.sleep(5)
        assert prometheus_.seen == {}, "a healthy system is silent"

        for _ in range(4):
            await app.publish({"prompt": "waits for the budget"}, key="normal.a.b", exchange="two.requests")
        await first_system(app, prometheus_)
        await dashboard_is_alive(prometheus_)
        await third_system(app, prometheus_, running[2], last_worker, apis[2])
        await prometheus_.fires("BudgetUsedUp")
        redis.kill()
        await prometheus_.fires("StoreAway", "ProcessNotReady")
        for seconds in range(1, 31):  # the broker tells of its alarm only those who publish, here an answer
            await app.publish({"prompt": f"answered while it is blocked [[latency: {seconds}s]]"})
        async with memory_alarm(own_broker.amqp_url):
            await prometheus_.fires("BrokerBlocked")
        asked = {
            rule["alert"]
            for group in yaml.safe_load(RULES.read_text())["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }
        assert prometheus_.seen.keys() == asked


async def all_lanes_are_consumed(target: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"http://{target}/metrics") as got:
        told = re.findall(r"^lanekeeper_lane_consumers\{.*\} (\S+)$", await got.text(), re.MULTILINE)
        return len(told) >= len(DEFAULT_LANES) and "0.0" not in told


async def first_system(app: Requester, prometheus_: Prometheus) -> None:
    """A flood; a provider that is slow, limits us, and fails for one model; wrong requests; spend near its cap."""
    lost = "[[fault: unavailable]]"

    async def quick(number: int) -> None:
        await app.publish({"prompt": f"quick {number} [[latency: 20ms]]"})

    async def slow(number: int) -> None:
        await app.publish({"prompt": f"slow {number} [[latency: 1s]]"})
        limited = "[[fault: rate_limited retry_after=none x1]]" if number % 3 == 0 else ""
        await app.publish({"prompt": f"{number} {limited}"}, key="normal.a.b")
        await app.publish({"prompt": f"{number}"}, key="flood.a.b")
        if number % 4 == 0:
            await app.publish({"prompt": f"{number} [[fault: invalid]]"}, key="normal.a.b")
            await app.publish({"prompt": f"{number} {lost}", "model": "claude-opus-4-8"}, key="normal.a.b")

    async with going_on(quick, every_s=0.05):
        for number in range(1200):
            await app.publish({"prompt": f"job {number} [[latency: 100s]]"}, key="flood.a.b")
        await asyncio.sleep(10)
    async with going_on(slow, every_s=0.1):
        await prometheus_.fires(
            *("LaneSlow", "LaneBacklogGrows", "LaneOverTarget", "LaneFailing", "LaneFailingBadly"),
            *("DeadLetters", "AccountLimited", "BreakerOpen", "SpendNearCap"),
        )


async def third_system(
    app: Requester, prometheus_: Prometheus, worker: Any, other: RunningWorker, api: SimulatedAPI
) -> None:
    """A worker that hangs, one that ends, a lost slot, a refused key."""
    worker.send(signal.SIGSTOP)
    for number in range(50):
        await app.publish({"prompt": f"{number}"}, key="third.a.b", exchange="three.requests")
    await prometheus_.fires("LaneStandsStill", "ProcessDown")
    worker.send(signal.SIGCONT)

    async def has_ended() -> bool:
        return "ProcessDown" not in await prometheus_.firing()

    await until(has_ended)
    await app.publish({"prompt": "[[fault: authentication]]"}, key="third.a.b", exchange="three.requests")
    await prometheus_.fires("ProviderRefusesAccount")
    assert other.parts.lane_slots["critical"].queues[0].begin("nobody")
    await prometheus_.fires("LaneStuck")
    other.parts.lane_slots["critical"].queues[0].end("nobody")
    worker.send(signal.SIGKILL)
    await prometheus_.fires("LaneWithoutConsumer")


async def dashboard_is_alive(prometheus_: Prometheus) -> None:
    empty = []
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$lane", ".*")
            if not (await prometheus_.get("query", query=expr))["result"]:
                empty.append((panel["title"], expr))
    assert empty == []
