"""The acts of the demo on one machine: a flood of batch jobs that chats overtake, compared with a single queue; a
worker that is killed; Anthropic's SDK through the gateway; a small budget, compared with workers that do not check a
provider's limits before they call it; and a provider that fails for a while.
"""

import asyncio
import secrets
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import uvloop
from rich.console import Console

from lanekeeper.amqp.connection import Connection
from service.config.budget_sections import BudgetSettings, CapsSettings
from service.config.copies import with_broker, with_provider, with_store
from service.config.sections import LanesSettings
from service.config.settings import Settings
from service.demo import budget, by_sdk, load, outage, unbroken
from service.demo.table import show_budget, show_by_sdk, show_outage, show_unbroken, show_verdict, watching
from service.demo.working import working
from service.private_broker.broker import private_broker
from service.simulated.app import SimulatedAPI
from service.simulated.options import SimulatedOptions
from topology.broker.admin.remove import remove
from topology.declaration import declare
from topology.lanes import BATCH

BATCH_SLOTS = 12
LATENCY_MS = 300
RETRY_BASE_S, RETRY_SPAN_S = 0.2, 6.0
PLAIN_WIDTH = 110
"""How many characters a line of the demo's output has if the output is not a terminal."""


def run(settings: Settings) -> bool:
    """Run the demo and print its results. Returns whether every act succeeded."""
    return uvloop.run(_tell(settings))


async def _tell(settings: Settings) -> bool:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    _end_on_signals()
    async with AsyncExitStack() as stack:
        url = settings.broker_url
        if "amqp_url" not in settings.model_fields_set:
            console.print("starting a broker …", style="dim")
            url = (await stack.enter_async_context(private_broker(say=console.print))).amqp_url
        settings = _for_demo(with_broker(settings, url, namespace=f"demo-{secrets.token_hex(4)}"))
        folder = stack.enter_context(TemporaryDirectory(prefix="lanekeeper-demo-"))
        settings = with_store(settings, f"sqlite:///{quote(folder)}/store.sqlite")
        api = await stack.enter_async_context(SimulatedAPI(SimulatedOptions(latency_ms=LATENCY_MS)))
        settings = with_provider(settings, api.base_url, key="simulated")
        await _remove_topology_at_end(stack, settings)
        async with working(settings) as (parts, client):
            console.print(
                f"RabbitMQ {parts.version} at {settings.broker}, a simulated provider that answers in {LATENCY_MS} ms; "
                f"{load.BATCH_JOBS} batch jobs, then {load.CHATS} critical and {load.CHATS} normal chats among them",
                style="dim",
                highlight=False,
            )
            lanes = load.Board()
            async with watching(console, lanes, {activity.lane: activity for activity in parts.activities}):
                await load.send(client, lanes)
            console.print("a second worker, which is killed in the middle of its work …", style="dim")
            unbroken_act = await unbroken.run(settings, client, api, folder=Path(folder))
            console.print("Anthropic's SDK, through the gateway, among batch jobs …", style="dim")
            sdk_act = await by_sdk.run(settings, client, parts.store)
        console.print("the first load again, through one first-come queue …", style="dim")
        api.configure(api.options)  # resets the counts, so that the same faults occur again
        async with working(_with_single_queue(settings), lanes=(BATCH.name,)) as (_, client):
            queued = load.Board()
            await load.send(client, queued, lane=BATCH.name)
        console.print(
            f"a provider that allows {budget.ACCOUNT.requests_per_minute} requests a minute, {budget.JOBS} batch jobs "
            "and a critical request now and then; the same without a gate …",
            style="dim",
            highlight=False,
        )
        gated, ungated = await budget.run(settings)
        console.print("two providers, of which the first goes down and comes back …", style="dim")
        outage_act = await outage.run(settings)
        show_unbroken(console, unbroken_act)
        show_by_sdk(console, sdk_act)
        show_outage(console, outage_act)
        show_budget(console, gated, ungated)
        show_verdict(console, lanes, queued)
        return lanes.all_right and unbroken_act.is_well and sdk_act.is_well and gated.is_well and outage_act.is_well


def _end_on_signals() -> None:
    """Make SIGTERM, and SIGHUP (a terminal that closes), end the demo as Ctrl-C does: by a cancellation, so that the
    demo removes its queues and exchanges."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _remove_topology_at_end(stack: AsyncExitStack, settings: Settings) -> None:
    """Remove the demo's queues and exchanges when `stack` is closed. This uses a separate connection, because the
    worker's are closed by then."""
    connection = await stack.enter_async_context(
        Connection(settings.broker_url, name="lanekeeper demo", ssl_context=settings.ssl_context())
    )
    topology = declare(settings.lane_specs(), names=settings.names(), broker_version=connection.version)
    stack.push_async_callback(remove, topology, connection)


def _for_demo(settings: Settings) -> Settings:
    """The user's settings, changed for the demo: no limits or caps of a real provider, short pauses before retries, and
    twelve slots for the batch lane, unless the user has set its slots."""
    lanes = settings.lanes if settings.lanes.batch.slots_max else _with_batch_slots(settings, BATCH_SLOTS)
    return settings.model_copy(
        update={
            "lanes": lanes,
            "retry": settings.retry.model_copy(update={"base_s": RETRY_BASE_S, "span_s": RETRY_SPAN_S}),
            "budget": BudgetSettings(),
            "caps": CapsSettings(),
        }
    )


def _with_single_queue(settings: Settings) -> Settings:
    """The settings for the comparison with a single queue: all requests go to the batch lane, which has the slots of
    all lanes."""
    slots = sum(lane.slots for lane in settings.lane_specs())
    return settings.model_copy(update={"lanes": _with_batch_slots(settings, slots)})


def _with_batch_slots(settings: Settings, slots: int) -> LanesSettings:
    batch = settings.lanes.batch.model_copy(update={"slots": slots, "slots_max": slots})
    return settings.lanes.model_copy(update={"batch": batch})
