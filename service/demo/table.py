"""The demo's output: a live table of the lanes while it runs, and then the results of its acts."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from consumers.capacity.activity import LaneActivity
from service.demo import by_sdk, unbroken
from service.demo.budget import ACCOUNT, JOBS, SOON_S, USED_LEAST, Spending
from service.demo.load import BATCH_JOBS, Board
from service.demo.outage import CALLS_MOST, Outage
from service.side_tasks import beside

REDRAW_S = 0.25
LINE_EVERY_S = 2.0
"""If the output is not a terminal: the seconds between two lines that are printed in place of the live table."""


@asynccontextmanager
async def watching(console: Console, scores: Board, activities: Mapping[str, LaneActivity]) -> AsyncIterator[None]:
    """While the block runs, show what happens in the lanes: on a terminal in a table that is redrawn, else in new
    lines."""
    show = _redraw if console.is_terminal else _lines
    async with beside(show(console, scores, activities), name="demo table"):
        yield


async def _redraw(console: Console, scores: Board, activities: Mapping[str, LaneActivity]) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_live_table(scores, activities), refresh=True)
            await asyncio.sleep(REDRAW_S)


async def _lines(console: Console, scores: Board, activities: Mapping[str, LaneActivity]) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        told = (
            f"{lane}: {score.right}/{score.expected} answered, {activities[lane].running} running"
            for lane, score in scores.lanes.items()
        )
        console.print("  " + "   ".join(told), highlight=False)


def _live_table(scores: Board, activities: Mapping[str, LaneActivity]) -> Table:
    table = Table("lane", *_right("sent", "waiting", "running", "answered", "retried", "wait p50", "p95"))
    for lane, score in scores.lanes.items():
        running = activities[lane].running
        waiting = score.asked - len(score.waits_ms) - running
        table.add_row(
            lane,
            str(score.asked),
            str(max(0, waiting)),
            str(running),
            str(score.right),
            str(score.retried),
            _ms(score.wait_ms(0.5)),
            _ms(score.wait_ms(0.95)),
        )
    return table


def show_verdict(console: Console, lanes: Board, first_come: Board) -> None:
    """Print the results of the lanes and of the single queue in one table, and whether all answers were right."""
    table = Table(
        "",
        "lane",
        *_right("answered", "retried", "wait p50", "p95", "max", "total"),
        title="the same load, the same broker, provider and number of workers",
    )
    for name, scores in (("lanes", lanes), ("first come", first_come)):
        for number, (lane, score) in enumerate(scores.lanes.items()):
            table.add_row(
                "" if number else name,
                lane,
                f"{score.right}/{score.expected}",
                str(score.retried),
                *(_ms(score.wait_ms(share)) for share in (0.5, 0.95, 1.0)),
                "" if number else f"{scores.total_s:.1f} s",
                end_section=number == len(scores.lanes) - 1,
            )
    console.print(table)
    console.print(
        "One queue lets the flood have every worker and ends it sooner; the lanes keep theirs free for what is urgent.",
        style="dim",
    )
    for request in lanes.wrong[:5]:
        console.print(f"  not answered right: {request}", style="red", highlight=False)
    if not lanes.all_right:
        console.print(f"FAILED: {len(lanes.wrong)} requests were not answered right", style="bold red")
        return
    urgent, queued = lanes.lanes["critical"], first_come.lanes["critical"]
    console.print(
        f"OK: all {sum(score.expected for score in lanes.lanes.values())} requests answered right. "
        f"A critical chat waited {_ms(urgent.wait_ms(0.5))} (p95 {_ms(urgent.wait_ms(0.95))}) among "
        f"{BATCH_JOBS} batch jobs; in one first-come queue {_ms(queued.wait_ms(0.5))} "
        f"(p95 {_ms(queued.wait_ms(0.95))}).",
        style="bold green",
        highlight=False,
    )


def _tell(console: Console, text: str, *, is_well: bool) -> None:
    console.print(text, style="green" if is_well else "bold red", highlight=False)


def show_unbroken(console: Console, act: unbroken.Unbroken) -> None:
    """Print the results of the demo's second act: what became of the requests of a killed worker, of those that were
    sent twice, and of the one that was cancelled."""
    lost = unbroken.JOBS - act.answered
    _tell(
        console,
        f"killed at work: {act.cut} calls broken off, {lost} of {unbroken.JOBS} requests lost, {act.calls} calls made; "
        f"sent again: {act.replayed} of {unbroken.TWICE} answered from the store, {act.calls_again} calls made; "
        f"cancelled in a delay: {act.cancelled}",
        is_well=act.is_well,
    )


def show_by_sdk(console: Console, act: by_sdk.BySdk) -> None:
    """Print for each lane how long the streamed calls of Anthropic's SDK waited for their first token."""
    lines = (
        f"{lane} {_ms(act.wait_ms(lane, 0.5))} (p95 {_ms(act.wait_ms(lane, 0.95))}, "
        f"{len(values)} of {by_sdk.CALLS} answered)"
        for lane, values in act.first_ms.items()
    )
    _tell(
        console,
        f"Anthropic's SDK among {by_sdk.JOBS} batch jobs, time to the first token: {', '.join(lines)}",
        is_well=act.is_well,
    )


def show_budget(console: Console, gated: Spending, ungated: Spending) -> None:
    """Print the results of the demo's budget act: how a provider's low limits were used with Lanekeeper's budget gate,
    and without it."""
    table = Table(
        "",
        *_right("critical p50", "p95", "answered", "429s", "calls per answer", "budget used"),
        title=f"{ACCOUNT.requests_per_minute} requests a minute, {JOBS} batch jobs waiting, the same workers",
    )
    for name, spent in (("the budget gate", gated), ("whoever calls first", ungated)):
        table.add_row(
            name,
            _ms(spent.wait_ms(0.5)),
            _ms(spent.wait_ms(0.95)),
            str(spent.answered),
            str(spent.refused),
            f"{spent.calls_per_answer:.2f}",
            f"{spent.used:.0%}",
        )
    console.print(table)
    console.print("What the gate leaves is kept for the lanes above batch, so that they find it at once.", style="dim")
    for request in gated.wrong[:5]:
        console.print(f"  not answered: {request}", style="red", highlight=False)
    if not gated.is_well:
        promised = f"no 429, a critical p95 below {SOON_S:g} s, and {USED_LEAST:.0%} of the budget used"
        _tell(console, f"FAILED: promised is {promised}", is_well=False)


def show_outage(console: Console, act: Outage) -> None:
    """Print the results of the demo's outage act: what requesters noticed while a provider failed."""
    _tell(
        console,
        f"a provider down: {act.asked - act.answered} of {act.asked} requests lost, {act.elsewhere} answered by the "
        f"next, {act.calls_per_answer:.2f} calls an answer (at most {CALLS_MOST:g}), its breaker "
        f"{', '.join(act.breaker) or 'closed all the time'}",
        is_well=act.is_well,
    )


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _ms(value: int) -> str:
    return f"{value} ms" if value < 10_000 else f"{value / 1000:.1f} s"
