"""START HERE: runs the acts of the demo on one machine, and shows what each of them promises and kept."""

import asyncio
import secrets
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lanekeeper.amqp.connection import Connection
from service.config.loading import simulating, with_broker, with_store
from service.config.settings import BudgetSettings, CapsSettings, LaneSettings, Settings
from service.demo import acts
from service.demo.acts import SENT, Score, Scores, Spending, share_ms
from service.private_broker import private_broker
from service.side_tasks import beside
from service.simulated.app import SimulatedAPI, SimulatedOptions
from topology.broker.admin import remove
from topology.declaration import declare
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES

BATCH_SLOTS = 12
LATENCY_MS = 300
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
            act("starting a broker")
            url = (await stack.enter_async_context(private_broker(say=console.print))).amqp_url
        settings = _for_demo(with_broker(settings, url, namespace=f"demo-{secrets.token_hex(4)}"))
        folder = stack.enter_context(TemporaryDirectory(prefix="lanekeeper-demo-"))
        settings = with_store(settings, f"sqlite:///{quote(folder)}/store.sqlite")
        api = await stack.enter_async_context(SimulatedAPI(SimulatedOptions(latency_ms=LATENCY_MS)))
        settings = simulating(settings, api.base_url)
        await _remove_topology_at_end(stack, settings)
        async with acts.working(settings) as (parts, client):
            act(
                f"RabbitMQ {parts.version} at {settings.broker}, a simulated provider that answers in {LATENCY_MS} ms; "
                f"{acts.FLOOD} batch jobs, then {acts.CHATS} critical and {acts.CHATS} normal chats among them"
            )
            lanes, queued = ({lane: Score(count) for lane, count in SENT.items()} for _ in range(2))
            async with beside(_watch(console, lanes), name="demo table"):
                lanes_s = await acts.flood(client, lanes)
            act("a second worker, which is killed in the middle of its work")
            show("nothing lost", *await acts.unbroken(settings, client, api, folder=Path(folder)))
            act("Anthropic's SDK, through the gateway, among batch jobs")
            show("the SDK", *await acts.by_sdk(settings, client, api, folder=Path(folder)))
        act("two providers, of which the first goes down and comes back")
        outage = await acts.outage(settings)
        show("the outage", outage.text, outage.is_well)
        act(
            f"a provider that allows {acts.ACCOUNT.requests_per_minute} requests a minute, {acts.BUDGET_JOBS} batch "
            "jobs and a critical request now and then; the same without a gate"
        )
        gated, ungated = await acts.budget(settings)
        _show_budget(console, gated, ungated)
        if not gated.is_well(ungated):
            promised = f"no 429, a critical p95 below {acts.SOON_S:g} s, and {acts.USED_LEAST:.0%} of the budget used"
            show("the budget", f"promised is {promised}", is_well=False)
        act("the first load again, through one first-come queue")
        api.configure(api.options)  # resets the counts, so that the same faults occur again
        every_slot = _with_batch_slots(settings, sum(lane.slots for lane in settings.lane_specs()))
        settings = settings.model_copy(update={"lanes": every_slot})
        async with acts.working(settings, lanes=(BATCH.name,)) as (_, client):
            queued_s = await acts.flood(client, queued, lane=BATCH.name)
        _show_flood(console, ("lanes", lanes, lanes_s), ("first come", queued, queued_s))
        if wrong := [request for score in lanes.values() for request in score.wrong]:
            why = "\n".join(f"  not answered right: {request}" for request in wrong[:5])
            show("the flood", f"{why}\nFAILED: {len(wrong)} requests were not answered right", is_well=False)
    if failed:
        console.print(f"FAILED: {', '.join(failed)}", style="bold red", highlight=False)
        return False
    urgent, behind = lanes[CRITICAL.name].waits_ms, queued[CRITICAL.name].waits_ms
    console.print(
        f"OK: all {sum(SENT.values())} requests answered right. A critical chat waited "
        f"{_ms(share_ms(urgent, 0.5))} (p95 {_ms(share_ms(urgent, 0.95))}) among {acts.FLOOD} batch jobs; in one "
        f"first-come queue {_ms(share_ms(behind, 0.5))} (p95 {_ms(share_ms(behind, 0.95))}).",
        style="bold green",
        highlight=False,
    )
    return True


def _end_on_signals() -> None:
    """Make SIGTERM, and SIGHUP (a terminal that closes), end the demo as Ctrl-C does: by a cancellation, so that the
    demo removes its queues and exchanges."""
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
    """The user's settings with the default lanes, without limits or caps of a real provider, with short pauses before
    retries, and with twelve slots for the batch lane, unless the user has set its slots."""
    ranks = {lane.name: lane.rank for lane in DEFAULT_LANES}
    settings = settings.model_copy(
        update={
            "lanes": {
                name: lane.model_copy(update={"enabled": name in ranks, "rank": ranks.get(name, lane.rank)})
                for name, lane in settings.lanes.items()
            }
        }
    )
    has_slots = settings.lanes[BATCH.name].slots_max is not None
    return settings.model_copy(
        update={
            "lanes": settings.lanes if has_slots else _with_batch_slots(settings, BATCH_SLOTS),
            "retry": settings.retry.model_copy(update={"base_s": 0.2, "span_s": 6.0}),
            "budget": BudgetSettings(),
            "caps": CapsSettings(),
        }
    )


def _with_batch_slots(settings: Settings, slots: int) -> dict[str, LaneSettings]:
    batch = settings.lanes[BATCH.name].model_copy(update={"slots": slots, "slots_max": slots})
    return {**settings.lanes, BATCH.name: batch}


# ---- what is shown, in 80 columns ------------------------------------------------------------------------------------


async def _watch(console: Console, scores: Scores) -> None:
    """Show what happens in the lanes: on a terminal in a table that is redrawn, else in new lines."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            told = [f"{lane} {score.right}/{score.expected} answered" for lane, score in scores.items()]
            console.print(f"  {'   '.join(told)}", highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            table = _table("lane", "sent", "answered", "retried", "wait p50", "p95")
            for lane, score in scores.items():
                waits = (_ms(share_ms(score.waits_ms, share)) for share in (0.5, 0.95))
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
                *(_ms(share_ms(score.waits_ms, share)) for share in (0.5, 0.95, 1.0)),
                "" if number else f"{total_s:.1f} s",
            )
    console.print(table)
    console.print(
        "One queue lets the flood have every worker and ends it sooner; the lanes keep theirs free for what is urgent.",
        style="dim",
    )


def _show_budget(console: Console, gated: Spending, ungated: Spending) -> None:
    title = f"{acts.ACCOUNT.requests_per_minute} requests a minute, {acts.BUDGET_JOBS} batch jobs; critical waits"
    table = _table("", "wait p50", "p95", "answered", "429s", "calls/answer", "used", title=title)
    for name, spent in (("the budget gate", gated), ("whoever calls first", ungated)):
        table.add_row(
            name,
            *(_ms(share_ms(spent.waits_ms, share)) for share in (0.5, 0.95)),
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


def _ms(value: int) -> str:
    return f"{value} ms" if value < 10_000 else f"{value / 1000:.1f} s"
