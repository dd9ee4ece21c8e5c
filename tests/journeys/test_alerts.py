"""Each alert fires on a live system for its cause, as Prometheus sees it, and ends when the cause is mended; and each
query of the dashboard finds what workers tell."""

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
from aiohttp import web
from opentelemetry.sdk.resources import Resource
from typing_extensions import override

from service.gateway.server import Server
from service.metrics import Metrics, of_http
from service.simulated.app import SimulatedOptions
from service.simulated.faults import Fault, parse_fault
from service.simulated.messages import Asked
from service.worker.figures import sources
from tests.support.brokers import memory_alarm
from tests.support.defaults import store_url
from tests.support.endpoint import Endpoint, endpoint
from tests.support.engine import GUARD, see_that_it_is_installed
from tests.support.faulty_api import FaultyAPI
from tests.support.private_broker import LOOPBACK, PrivateBroker, free_ports
from tests.support.processes import Running, environment, lanekeeper, run
from tests.support.redis import redis_server
from tests.support.requester import Requester, requester
from tests.support.serving import HELD, HeldCalls, RunningWorker, serving
from tests.support.waiting import until
from topology.lanes import DEFAULT_LANES

HOUSE = Path(__file__).parents[2]
RULES = HOUSE / "deploy" / "prometheus" / "rules.yml"
BOARD = HOUSE / "deploy" / "grafana" / "dashboards" / "lanekeeper.json"
UNSTABLE = "claude-opus-4-8"
THIRD = {"rank": 400, "slots": 1, "side_queues": 0}
WINDOWS = {"1d": "90s", "10m": "10s", "5m": "15s", "2m": "5s", "1m": "10s"}
"""In place of the rules' windows; what alerts must hold `for` is a second, a schedule is late after five, else all is
as it is shipped."""


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

    async def end(self, *names: str) -> None:
        """Wait until none of them fires any more."""
        firing = set(names)

        async def have_ended() -> bool:
            nonlocal firing
            firing = await self.firing() & set(names)
            return not firing

        try:
            await until(have_ended)
        except AssertionError:
            raise AssertionError(f"do not end: {firing}") from None

    async def watch(self) -> None:
        began_s, before = time.monotonic(), set[str]()
        while True:
            firing, at_s = await self.firing(), time.monotonic() - began_s
            for name in firing - self.seen.keys():
                self.seen[name] = at_s
            for name in sorted(firing ^ before):
                print(f"{at_s:5.1f} s: {name} {'fires' if name in firing else 'has ended'}")
            before = firing
            await asyncio.sleep(0.2)


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    see_that_it_is_installed("prometheus")
    text = RULES.read_text()
    text = re.sub(r"\bfor: \w+", "for: 1s", text)
    text = re.sub(r"\[(\w+)\]", lambda window: f"[{WINDOWS[window[1]]}]", text)
    text = text.replace("lanekeeper_schedule_late_seconds) > 60", "lanekeeper_schedule_late_seconds) > 5")
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


class UnstableAPI(HeldCalls):
    """Answers 503 for one model while it is `failing`."""

    failing = True

    @override
    async def _answer(
        self, request: web.BaseRequest, asked: Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        lost = parse_fault("unavailable") if self.failing and asked.model == UNSTABLE else fault
        return await super()._answer(request, asked, lost, request_id)


class Processes:
    """Running `lanekeeper serve`, one for each environment; each keeps its port when it is started again."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._environs: dict[str, dict[str, str]] = {}
        self._running: dict[str, Running] = {}

    async def start(self, name: str, environ: dict[str, str]) -> str:
        """Start it, and return where it answers `/metrics`."""
        self._environs[name] = environ
        running = lanekeeper("serve", environ=environ, folder=self._folder)
        self._running[name] = await self._stack.enter_async_context(running)
        return (await self._running[name].ready()).removeprefix("http://")

    async def start_again(self, name: str, **changes: str) -> None:
        if not self._running[name].has_ended:
            self.send(name, signal.SIGTERM)
        await self._running[name].ended()
        await self.start(name, {**self._environs[name], **changes})

    def send(self, name: str, number: signal.Signals) -> None:
        self._running[name].send(number)

    async def drop_dead_letters(self, name: str, **changes: str) -> None:
        environ = {**self._environs[name], **changes}
        code, lines = await run("dead", "drop", "--all", "--yes", environ=environ, folder=self._folder)
        assert code == 0, lines


@pytest.mark.slow
async def test_each_alert_fires_for_its_cause_and_ends_with_it_on_a_live_system(
    own_broker: PrivateBroker, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        redis = stack.enter_context(redis_server(tmp_path))
        first_api, second_api, third_api = UnstableAPI(), FaultyAPI(), FaultyAPI()
        for api in (first_api, second_api, third_api):
            await enter(api)
        hook = await enter(endpoint())
        ports = [str(port) for port in free_ports(3)]
        processes = Processes(stack, tmp_path)
        first = environment(
            own_broker,
            first_api,
            LANEKEEPER_GATEWAY__PORT=ports[0],
            LANEKEEPER_LANES__FLOOD__RANK="400",
            LANEKEEPER_LANES__FLOOD__SLOTS="1",
            LANEKEEPER_LANES__FLOOD__SIDE_QUEUES="0",
            LANEKEEPER_LANES__FLOOD__TARGET_WAIT_S="1",
            LANEKEEPER_CAPS__LANES__NORMAL__REQUESTS="60",
        )
        second = environment(
            own_broker,
            second_api,
            LANEKEEPER_GATEWAY__PORT=ports[1],
            LANEKEEPER_NAMESPACE="two",
            LANEKEEPER_STORE_URL=redis.url,
            LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1",
        )
        third = environment(
            own_broker,
            third_api,
            LANEKEEPER_GATEWAY__PORT=ports[2],
            LANEKEEPER_NAMESPACE="three",
            LANEKEEPER_STORE_URL=store_url(own_broker.amqp_url + "-three"),
            LANEKEEPER_LANES__THIRD__RANK="400",
            LANEKEEPER_LANES__THIRD__SLOTS="1",
            LANEKEEPER_LANES__THIRD__SIDE_QUEUES="0",
        )
        named = {"first": first, "second": second, "third": third}
        targets = [await processes.start(name, environ) for name, environ in named.items()]
        last = await enter(
            serving(
                own_broker,
                works=("critical",),
                lanes={"third": THIRD},
                store_url=store_url(own_broker.amqp_url + "-last"),
                namespace="three",
                schedules={"tick": {"cron": "*/2 * * * * *", "key": "critical.a.tick", "body": {"prompt": "tick"}}},
                webhooks=hook.settings(),
            )
        )
        targets.append(await enter(measured(last)))
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
        async with asyncio.TaskGroup() as together:
            together.create_task(first_is_mended(app, prometheus_, processes, first_api))
            together.create_task(third_system(app, prometheus_, processes, last, third_api))
        await schedules_and_webhooks(app, prometheus_, last, hook)
        await processes.drop_dead_letters("third")
        await prometheus_.fires("BudgetUsedUp")
        await processes.start_again("second", LANEKEEPER_BUDGET__REQUESTS_PER_MIN="1000")
        await prometheus_.end("BudgetUsedUp", "DeadLetters", "LaneFailing", "LaneFailingBadly")
        redis.kill()
        await prometheus_.fires("StoreAway")
        redis.start()
        await prometheus_.end("StoreAway", "ProcessNotReady")
        for seconds in range(1, 31):  # the broker tells of its alarm only those who publish, here an answer
            await app.publish({"prompt": f"answered while it is blocked [[latency: {seconds}s]]"})
        async with memory_alarm(own_broker.amqp_url):
            await prometheus_.fires("BrokerBlocked", "ScheduleLate")
        asked = {
            rule["alert"]
            for group in yaml.safe_load(RULES.read_text())["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }
        await prometheus_.end(*asked)
        assert prometheus_.seen.keys() == asked


async def all_lanes_are_consumed(target: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"http://{target}/metrics") as got:
        told = re.findall(r"^lanekeeper_lane_consumers\{.*\} (\S+)$", await got.text(), re.MULTILINE)
        return len(told) >= len(DEFAULT_LANES) and "0.0" not in told


async def first_system(app: Requester, prometheus_: Prometheus) -> None:
    """A flood; a provider that is slow, limits us, and fails for one model; wrong requests; spend near its cap."""

    async def slow(number: int) -> None:
        await app.publish({"prompt": f"slow {number} [[latency: 1s]]"})
        limited = "[[fault: rate_limited retry_after=none x1]]" if number % 3 == 0 else ""
        await app.publish({"prompt": f"{number} {limited}"}, key="normal.a.b")
        await app.publish({"prompt": f"job {number}"}, key="flood.a.b")
        if number % 4 == 0:
            await app.publish({"prompt": f"{number} [[fault: invalid]]"}, key="normal.a.b")
            await app.publish({"prompt": f"{number}", "model": UNSTABLE}, key="normal.a.b")

    async with going_on(partial(quick, app), every_s=0.05):
        for number in range(1200):
            await app.publish({"prompt": f"job {number} {HELD}"}, key="flood.a.b")
        await asyncio.sleep(10)
    async with going_on(slow, every_s=0.1):
        await prometheus_.fires(
            *("LaneSlow", "LaneBacklogGrows", "LaneOverTarget", "LaneFailing", "LaneFailingBadly"),
            *("DeadLetters", "AccountLimited", "BreakerOpen", "SpendNearCap"),
        )


async def quick(app: Requester, number: int) -> None:
    await app.publish({"prompt": f"quick {number} [[latency: 20ms]]"})


async def first_is_mended(app: Requester, prometheus_: Prometheus, processes: Processes, api: UnstableAPI) -> None:
    """The provider answers in time, the requests are right, dead letters are dropped, the cap is raised."""
    api.release("job")
    api.failing = False
    async with going_on(partial(quick, app), every_s=0.05):
        await app.publish({"prompt": "the model answers again", "model": UNSTABLE})
        await processes.drop_dead_letters("first")
        await prometheus_.end(
            *("LaneSlow", "LaneBacklogGrows", "LaneOverTarget", "LaneFailing", "LaneFailingBadly"),
            *("DeadLetters", "AccountLimited", "BreakerOpen"),
        )
    assert "SpendNearCap" in await prometheus_.firing()
    await processes.start_again("first", LANEKEEPER_CAPS__LANES__NORMAL__REQUESTS="6000")
    assert (await app.ask({"prompt": "more may be spent"}, key="normal.a.b")).status == "ok"
    await prometheus_.end("SpendNearCap")


async def third_system(
    app: Requester, prometheus_: Prometheus, processes: Processes, other: RunningWorker, api: FaultyAPI
) -> None:
    """A worker that hangs, a refused key, a lost slot, a worker that ends."""
    processes.send("third", signal.SIGSTOP)
    for number in range(50):
        await app.publish({"prompt": f"{number}"}, key="third.a.b", exchange="three.requests")
    await prometheus_.fires("LaneStandsStill", "ProcessDown")
    processes.send("third", signal.SIGCONT)
    await prometheus_.end("LaneStandsStill", "ProcessDown")

    api.configure(SimulatedOptions(api_key="another"))
    await app.publish({"prompt": "its key is refused"}, key="third.a.b", exchange="three.requests")
    await prometheus_.fires("ProviderRefusesAccount", "ProcessNotReady")
    api.configure(SimulatedOptions())
    await prometheus_.end("ProviderRefusesAccount", "ProcessNotReady")

    assert other.parts.lane_slots["critical"].queues[0].begin("nobody")
    await prometheus_.fires("LaneStuck")
    other.parts.lane_slots["critical"].queues[0].end("nobody")
    processes.send("third", signal.SIGKILL)
    await prometheus_.fires("LaneWithoutConsumer")
    await processes.start_again("third")
    await prometheus_.end("LaneStuck", "LaneWithoutConsumer", "ProcessDown")


async def schedules_and_webhooks(
    app: Requester, prometheus_: Prometheus, worker: RunningWorker, hook: Endpoint
) -> None:
    """A schedule's requests fail; the endpoint of webhooks fails."""
    worker.api.configure(SimulatedOptions(faults={"invalid": 1.0}))
    hook.answer = lambda _: web.Response(status=503)
    headers = {"x-lane-webhook": hook.url()}
    for number in range(10):
        await app.publish({"prompt": f"{number}"}, key="critical.a.b", exchange="three.requests", headers=headers)
    await prometheus_.fires("ScheduleFailed", "WebhooksFail")
    worker.api.configure(SimulatedOptions())
    hook.answer = lambda _: web.Response(status=204)
    await prometheus_.end("ScheduleFailed", "WebhooksFail")


async def dashboard_is_alive(prometheus_: Prometheus) -> None:
    """Each panel shows something; what is put off is not at every moment."""
    panels = json.loads(BOARD.read_text())["panels"]
    empty = {each["expr"].replace("$lane", ".*") for panel in panels for each in panel.get("targets", ())}

    async def none_is_empty() -> bool:
        for expr in sorted(empty):
            if (await prometheus_.get("query", query=expr))["result"]:
                empty.remove(expr)
        return not empty

    try:
        await until(none_is_empty)
    except AssertionError:
        raise AssertionError(f"shows nothing: {empty}") from None
