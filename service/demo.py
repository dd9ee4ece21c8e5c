"""`lanekeeper demo`: three acts, each of which shows one promise and says whether it was kept. START HERE:
`tell_story`."""

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from consumers.background import background_task
from consumers.failures import RateLimitedError
from consumers.providers.anthropic import AnthropicProvider
from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.replies import Final
from lanekeeper.telemetry import signals
from service.config.settings import BatchesSettings, BudgetSettings, CapsSettings, Settings, in_namespace, simulating
from service.simulated.app import SimulatedAPI, SimulatedOptions
from service.worker import running as worker
from service.worker.assembly import Worker, assemble
from topology.broker.admin import remove
from topology.codec.decoding import unpublished
from topology.declaration import declare
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, NORMAL

ANSWER_WITHIN_S = 90.0
BATCH_SLOTS = 12
LATENCY_MS = 300
MOST_WIDTH = 80
LINE_EVERY_S = 2.0
NOW_TRY = """\
  ./dev up                      Lanekeeper with a page, on this machine, until
                                Ctrl-C; in another terminal, after its `source`:
  lanekeeper send --stream "Name three rivers."
  lanekeeper send "[[fault: overloaded x2]] answered after two retries"
  lanekeeper send --lane batch --no-wait "Name all rivers."
  docs/install.md               Docker, your own broker, your application
  docs/simulated.md             the provider of this demo, and its faults
  docs/README.md                everything else, such as your own lanes"""


class Stage:
    """Where the acts tell what they do."""

    def __init__(self) -> None:
        self._console = Console()
        self._console = Console(width=min(MOST_WIDTH, self._console.width if self._console.is_terminal else MOST_WIDTH))
        self.failed: list[str] = []

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, highlight=False, markup=False)

    def act(self, title: str, text: str) -> None:
        self.say(f"\n{title}", "bold")
        self.say(text)

    def show(self, table: Table) -> None:
        self._console.print(table)

    def verdict(self, what: str, text: str, *, is_well: bool) -> None:
        self.say(f"{'OK:' if is_well else 'FAILED:'} {text}", "green" if is_well else "bold red")
        if not is_well:
            self.failed.append(what)

    @asynccontextmanager
    async def waiting(self, progress: Callable[[], str]) -> AsyncIterator[None]:
        """Say how far what the block waits for is, whenever that has changed."""

        async def tell() -> None:
            said = ""
            while True:
                await asyncio.sleep(LINE_EVERY_S)
                if (text := progress()) != said:
                    self.say(f"  … {text}", "dim")
                    said = text

        async with background_task(tell(), name="demo progress"):
            yield


async def tell_story(settings: Settings) -> bool:
    """Run the demo and print its results. Returns whether every act kept its promise."""
    stage = Stage()
    _end_on_signals()
    async with AsyncExitStack() as stack:
        stage.say(f"using the broker at {settings.broker}; what the demo declares on it is removed at the end")
        folder = stack.enter_context(TemporaryDirectory(prefix="lanekeeper-demo-"))
        store_url = f"sqlite:///{quote(folder)}/store.sqlite"
        settings = in_namespace(_for_demo(settings), f"demo-{secrets.token_hex(4)}", store_url=store_url)
        api = await stack.enter_async_context(SimulatedAPI(SimulatedOptions(latency_ms=LATENCY_MS)))
        settings = simulating(settings, api.base_url)
        await _remove_topology_at_end(stack, settings)
        await urgent_first(stage, settings)
        await nothing_lost(stage, settings, api, folder=Path(folder))
        await in_the_right_order(stage, settings)
    if stage.failed:
        stage.say(f"\nFAILED: {', '.join(stage.failed)}", "bold red")
        return False
    stage.say("\nAll three acts kept their promise. Now try", "bold")
    stage.say(NOW_TRY)
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
        "caps": CapsSettings(),
    }
    settings = settings.model_copy(update=update)
    has_slots = lanes[BATCH.name].slots_max is not None
    return settings if has_slots else _with_batch_lane(settings, slots=BATCH_SLOTS, slots_max=BATCH_SLOTS)


def _with_batch_lane(settings: Settings, **update: Any) -> Settings:
    batch = settings.lanes[BATCH.name].model_copy(update=update)
    return settings.model_copy(update={"lanes": {**settings.lanes, BATCH.name: batch}})


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


def share_ms(waits_ms: list[int], share: float) -> int:
    """The quantile `share` of the waits; 0 if there is none."""
    ordered = sorted(waits_ms)
    return ordered[max(0, ceil(len(ordered) * share) - 1)] if ordered else 0


# ---- act 1: a flood, and chats that overtake it ----------------------------------------------------------------------

FLOOD = 500
CHATS = 40
SENT = {CRITICAL.name: CHATS, NORMAL.name: CHATS, BATCH.name: FLOOD}


@dataclass(slots=True)
class Score:
    """The requests of one lane so far."""

    expected: int
    right: int = 0
    retried: int = 0
    waits_ms: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    def p(self, share: float) -> str:
        return _duration(share_ms(self.waits_ms, share))


Scores = dict[str, Score]


async def urgent_first(stage: Stage, settings: Settings) -> None:
    """The same requests through lanes, and through one queue in which the first to come is the first served."""
    stage.act(
        "Act 1: urgent requests are answered first",
        f"{FLOOD} batch jobs are waiting when {CHATS} critical and {CHATS} normal chats arrive. The (simulated) model "
        f"needs {LATENCY_MS} ms for each. First with lanes:",
    )
    lanes, queued = ({lane: Score(count) for lane, count in SENT.items()} for _ in range(2))
    async with working(settings) as (_, client):
        await flood(stage, client, lanes)
    stage.say("Now the same load through one queue, first come, first served:")
    every_slot = sum(lane.slots for lane in settings.lane_specs())
    settings = _with_batch_lane(settings, slots=every_slot, slots_max=every_slot)
    async with working(settings, lanes=(BATCH.name,)) as (_, client):
        await flood(stage, client, queued, lane=BATCH.name)
    table = _table("", "lane", "answered", "retried", "wait p50", "p95", "max")
    for name, scores in (("with lanes", lanes), ("first come", queued)):
        for number, (lane, score) in enumerate(scores.items()):
            answered = f"{score.right}/{score.expected}"
            waits = [score.p(share) for share in (0.5, 0.95, 1.0)]
            table.add_row("" if number else name, lane, answered, str(score.retried), *waits)
    stage.show(table)
    if wrong := [request for score in lanes.values() for request in score.wrong]:
        for request in wrong[:5]:
            stage.say(f"  not answered right: {request}", "red")
        stage.verdict("act 1", f"{len(wrong)} requests were not answered right", is_well=False)
        return
    chats, behind = lanes[CRITICAL.name], queued[CRITICAL.name]
    is_well = share_ms(chats.waits_ms, 0.5) < max(1000 * SOON_S, share_ms(behind.waits_ms, 0.5))
    later_s = lanes[BATCH.name].ended_s - queued[BATCH.name].ended_s
    text = (
        f"half of the critical chats waited less than {chats.p(0.5)}, 95 % less than {chats.p(0.95)}. In one queue "
        f"half waited longer than {behind.p(0.5)}."
    )
    if later_s >= 1:
        text += f" The price: the batch jobs finished {later_s:.0f} s later. LANEKEEPER_LANES__BATCH__SLOTS sets it."
    stage.verdict("act 1", text, is_well=is_well)


async def flood(stage: Stage, client: Client, scores: Scores, *, lane: str | None = None) -> None:
    """Send the batch jobs, then the chats. `lane`: of all; None: each to its own."""
    clock = asyncio.get_running_loop().time
    began_s = clock()

    async def ask(its_lane: str, number: int) -> None:
        score, mark = scores[its_lane], f"request {its_lane} {number} of the demo."
        prompt = f"{mark} {'[[fault: overloaded x1]]' if number % 25 == 12 else ''} {lane or ''}"
        try:
            key = f"{lane or its_lane}.demo.load"
            final = await client.request({"prompt": prompt}, key=key, timeout_s=ANSWER_WITHIN_S)
        except LanekeeperError as error:
            score.waits_ms.append(0)
            score.wrong.append(f"{its_lane} {number}: {error}")
            return
        score.waits_ms.append(final.wait_ms)
        score.retried += final.attempt > 1
        score.ended_s = clock() - began_s
        if mark in final.text:  # the simulated provider echoes the prompt
            score.right += 1
        else:
            score.wrong.append(f"{its_lane} {number}: the answer is to another question")

    def progress() -> str:
        return ", ".join(f"{lane} {score.right}/{score.expected}" for lane, score in scores.items()) + " answered"

    async with stage.waiting(progress), asyncio.TaskGroup() as group:
        for number in range(FLOOD):
            group.create_task(ask(BATCH.name, number))
        await asyncio.sleep(0.2)  # by then all of them are in the queue
        for number in range(CHATS):
            for chat in (CRITICAL, NORMAL):
                group.create_task(ask(chat.name, number))
                await asyncio.sleep(0.025)


# ---- act 2: a worker is killed, and requests are sent twice ----------------------------------------------------------

JOBS = 60
TWICE = 20


async def nothing_lost(stage: Stage, settings: Settings, api: SimulatedAPI, *, folder: Path) -> None:
    """A worker is killed at work, and some requests are sent again."""
    stage.act(
        "Act 2: no accepted request is lost, and a repeated one is not paid twice",
        f"Two workers get {JOBS} batch jobs. One of them is killed (SIGKILL) while it calls the model. Then {TWICE} of "
        "the requests are sent again, as after a lost answer.",
    )
    async with working(settings) as (_, client):

        async def ask(number: int) -> Final | None:
            with suppress(LanekeeperError):
                return await client.request(
                    {"prompt": f"job {number} of the second act"},
                    key=f"{BATCH.name}.demo.unbroken",
                    message_id=f"unbroken-{number}",
                    timeout_s=ANSWER_WITHIN_S,
                )
            return None

        before = len(api.calls)
        answered: list[Final | None] = []

        async def ask_once(number: int) -> Final | None:
            answered.append(final := await ask(number))
            return final

        async with (
            stage.waiting(lambda: f"{len(answered)}/{JOBS} jobs answered" if answered else "the second worker starts"),
            _beside(settings, folder, api.base_url, signals.SERVICE_READY, "consume", "--lane", BATCH.name) as second,
        ):
            asking = [asyncio.create_task(ask_once(number)) for number in range(JOBS)]
            with suppress(TimeoutError):  # until more calls run than the first worker can make
                first_makes = min(settings.lanes[BATCH.name].slots, JOBS // 2)
                await api.until(lambda: api.running > first_makes, timeout_s=20.0)
            second.kill()
            finals = await asyncio.gather(*asking)
        calls = list(api.calls)[before:]
        replayed = 0
        for number in range(TWICE):
            again, first = await ask(number), finals[number]
            replayed += again is not None and first is not None and again.replayed and again.body == first.body
        calls_again = len(api.calls) - before - len(calls)
    lost = finals.count(None)
    broken_off = sum(call.outcome == "client_gone" for call in calls)
    text = (
        f"the kill interrupted {broken_off} calls; {lost} of {JOBS} requests were lost. Of {TWICE} repeated requests, "
        f"{replayed} were answered from the store, with {calls_again} further calls of the model."
    )
    stage.verdict("act 2", text, is_well=(lost, replayed, calls_again) == (0, TWICE, 0))


@asynccontextmanager
async def _beside(
    settings: Settings, folder: Path, provider_url: str, ready: str, *line: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that has logged the event `ready`. The AMQP URL is passed in a file, because of its password."""
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
    try:
        assert process.stderr is not None
        async with asyncio.timeout(ANSWER_WITHIN_S):
            async for text in process.stderr:
                if ready.encode() in text:
                    break
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


# ---- act 3: a small budget, with the budget gate, and with workers that call whenever they are free ------------------

WINDOW_S = 12.0
BUDGET_JOBS = 300
EVERY_S = 0.5
BURST_S = 2.0  # larger buckets, which are full at the start, would be a large part of such a short run's budget
ACCOUNT = SimulatedOptions(latency_ms=LATENCY_MS, requests_per_minute=300, burst_s=BURST_S)
SOON_S = 1.0
USED_LEAST = 0.75
"""On a machine with load 8 79 % were used, on a quiet one over 90 %."""


@dataclass(slots=True)
class BudgetRun:
    """What one run of the third act's load spent, as its requests and its simulated provider measured it."""

    waits_ms: list[int] = field(default_factory=list)
    answered: int = 0
    refused: int = 0
    used: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def is_well(self, ungated: "BudgetRun") -> bool:
        """Measured against the run without a gate, because both suffer on a busy machine."""
        is_soon = share_ms(self.waits_ms, 0.95) < max(1000 * SOON_S, share_ms(ungated.waits_ms, 0.95) / 3)
        is_used = self.used >= USED_LEAST * min(1.0, ungated.used)
        return is_soon and is_used and not self.wrong and self.refused == 0


async def in_the_right_order(stage: Stage, settings: Settings) -> None:
    """The same load at the same time through Lanekeeper, and by workers that repeat a 429 after its `retry-after`."""
    stage.act(
        "Act 3: a scarce budget is spent in the right order",
        f"The provider allows {ACCOUNT.requests_per_minute} requests a minute. {BUDGET_JOBS} batch jobs could use all "
        "of it, and a critical request arrives twice a second. Beside it runs the same load with plain workers, which "
        "call as soon as they are free, and try again after each 429:",
    )
    async with AsyncExitStack() as stack:
        with_gate, without = [await stack.enter_async_context(SimulatedAPI(ACCOUNT)) for _ in range(2)]
        settings = simulating(settings, with_gate.base_url)
        settings = settings.model_copy(update={"budget": BudgetSettings(burst_s=BURST_S)})
        model = settings.lanes[BATCH.name].model  # one model for both lanes, so that they share an account
        provider = AnthropicProvider.at(without.base_url, api_key="simulated")
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

        left_s = asyncio.get_running_loop().time() + WINDOW_S
        clock = asyncio.get_running_loop().time
        async with stage.waiting(lambda: f"{max(0.0, left_s - clock()):.0f} s left of {WINDOW_S:.0f}"):
            gated, ungated = await asyncio.gather(_spend(through_lanes, with_gate), _spend(without_gate, without))
    table = _table("", "critical wait p50", "p95", "answered", "429s", "budget used")
    for name, spent in (("with lanes", gated), ("plain workers", ungated)):
        waits = [_duration(share_ms(spent.waits_ms, share)) for share in (0.5, 0.95)]
        table.add_row(name, *waits, str(spent.answered), str(spent.refused), f"{spent.used:.0%}")
    stage.show(table)
    for request in gated.wrong[:5]:
        stage.say(f"  not answered: {request}", "red")
    is_well = gated.is_well(ungated)
    among, behind = (_duration(share_ms(spent.waits_ms, 0.95)) for spent in (gated, ungated))
    text = (
        f"95 % of the critical requests waited less than {among}, and the provider refused no call. With plain "
        f"workers: {behind}, and {ungated.refused} refused calls. The price: batch jobs get what is left, and at "
        "least their share (LANEKEEPER_BUDGET__LANES__BATCH__SHARE)."
    )
    if not is_well:
        text = (
            f"the promise is no 429, 95 % of critical requests within {SOON_S:g} s, and {USED_LEAST:.0%} of the usable "
            "budget used; is this machine busy with other programs?"
        )
    stage.verdict("act 3", text, is_well=is_well)


async def _spend(asking: Callable[[str, str], Awaitable[object]], api: SimulatedAPI) -> BudgetRun:
    found, clock, urgent = BudgetRun(), asyncio.get_running_loop().time, CRITICAL.name

    async def ask(lane: str, number: int) -> None:
        asked_s = clock()
        try:
            await asking(lane, f"{lane} {number}")
        except Exception as error:
            found.wrong.append(f"{lane} {number}: {error}")
        finally:
            if lane == urgent:
                found.waits_ms.append(max(0, round(1000 * (clock() - asked_s)) - LATENCY_MS))

    await asyncio.gather(ask(CRITICAL.name, 0), ask(BATCH.name, 0))  # the budget learns limits and sizes from these
    found.waits_ms.clear()
    before, began_s = api.stats(), clock()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(BATCH.name, number)) for number in range(BUDGET_JOBS)]
        while clock() < began_s + WINDOW_S:
            await asyncio.sleep(EVERY_S)
            tasks.append(group.create_task(ask(CRITICAL.name, len(tasks))))
        after, could_s = api.stats(), clock() - began_s + BURST_S
        for task in tasks:
            task.cancel()

    def counted(outcome: str) -> int:
        return int(after["outcomes"].get(outcome, 0) - before["outcomes"].get(outcome, 0))

    found.answered, found.refused = counted("ok"), counted("rate_limited")
    found.used = (after["calls"] - before["calls"] - found.refused) / ACCOUNT.requests_per_minute * (60 / could_s)
    return found


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "lane") else "right", no_wrap=True)
    return table


def _duration(ms: int) -> str:
    return f"{ms} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
