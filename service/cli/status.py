"""`lanekeeper status`, `check` and `settings`: the state of the lanes, what is wrong, and every setting in effect."""

import asyncio
import json as json_text
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from io import StringIO
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanekeeper.contract.problems import BrokerError, SettingsError
from service.cli import brake, options, schedules
from service.cli.process import FAILED, connected, print_json, printable, run
from service.telemetry import redaction

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from service.checks import Finding
    from service.config.settings import Settings
    from service.status import Status

WORDS = {True: "ok", False: "wrong", None: "-"}
_DAY_S = 86_400
TOP_EVERY_S = 2.0
LONG_S = 30
DEAD_LETTERS = {
    "exported": "dead letters exported",
    "dropped": "dead letters dropped",
    "unparked": "invalid messages not kept",
}
WEBHOOKS = {
    "delivered": "outcomes posted to webhooks",
    "retrying": "posts that failed and are made again",
    "gone": "webhooks ended by 410",
    "undelivered": "outcomes that could not be posted",
    "running": "posts running",
}
CONTROL = {
    "refused": "control messages refused",
    "unanswered": "control messages that nobody was told of",
    "displaced": "cancellations of unseen ids forgotten",
}


@options.with_settings
def status(settings: "Settings", json: options.Json = False) -> None:
    """Show depth, consumers, running, waits and throughput of each lane.

    `depth`: the requests that wait in the lane's queues, and, after a `+`, those that wait in the broker's delay
    queues; the lines below say why, and until when. `running`: the number of running requests, then how many can run at
    the same time: requests of the intake (new requests), and in addition those of the due queue (retried and delayed
    requests). The table of times has quantiles of waits and run times over the last 5 minutes and the last hour, of
    all workers together. `per min` and the columns after it count final outcomes.

    Example:  lanekeeper status --json
    """
    found = run(_look(settings))
    if json:
        print(found.as_json())
    else:
        from rich.console import Console

        _show_status(found, Console())
        print(f"store by these settings: {settings.shown_store}")


@options.with_settings
def top(settings: "Settings") -> None:
    """Show what `lanekeeper status` shows, renewed every two seconds, until Ctrl-C.

    Example:  lanekeeper top
    """
    with suppress(KeyboardInterrupt):
        run(_watch(settings))


async def _look(settings: "Settings") -> "Status":
    from service.status import collect_status

    async with connected(settings, "status") as connection:
        return await collect_status(connection, lanes=settings.lane_specs(), names=settings.names())


async def _watch(settings: "Settings") -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from service.status import collect_status

    screen = Console()
    async with connected(settings, "top") as connection:
        with Live(console=screen, screen=True, auto_refresh=False) if screen.is_terminal else nullcontext() as live:
            while True:
                try:
                    found = await collect_status(connection, lanes=settings.lane_specs(), names=settings.names())
                    page = Console(width=screen.width, record=True, file=StringIO(), force_terminal=screen.is_terminal)
                    _show_status(found, page)
                    shown = Text.from_ansi(page.export_text(styles=True))
                except BrokerError as error:
                    shown = Text(f"{error}; trying again")
                shown = Text(f"{datetime.now().astimezone():%H:%M:%S}   Ctrl-C ends\n\n") + shown
                screen.print(shown) if live is None else live.update(shown, refresh=True)
                await asyncio.sleep(TOP_EVERY_S)


def _show_status(found: "Status", console: "Console") -> None:
    from rich.table import Table

    table = Table("lane", box=None, padding=(0, 1, 0, 0))  # fits into 80 columns
    for title in ("depth", "consumers", "running", "per min", "done", "retried", "failed", "dead"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in found.lanes:
        table.add_row(
            lane.lane,
            _count(lane.depth) + (f"+{lane.delayed}" if lane.delayed else ""),
            _count(lane.consumers),
            "-" if lane.running is None else f"{lane.running}/{lane.slots}+{lane.due_slots}",
            *map(_count, (lane.throughput_per_min, lane.answered, lane.retried, lane.failed, lane.buried)),
        )
    console.print(table)
    console.print(_times(found))

    def say(text: str) -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    for trouble in found.troubles:
        say(trouble)
    for lane in found.lanes:
        if (lane.longest_s or 0) >= LONG_S:
            say(f"{lane.lane}: a request has been worked on for {lane.longest_s} s")
        if lane.slots_limit is not None:
            say(f"{lane.lane} waits too long and gets no more slots: the limit is {lane.slots_limit}")
    for lane in found.lanes:
        if lane.waits_since_delivery:
            say(
                f"{lane.lane}: the waits of {lane.waits_since_delivery} attempts of the last hour count from their "
                "first delivery: they were published without x-lane-sent-ms"
            )
    for lane in found.lanes:
        for reason, delayed in sorted((lane.delayed_for or {}).items()):
            say(f"{lane.lane}: {delayed['count']} wait for {reason}, the last until {_clock(delayed['last_in_s'])}")
    for cap in found.caps:
        say(f"{cap} is reached: its requests wait for the next period, or are refused")
    unknown = (found.in_delays or 0) - sum(lane.delayed or 0 for lane in found.lanes) - found.batch_tickets
    if unknown > 0:
        say(
            f"{unknown} more messages are in the delay queues: requests from before these workers began, and posts to "
            "webhooks or replies that are sent again"
        )
    if found.in_batches:
        of = f" ({found.batch_tickets} open batches)" if found.batch_tickets else ""
        say(f"{found.in_batches} requests wait for a batch of a provider, or are in one{of}")
    if found.dead:
        say(f"{found.dead} dead letters are kept")
    latest = Counter((failure["lane"], failure["code"]) for failure in found.failures)
    for (name, code), times in latest.items():
        say(f"{name}: {code} ended {times} of the last {len(found.failures)} requests that failed")
    for lane in found.lanes:
        if lane.deferred_for:
            text = ", ".join(f"{reason} {count}" for reason, count in sorted(lane.deferred_for.items()))
            say(f"{lane.lane} was put off since the workers began, for: {text}")
    for name, tenants in found.tenants.items():
        for tenant, figures in tenants.items():
            if figures["set_aside"] and (figures["running"] or figures["in_hand"]):
                text = f"{figures['running']} running, {figures['begun']} begun, {figures['set_aside']} set aside"
                say(f"{name}, tenant {tenant or '(none)'}: {text}")
    for pause in found.pauses:
        say(brake.pause_line(pause))
    for name, schedule in found.schedules.items():
        say(f"schedule {schedules.schedule_line(name, schedule)}")
    for line in (*found.waiting, *found.paused, *(f"circuit breaker of {each}" for each in found.breakers)):
        say(line)
    if dollars := {lane: figures["usd"] for lane, figures in found.spent.get("lane", {}).items() if figures.get("usd")}:
        text = ", ".join(f"{lane} ${usd:.4f}" for lane, usd in dollars.items())
        say(f"spent since the workers began, by {found.prices_as_of}: {text}")
    saved = {lane: usd for lane, of in found.spent.get("lane", {}).items() if (usd := of.get("saved_usd"))}
    if saved:
        text = ", ".join(f"{lane} ${usd:.4f}" for lane, usd in saved.items())
        say(f"saved by providers' batches: {text}")
    if text := ", ".join(f"{name} {count}" for name, count in sorted(found.batches.items()) if count):
        say(f"batches since the workers began: {text}")
    for counts, words in ((found.dead_letters, DEAD_LETTERS), (found.webhooks, WEBHOOKS), (found.control, CONTROL)):
        if text := ", ".join(f"{count} {words[name]}" for name in words if (count := counts.get(name))):
            say(f"since the workers began: {text}")
    if kills := found.memory.get("kills"):
        say(f"the kernel has killed {kills} processes of workers at their memory limit")
    if found.undelivered:
        say(f"{found.undelivered} replies were never taken by their queues")
    if found.simulated:
        text = "all workers" if found.simulated == found.workers else ", ".join(found.simulated)
        say(f"provider simulated by {text}: nothing is spent")
    if found.workers:
        say(f"answered by {', '.join(found.workers)}")
    elif any(lane.consumers for lane in found.lanes):
        say("No worker answered, but queues have consumers: a worker hangs. Restart it; its requests go to others.")
    else:
        say("No worker answered: start one with `lanekeeper serve` or `lanekeeper consume`.")


def _times(found: "Status") -> "Table":
    from rich.table import Table

    table = Table("lane", "over", box=None, padding=(0, 1, 0, 0))
    for title in ("attempts", "wait p50", "p95", "p99", "run p50", "p95", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in found.lanes:
        for window, waits in (lane.wait_ms or {}).items():
            if waits["count"] and lane.run_ms is not None:
                both = (waits, lane.run_ms[window])
                values = [_ms(each[share]) for each in both for share in ("p50", "p95", "p99")]
                table.add_row(lane.lane, window, str(waits["count"]), *values)
    return table


def _clock(in_s: int) -> str:
    at = datetime.now().astimezone() + timedelta(seconds=in_s)
    return f"{at:%H:%M:%S}" if in_s < _DAY_S else f"{at:%Y-%m-%d %H:%M}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ms(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value} ms" if value < 10_000 else f"{value / 1000:.1f} s"


@options.with_given
def check(
    given: options.Given,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="As for `serve --simulate`: no provider needed.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Check settings, broker, topology, permissions, providers and stores; exit code 1 if anything is wrong.

    Each provider is called once for each model that the lanes use there, for an answer of one token. If all running
    workers have a simulated provider, no provider is called. For a user that may only publish, only that right is
    checked.

    Example:  lanekeeper check --set namespace=staging
    """

    if not passes_checks(given, simulate=simulate, json=json):
        raise typer.Exit(FAILED)


def passes_checks(given: options.Given, *, simulate: bool, json: bool = False) -> bool:
    """Run and print all checks. Returns whether nothing is wrong."""

    async def checked() -> list["Finding"]:
        findings = []
        async for finding in _findings(given, simulate=simulate):
            findings.append(finding)
            if not json:
                print(redaction.lines(f"{WORDS[finding.well]:<5}  {finding.what:<18} {finding.text}"), flush=True)
        return findings

    findings = run(checked())
    if json:
        print_json([asdict(finding) for finding in findings])
    return not any(finding.well is False for finding in findings)


async def _findings(given: options.Given, *, simulate: bool) -> "AsyncIterator[Finding]":
    from service.checks import Finding, run_checks
    from service.config.effective import effective
    from service.config.loading import load_with_sources
    from service.telemetry import logs

    try:
        settings, sources = load_with_sources(given.config, **given.values)
    except SettingsError:
        yield Finding("settings", False, _all_that_is_wrong(given))
        return
    if not simulate:
        for setting in effective(settings, sources):  # where an address comes from matters: keys are sent there
            if setting.name.endswith("base_url") and setting.value is not None:
                yield Finding("address", None, f"{setting.variable} is {setting.value}, from {setting.source}")
    with logs.configured(service="lanekeeper", level="critical"):
        async for finding in run_checks(settings, simulate=simulate):
            yield finding


def _all_that_is_wrong(given: options.Given) -> str:
    try:
        given.settings(for_calls=True)
    except SettingsError as error:
        return str(error)
    return ""


@options.with_given
def settings(
    given: options.Given,
    changed: Annotated[bool, typer.Option("--given", help="Show only settings that some source has set.")] = False,
    json: options.Json = False,
) -> None:
    """Show every setting in effect, and where it comes from: default, a file, the environment, an option.

    Keys, and passwords in URLs, are hidden. docs/settings.md says what each does.

    Example:  lanekeeper settings --set lanes.batch.slots=12 --given
    """
    from service.config.effective import DEFAULT, effective
    from service.config.loading import load_with_sources

    found, sources = load_with_sources(given.config, **given.values)
    shown = [setting for setting in effective(found, sources) if not changed or setting.source != DEFAULT]
    if json:
        print_json([asdict(setting) for setting in shown])
        return
    width = max((len(setting.name) for setting in shown), default=0)
    values = [printable(value_text(setting.value)) for setting in shown]
    wide = min(60, max(map(len, values), default=0))
    for setting, value in zip(shown, values, strict=True):
        print(f"{setting.name:<{width}}  {value:<{wide}}  {printable(setting.source)}")


def value_text(value: Any) -> str:
    """A setting's value on one line: `-` for None, JSON for lists and tables."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)
