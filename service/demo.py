"""`lanekeeper demo`: acts, each of which shows one promise and tells whether it was kept. A flood of batch jobs that
chats overtake; a worker that is killed, and requests that are sent twice; a document that is cut, summarised and put
together; Anthropic's SDK through the gateway; a bulk job at half price; a small budget; a provider that fails. START
HERE: `tell_story`."""

import asyncio
import io
import json
import random
import re
import secrets
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack
from urllib.parse import quote

from anthropic import AnthropicError, AsyncAnthropic, DefaultAsyncHttpxClient
from rich.console import Console
from rich.live import Live
from rich.table import Table

from consumers.background import background_task
from consumers.failures import RateLimitedError
from consumers.flows.pipelines import StepSpec
from consumers.providers.anthropic import AnthropicProvider
from consumers.spending import LANE
from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import LANE_NAME, PIPELINE
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.replies import Final
from lanekeeper.requests import Options
from lanekeeper.telemetry import signals
from service.config.flows import HandlerSettings, PipelineSettings
from service.config.settings import BatchesSettings, BudgetSettings, CapsSettings, Settings, simulating, with_broker
from service.private_broker import private_broker
from service.simulated.app import SimulatedAPI, SimulatedOptions
from service.simulated.batches import BatchOptions
from service.telemetry import logs
from service.worker import running as worker
from service.worker.assembly import Worker, assemble
from topology.broker.admin import remove
from topology.codec.decoding import unpublished
from topology.declaration import declare
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, NORMAL

ANSWER_WITHIN_S = 90.0
BATCH_SLOTS = 12
LATENCY_MS = 300
CENT = 0.01
PLAIN_WIDTH = 80
REDRAW_S = 0.25
LINE_EVERY_S = 2.0


async def tell_story(settings: Settings) -> bool:
    """Run the demo and print its results. Returns whether every act kept its promise."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    _end_on_signals()
    failed: list[str] = []

    def act(text: str) -> None:
        console.print(f"{text} …", style="dim", highlight=False)

    def show(what: str, text: str, is_well: bool) -> None:
        console.print(text, style="green" if is_well else "bold red", highlight=False)
        if not is_well:
            failed.append(what)

    async with AsyncExitStack() as stack:
        url = settings.broker_url
        if "amqp_url" not in settings.model_fields_set:
            act("starting a broker, which is removed at the end")
            url = (await stack.enter_async_context(private_broker(say=console.print))).amqp_url
        else:
            act(f"using the broker at {settings.broker}, which LANEKEEPER_AMQP_URL, .env or lanekeeper.toml names")
        folder = stack.enter_context(TemporaryDirectory(prefix="lanekeeper-demo-"))
        store_url = f"sqlite:///{quote(folder)}/store.sqlite"
        settings = with_broker(settings, url, namespace=f"demo-{secrets.token_hex(4)}", store_url=store_url)
        settings = _for_demo(settings)
        api = await stack.enter_async_context(SimulatedAPI(SimulatedOptions(latency_ms=LATENCY_MS)))
        settings = simulating(settings, api.base_url)
        await _remove_topology_at_end(stack, settings)
        async with working(settings) as (parts, client):
            act(
                f"RabbitMQ {parts.version} at {settings.broker}, a simulated provider that answers in {LATENCY_MS} ms; "
                f"{FLOOD} batch jobs, then {CHATS} critical and {CHATS} normal chats among them"
            )
            lanes, queued = ({lane: Score(count) for lane, count in SENT.items()} for _ in range(2))
            async with background_task(_watch(console, lanes), name="demo table"):
                lanes_s = await flood(client, lanes)
            act("a second worker, which is killed in the middle of its work")
            show("nothing lost", *await unbroken(settings, client, api, folder=Path(folder)))
            act(f"a pipeline: a document of {PARTS} parts is cut, each part summarised, all put together")
            show("the pipeline", *await ingested(client, api))
            act("Anthropic's SDK, through the gateway, among batch jobs")
            show("the SDK", *await by_sdk(settings, client, api, folder=Path(folder)))
        act(f"a bulk job of {BULK} requests that can wait until tomorrow, with {PROCESSING_S:g} s in place of hours")
        show("the batches", *await in_batches(settings))
        act("two providers, of which the first goes down and comes back")
        show("the outage", *await outage(settings))
        act(
            f"a provider that allows {ACCOUNT.requests_per_minute} requests a minute, {BUDGET_JOBS} batch "
            "jobs and a critical request now and then; the same without a gate"
        )
        gated, ungated = await budget(settings)
        _show_budget(console, gated, ungated)
        if not gated.is_well(ungated):
            promised = f"no 429, a critical p95 below {SOON_S:g} s, and {USED_LEAST:.0%} of the budget used"
            show("the budget", f"promised is {promised}", is_well=False)
        act("the first load again, through one first-come queue")
        api.configure(api.options)  # resets the counts, so that the same faults occur again
        every_slot = sum(lane.slots for lane in settings.lane_specs())
        settings = _with_batch_lane(settings, slots=every_slot, slots_max=every_slot)
        async with working(settings, lanes=(BATCH.name,)) as (_, client):
            queued_s = await flood(client, queued, lane=BATCH.name)
        _show_flood(console, ("lanes", lanes, lanes_s), ("first come", queued, queued_s))
        if wrong := [request for score in lanes.values() for request in score.wrong]:
            why = "\n".join(f"  not answered right: {request}" for request in wrong[:5])
            show("the flood", f"{why}\nFAILED: {len(wrong)} requests were not answered right", is_well=False)
    if failed:
        console.print(f"FAILED: {', '.join(failed)}", style="bold red", highlight=False)
        return False
    among, behind = ("{} (p95 {})".format(*_shown(run[CRITICAL.name].waits_ms, 0.5, 0.95)) for run in (lanes, queued))
    text = f"waited {among} among {FLOOD} batch jobs; in one first-come queue {behind}."
    console.print(
        f"OK: all {sum(SENT.values())} requests answered right. A critical chat {text}",
        style="bold green",
        highlight=False,
    )
    return True


def _end_on_signals() -> None:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: by a cancellation, so that it tidies up."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _remove_topology_at_end(stack: AsyncExitStack, settings: Settings) -> None:
    """Through a separate connection, because the worker's are closed by then."""
    connection = await stack.enter_async_context(
        Connection(settings.broker_url, name="lanekeeper demo", ssl_context=settings.ssl_context())
    )
    topology = declare(settings.lane_specs(), names=settings.names(), broker_version=connection.version)
    stack.push_async_callback(remove, topology, connection)


def _for_demo(settings: Settings) -> Settings:
    """The default lanes without batches, limits or caps, with short pauses; twelve slots for batch, unless set."""
    ranks = {lane.name: lane.rank for lane in DEFAULT_LANES}
    live = BatchesSettings(enabled=False)
    lanes = {
        name: lane.model_copy(update={"enabled": name in ranks, "rank": ranks.get(name, lane.rank), "batches": live})
        for name, lane in settings.lanes.items()
    }
    update = {
        "lanes": lanes,
        "retry": settings.retry.model_copy(update={"base_s": 0.2, "span_s": 6.0}),
        "budget": BudgetSettings(),
        "handlers": {"cut": HandlerSettings(run=f"{__name__}:{cut.__name__}")},
        "pipelines": {"ingest": PipelineSettings(steps=INGEST)},
        "caps": CapsSettings(),
    }
    settings = settings.model_copy(update=update)
    has_slots = lanes[BATCH.name].slots_max is not None
    return settings if has_slots else _with_batch_lane(settings, slots=BATCH_SLOTS, slots_max=BATCH_SLOTS)


def _with_batch_lane(settings: Settings, **update: Any) -> Settings:
    batch = settings.lanes[BATCH.name].model_copy(update=update)
    return settings.model_copy(update={"lanes": {**settings.lanes, BATCH.name: batch}})


# ---- what the acts share ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def working(settings: Settings, *, lanes: tuple[str, ...] = ()) -> AsyncIterator[tuple[Worker, Client]]:
    """Run a worker of these lanes (none given: all) and a client inside the block, which begins when it consumes."""
    stop, ready = asyncio.Event(), asyncio.Event()
    async with (
        assemble(settings, lanes=lanes, declares=True) as parts,
        Client(settings.broker_url, names=parts.broker.names) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(worker.run(parts, stop=stop, grace_s=1.0, on_ready=ready.set), name="worker")
        try:
            await ready.wait()
            yield parts, client
        finally:
            stop.set()


async def _answer(
    client: Client, body: str | bytes | dict[str, str], *, key: str, **options: Unpack[Options]
) -> Final | None:
    """The answer to a prompt, or to a whole body; None if there is none."""
    asked = {"prompt": body} if isinstance(body, str) else body
    with suppress(LanekeeperError):
        return await client.request(asked, key=key, timeout_s=ANSWER_WITHIN_S, **options)
    return None


def share_ms(waits_ms: list[int], share: float) -> int:
    """The quantile `share` of the waits; 0 if there is none."""
    ordered = sorted(waits_ms)
    return ordered[max(0, ceil(len(ordered) * share) - 1)] if ordered else 0


# ---- a flood, and chats that overtake it -----------------------------------------------------------------------------

FLOOD = 500
CHATS = 40
SENT = {CRITICAL.name: CHATS, NORMAL.name: CHATS, BATCH.name: FLOOD}


@dataclass(slots=True)
class Score:
    """The requests of one lane so far."""

    expected: int
    asked: int = 0
    right: int = 0
    retried: int = 0
    waits_ms: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


Scores = dict[str, Score]


async def flood(client: Client, scores: Scores, *, lane: str | None = None) -> float:
    """Send the batch jobs, then the chats. `lane`: of all; None: each to its own. Returns the seconds it took."""

    async def ask(its_lane: str, number: int) -> None:
        score, mark = scores[its_lane], f"request {its_lane} {number} of the demo."
        score.asked += 1
        prompt = f"{mark} [[fault: overloaded x1]]" if number % 25 == 12 else mark
        try:
            key = f"{lane or its_lane}.demo.load"
            final = await client.request({"prompt": prompt}, key=key, timeout_s=ANSWER_WITHIN_S)
        except LanekeeperError as error:
            score.waits_ms.append(0)
            score.wrong.append(f"{its_lane} {number}: {error}")
            return
        score.waits_ms.append(final.wait_ms)
        score.retried += final.attempt > 1
        if mark in final.text:  # the simulated provider echoes the prompt
            score.right += 1
        else:
            score.wrong.append(f"{its_lane} {number}: the answer is to another question")

    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(FLOOD):
            group.create_task(ask(BATCH.name, number))
        await asyncio.sleep(0.2)  # by then all of them are in the queue
        for number in range(CHATS):
            for chat in (CRITICAL, NORMAL):
                group.create_task(ask(chat.name, number))
                await asyncio.sleep(0.025)
    return loop.time() - began_s


# ---- a worker is killed, requests are sent twice, one is cancelled ---------------------------------------------------

JOBS = 60
TWICE = 20


async def unbroken(settings: Settings, client: Client, api: SimulatedAPI, *, folder: Path) -> tuple[str, bool]:
    """A worker is killed at work, some requests are sent again, one is cancelled."""

    async def ask(number: int) -> Final | None:
        prompt = f"job {number} of the second act"
        return await _answer(client, prompt, key=f"{BATCH.name}.demo.unbroken", message_id=f"unbroken-{number}")

    before = len(api.calls)
    async with _beside(settings, folder, api.base_url, signals.SERVICE_READY, "consume", "--lane", BATCH.name) as (
        second,
        _,
    ):
        asking = [asyncio.create_task(ask(number)) for number in range(JOBS)]
        with suppress(TimeoutError):  # until more calls run than the first worker can make
            first_makes = min(settings.lanes[BATCH.name].slots, JOBS // 2)
            await api.until(lambda: api.running > first_makes, timeout_s=5.0)
        second.kill()
        finals = await asyncio.gather(*asking)
    calls = list(api.calls)[before:]
    lost = finals.count(None)
    broken_off = sum(call.outcome == "client_gone" for call in calls)
    replayed = 0
    for number in range(TWICE):
        again, first = await ask(number), finals[number]
        replayed += again is not None and first is not None and again.replayed and again.body == first.body
    calls_again = len(api.calls) - before - len(calls)
    id = await client.publish({"prompt": "never asked"}, key=f"{BATCH.name}.demo.unbroken", delay_s=3600)
    cancelled = ""
    try:
        cancelled = await client.cancel(id)
        await client.result(id, wait_s=5)
        cancelled += ", answered"
    except LanekeeperError as problem:
        cancelled += f", {getattr(problem, 'code', problem)}"
    text = (
        f"killed at work: {broken_off} calls broken off, {lost} of {JOBS} requests lost, {len(calls)} calls made; "
        f"sent again: {replayed} of {TWICE} answered from the store, {calls_again} calls made; "
        f"cancelled in a delay: {cancelled}"
    )
    return text, (lost, replayed, calls_again) == (0, TWICE, 0) and cancelled.endswith("cancelled")


# ---- a document is cut, summarised in parts, and put together --------------------------------------------------------

PARTS = 40
INGEST = (
    StepSpec(name="cut", handler="cut"),
    StepSpec(name="summaries", each="cut", prompt="Summarise: {{ item }}", lane=BATCH.name),
    StepSpec(name="combine", prompt="Put together: {{ summaries|join('; ') }}", lane=NORMAL.name),
)


async def cut(document: str) -> list[str]:
    """The handler of the pipeline's first step."""
    return document.split("\n\n")


async def ingested(client: Client, api: SimulatedAPI) -> tuple[str, bool]:
    """The pipeline runs with two failing steps, and is sent again: parts in order, nothing paid twice."""
    before, began_s = len(api.calls), asyncio.get_running_loop().time()
    parts = [f"part-{number} of the document" for number in range(PARTS)]
    document = json.dumps("\n\n".join([*parts[:-1], f"{parts[-1]} [[fault: overloaded x1]]"])).encode()

    key, headers = f"{NORMAL.name}.demo.ingest", {PIPELINE: "ingest"}
    ask = partial(_answer, client, document, key=key, message_id="document", headers=headers)
    final = await ask()
    took_s, calls = asyncio.get_running_loop().time() - began_s, len(api.calls) - before
    found = [] if final is None else re.findall(r"part-(\d+)", final.text)
    again = await ask()
    calls_again = len(api.calls) - before - calls
    text = (
        f"a document in {len(found)} of {PARTS} parts: {took_s:.1f} s, {calls} calls made, two of them again after "
        f"an error; sent again: {calls_again} calls made"
    )
    is_right = found == [str(number) for number in range(PARTS)] and again is not None and again.replayed
    return text, is_right and calls == PARTS + 3 and calls_again == 0


@asynccontextmanager
async def _beside(
    settings: Settings, folder: Path, provider_url: str, ready: str, *line: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """Another process, with the event `ready` of its log. The AMQP URL is passed in a file, because of its password."""
    config = folder / "beside.toml"
    config.touch(mode=0o600)
    config.write_text(f"amqp_url = {json.dumps(settings.broker_url)}\n", encoding="utf-8")
    sets = {  # as options, so that neither the environment nor a file overrides them
        "store_url": settings.store,
        "namespace": settings.namespace,
        "anthropic_base_url": provider_url,
        "anthropic_api_key": "simulated",
        "gateway.host": "127.0.0.1",
        "gateway.port": "0",
        "gateway.keys": "{}",
        "log_format": "json",
    }
    for name, lane in settings.lanes.items():
        sets |= {f"lanes.{name}.enabled": json.dumps(lane.enabled), f"lanes.{name}.rank": str(lane.rank)}
        sets[f"lanes.{name}.batches.enabled"] = "false"
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.cli.main", *line, "--config", str(config), *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    event = {}
    try:
        assert process.stderr is not None
        async with asyncio.timeout(ANSWER_WITHIN_S):
            async for text in process.stderr:
                if ready.encode() in text:
                    event = json.loads(text)
                    break
        yield process, event
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


# ---- Anthropic's SDK, of which only the address is changed -----------------------------------------------------------

SDK_JOBS = 120
SDK_CALLS = 10


async def by_sdk(settings: Settings, client: Client, api: SimulatedAPI, *, folder: Path) -> tuple[str, bool]:
    """Streamed calls of Anthropic's SDK through a gateway, while batch jobs wait."""
    async with (
        _beside(settings, folder, api.base_url, signals.GATEWAY_READY, "gateway") as (_, ready),
        AsyncAnthropic(
            api_key="any", base_url=ready["url"], http_client=DefaultAsyncHttpxClient(trust_env=False)
        ) as sdk,
        asyncio.TaskGroup() as group,
    ):
        asked = [
            _answer(client, f"job {number} beside the SDK", key=f"{BATCH.name}.demo.sdk") for number in range(SDK_JOBS)
        ]
        jobs = [group.create_task(each) for each in asked]
        calls: dict[str, list[asyncio.Task[int | None]]] = {CRITICAL.name: [], BATCH.name: []}
        for number in range(SDK_CALLS):
            await asyncio.sleep(0.05)
            for lane, tasks in calls.items():
                tasks.append(group.create_task(_first_token_ms(sdk, lane, number)))
    told, is_well = [], all(job.result() is not None for job in jobs)
    for lane, tasks in calls.items():
        first_ms = [found for task in tasks if (found := task.result()) is not None]
        is_well = is_well and len(first_ms) == SDK_CALLS
        p50, p95 = (share_ms(first_ms, share) for share in (0.5, 0.95))
        told.append(f"{lane} {p50} ms (p95 {p95} ms, {len(first_ms)} of {SDK_CALLS} answered)")
    return f"Anthropic's SDK among {SDK_JOBS} batch jobs, time to the first token: {', '.join(told)}", is_well


async def _first_token_ms(sdk: AsyncAnthropic, lane: str, number: int) -> int | None:
    loop = asyncio.get_running_loop()
    began_s, first_s, answer = loop.time(), None, ""
    text = f"call {number} of the SDK, and some words to stream"
    try:
        async with sdk.messages.stream(
            model="claude-haiku-5-5",
            max_tokens=100,
            messages=[{"role": "user", "content": text}],
            extra_headers={LANE_NAME: lane},
            timeout=ANSWER_WITHIN_S,
        ) as stream:
            async for piece in stream.text_stream:
                first_s = first_s or loop.time()
                answer += piece
    except AnthropicError:
        return None
    return round(1000 * (first_s - began_s)) if first_s is not None and text in answer else None


# ---- a bulk job, which the provider answers in batches at half price -------------------------------------------------

BULK = 300
BULK_MODEL = "claude-sonnet-5-5"
BULK_TOKENS = 800
PROCESSING_S = 2.0


async def in_batches(settings: Settings) -> tuple[str, bool]:
    """A bulk job, of which the provider leaves a few unanswered; its bill must be ours."""
    options = SimulatedOptions(batches=BatchOptions(processing_s=PROCESSING_S))
    async with SimulatedAPI(options) as api:
        settings = simulating(_with_batch_lane(settings, batches=BatchesSettings(enabled=True)), api.base_url)
        async with working(settings, lanes=(BATCH.name,)) as (parts, client):

            async def ask(number: int) -> bool:
                mark = f"request {number} of the bulk job. [[tokens: {BULK_TOKENS}]]"
                prompt = f"{mark} [[fault: expired x1]]" if number % 50 == 7 else mark
                body = {"prompt": prompt, "model": BULK_MODEL}
                final = await _answer(client, body, key=f"{BATCH.name}.demo.bulk")
                return final is not None and mark in final.text

            right = sum(await asyncio.gather(*map(ask, range(BULK))))
            spent = parts.budgeting.spending.totals()[LANE][BATCH.name]
        created, live = len(api.batches.all), api.stats()["calls"]
        billed_usd = float(api.ledger.usd)
    text = (
        f"{right} of {BULK} answered right, in {created} {'batch' if created == 1 else 'batches'} and {live} calls for "
        f"what expired in them: ${spent.usd:.2f} in place of ${spent.usd + spent.saved_usd:.2f}, "
        f"${spent.saved_usd:.2f} saved; the provider's bill: ${billed_usd:.2f}"
    )
    return text, right == BULK and live < BULK / 10 and abs(spent.usd - billed_usd) < CENT


# ---- a small budget: with Lanekeeper's budget gate, and with workers that call whenever they are free ----------------

WINDOW_S = 12.0
BUDGET_JOBS = 300
RECORDED_CHATS = (
    (0.7, 38), (1.8, 10), (2.9, 10), (3.6, 10), (4.2, 10), (4.5, 34), (5.0, 102), (5.7, 27), (6.1, 81), (6.4, 102),
    (6.5, 10), (6.9, 4), (7.3, 28), (8.1, 11), (9.0, 10), (10.1, 25), (10.7, 10),
)  # fmt: skip
"""When each came, in seconds, and its input tokens, divided by forty because the simulated provider's limits are low: a
part of the recordings that `benchmarks/traces` describes (Azure LLM inference trace 2023)."""
CHARACTERS_PER_TOKEN = 4  # as the simulated API counts
BURST_S = 2.0  # larger buckets, which are full at the start, would be a large part of such a short run's budget
ACCOUNT = SimulatedOptions(
    output_tokens=80,
    requests_per_minute=300,
    input_tokens_per_minute=36_000,
    output_tokens_per_minute=30_000,
    burst_s=BURST_S,
)
TEXT = "the quick brown fox jumps over the lazy dog and thinks of lanes again, " * 4
SOON_S = 1.0
USED_LEAST = 0.85


@dataclass(slots=True)
class Spending:
    """What one run of the budget act's load spent, as its requests and its simulated provider measured it."""

    waits_ms: list[int] = field(default_factory=list)
    answered: int = 0
    refused: int = 0
    calls: int = 0
    used: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def is_well(self, ungated: "Spending") -> bool:
        """Measured against the run without a gate, because both suffer on a busy machine."""
        is_soon = share_ms(self.waits_ms, 0.95) < max(1000 * SOON_S, share_ms(ungated.waits_ms, 0.95) / 3)
        is_used = self.used >= USED_LEAST * min(1.0, ungated.used)
        return is_soon and is_used and not self.wrong and self.refused == 0


async def budget(settings: Settings) -> tuple[Spending, Spending]:
    """The same load at the same time through Lanekeeper, and by workers that repeat a 429 after its `retry-after`."""
    async with AsyncExitStack() as stack:
        gated, ungated = [await stack.enter_async_context(SimulatedAPI(ACCOUNT)) for _ in range(2)]
        settings = simulating(settings, gated.base_url)
        settings = settings.model_copy(update={"budget": BudgetSettings(burst_s=BURST_S)})
        model = settings.lanes[BATCH.name].model  # one model for both lanes, so that they share an account
        provider = AnthropicProvider.at(ungated.base_url, api_key="simulated")
        stack.push_async_callback(provider.aclose)
        parts, client = await stack.enter_async_context(working(settings))
        slots = {lane.name: asyncio.Semaphore(lane.slots + lane.due_slots) for lane in parts.lanes}

        async def through_lanes(lane: str, prompt: str) -> None:
            await client.request({"prompt": prompt, "model": model}, key=f"{lane}.demo.budget", timeout_s=600)

        async def without_gate(lane: str, prompt: str) -> None:
            request = unpublished(prompt, model=model, max_tokens=1024)
            async with slots[lane]:
                while True:
                    try:
                        await provider.stream(request, timeout_s=60, parts=None)
                        return
                    except RateLimitedError as limited:
                        await asyncio.sleep(limited.retry_after_s or 0.5)

        both = await asyncio.gather(_spend(through_lanes, gated), _spend(without_gate, ungated))
        return both[0], both[1]


async def _spend(asking: Callable[[str, str], Awaitable[object]], api: SimulatedAPI) -> Spending:
    found, clock, rng = Spending(), asyncio.get_running_loop().time, random.Random(1)

    async def ask(lane: str, number: int, text: str = TEXT) -> None:
        asked_s, takes_ms = clock(), rng.randint(200, 600)
        try:
            await asking(lane, f"{lane} {number}: {text}[[latency: {takes_ms}ms]]")
        except Exception as error:
            found.wrong.append(f"{lane} {number}: {error}")
        finally:
            if not lane.startswith(BATCH.name):
                found.waits_ms.append(max(0, round(1000 * (clock() - asked_s)) - takes_ms))

    await asyncio.gather(ask(CRITICAL.name, 0), ask(BATCH.name, 0))  # the budget learns limits and sizes from these
    found.waits_ms.clear()
    before, began_s = _counts(api), clock()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(BATCH.name, number)) for number in range(BUDGET_JOBS)]
        for at_s, tokens in RECORDED_CHATS:
            await asyncio.sleep(max(0.0, began_s + 1.0 + at_s - clock()))  # by then all batch jobs wait
            text = (TEXT * (1 + tokens * CHARACTERS_PER_TOKEN // len(TEXT)))[: tokens * CHARACTERS_PER_TOKEN]
            tasks.append(group.create_task(ask(CRITICAL.name, len(tasks), text)))
        await asyncio.sleep(max(0.0, began_s + WINDOW_S - clock()))
        counts, could_s = _counts(api) - before, clock() - began_s + BURST_S
        for task in tasks:
            task.cancel()
    found.answered, found.refused, found.calls = counts["ok"], counts["rate_limited"], counts["calls"]
    found.used = max(
        (counts["calls"] + counts["running"] - counts["rate_limited"]) / ACCOUNT.requests_per_minute,
        counts["input_tokens"] / ACCOUNT.input_tokens_per_minute,
        counts["output_tokens"] / ACCOUNT.output_tokens_per_minute,
    ) * (60 / could_s)
    return found


def _counts(api: SimulatedAPI) -> Counter[str]:
    stats = api.stats()
    tokens = {name: stats[name] for name in ("running", "input_tokens", "output_tokens")}
    return Counter(stats["outcomes"], calls=stats["calls"] - stats["running"], **tokens)


# ---- a provider fails for a while, and another one answers in its place ----------------------------------------------

UP = SimulatedOptions(latency_ms=300)
DOWN = SimulatedOptions(faults={"unavailable": 1.0})
CALLS_MOST = 1.5


async def outage(settings: Settings) -> tuple[str, bool]:
    """Requests go on while the first of two providers fails and comes back."""
    log = io.StringIO()
    tasks: list[asyncio.Task[Final | None]] = []
    async with SimulatedAPI(UP) as first, SimulatedAPI(UP) as second, asyncio.TaskGroup() as group:
        settings = simulating(settings, first.base_url, second.base_url)

        async def keep_asking(client: Client) -> None:
            while True:
                asked = _answer(client, f"request {len(tasks)} of the last act", key=f"{CRITICAL.name}.demo.outage")
                tasks.append(group.create_task(asked))
                await asyncio.sleep(0.025)

        def answered() -> int:
            return int(first.stats()["outcomes"].get("ok", 0))

        with logs.configured(service="lanekeeper demo", level="info", format="json", stream=log):
            async with working(settings, lanes=(CRITICAL.name,)) as (_, client):
                asking = group.create_task(keep_asking(client))
                await asyncio.sleep(0.5)
                first.configure(DOWN)
                await asyncio.sleep(2.0)
                first.configure(UP)
                enough = answered() + 20
                with suppress(TimeoutError):
                    await first.until(lambda: answered() >= enough, timeout_s=10.0)
                asking.cancel()
                finals = await asyncio.gather(*tasks)
        calls = first.stats()["calls"] + second.stats()["calls"]
    answers = [final for final in finals if final is not None]
    calls_per_answer = calls / max(1, len(answers))
    elsewhere = sum(final.provider == "simulated-2" for final in answers)
    events = [json.loads(line) for line in log.getvalue().splitlines()]
    breaker = [event["state"] for event in events if event["event"] == signals.BREAKER_CHANGED]
    text = (
        f"a provider down: {finals.count(None)} of {len(finals)} requests lost, {elsewhere} answered by the next, "
        f"{calls_per_answer:.2f} calls an answer (at most {CALLS_MOST:g}), its breaker "
        f"{', '.join(breaker) or 'closed all the time'}"
    )
    closed_again = breaker[:1] == ["open"] and breaker[-1:] == ["closed"]
    return text, None not in finals and calls_per_answer <= CALLS_MOST and closed_again


# ---- what is shown, in 80 columns ------------------------------------------------------------------------------------


async def _watch(console: Console, scores: Scores) -> None:
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            told = [f"{lane} {score.right}/{score.expected} answered" for lane, score in scores.items()]
            console.print(f"  {'   '.join(told)}", highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            table = _table("lane", "sent", "answered", "retried", "wait p50", "p95")
            for lane, score in scores.items():
                waits = _shown(score.waits_ms, 0.5, 0.95)
                table.add_row(lane, str(score.asked), str(score.right), str(score.retried), *waits)
            live.update(table, refresh=True)
            await asyncio.sleep(REDRAW_S)


def _show_flood(console: Console, *runs: tuple[str, Scores, float]) -> None:
    title = "the same load, the same broker, provider and number of workers"
    table = _table("", "lane", "answered", "retried", "wait p50", "p95", "max", "total", title=title)
    for name, scores, total_s in runs:
        for number, (lane, score) in enumerate(scores.items()):
            table.add_row(
                "" if number else name,
                lane,
                f"{score.right}/{score.expected}",
                str(score.retried),
                *_shown(score.waits_ms, 0.5, 0.95, 1.0),
                "" if number else f"{total_s:.1f} s",
            )
    console.print(table)
    console.print(
        "One queue lets the flood have every worker and ends it sooner; the lanes keep theirs free for what is urgent.",
        style="dim",
    )


def _show_budget(console: Console, gated: Spending, ungated: Spending) -> None:
    title = f"{ACCOUNT.requests_per_minute} requests a minute, {BUDGET_JOBS} batch jobs; critical waits"
    table = _table("", "wait p50", "p95", "answered", "429s", "calls/answer", "used", title=title)
    for name, spent in (("the budget gate", gated), ("whoever calls first", ungated)):
        table.add_row(
            name,
            *_shown(spent.waits_ms, 0.5, 0.95),
            str(spent.answered),
            str(spent.refused),
            f"{spent.calls / max(1, spent.answered):.2f}",
            f"{spent.used:.0%}",
        )
    console.print(table)
    console.print("What the gate leaves is kept for the lanes above batch, so that they find it at once.", style="dim")
    for request in gated.wrong[:5]:
        console.print(f"  not answered: {request}", style="red", highlight=False)


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "lane") else "right", no_wrap=True)
    return table


def _shown(waits_ms: list[int], *shares: float) -> Iterator[str]:
    for value in (share_ms(waits_ms, share) for share in shares):
        yield f"{value} ms" if value < 10_000 else f"{value / 1000:.1f} s"
