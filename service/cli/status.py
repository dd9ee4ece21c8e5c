"""`lanekeeper status`: show the state of the lanes once, as all workers and the broker report it."""

from functools import partial
from typing import TYPE_CHECKING

from service.cli import options
from service.cli.ending import run

if TYPE_CHECKING:
    from service.checks.status import Status
    from service.config.settings import Settings


DEAD_LETTERS = {
    "exported": "dead letters exported",
    "dropped": "dead letters dropped",
    "unparked": "invalid messages not kept",
}
CONTROL = {
    "refused": "control messages refused",
    "unanswered": "control messages that nobody was told of",
    "displaced": "cancellations of unseen ids forgotten",
}
"""For each of a worker's counts of control messages: the words that `lanekeeper status` prints after the count. A count
of 0 is not printed."""


def status(json: options.Json = False, config: options.Config = None, sets: options.Set = None) -> None:
    """Show depth, consumers, running, waits and throughput of each lane.

    `running`: the number of running requests, then how many can run at the same time: requests of the intake (new
    requests), and in addition those of the due queue (retried and delayed requests). Waits are those of the latest
    requests, up to 256 for each worker; `per min` and the columns after it count final outcomes.

    Example:  lanekeeper status --json
    """
    run(_status(options.settings_of(config, sets), json=json))


async def _status(settings: "Settings", *, json: bool) -> None:
    from service.checks.status import look
    from service.cli.connecting import connected

    async with connected(settings, "status") as connection:
        found = await look(connection, lanes=settings.lane_specs(), names=settings.names())
    if json:
        print(found.as_json())
    else:
        _show(found)


def _show(found: "Status") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("lane", box=None, padding=(0, 1, 0, 0))  # fits into 80 columns
    for title in ("depth", "consumers", "running", "wait p50", "p95", "per min", "done", "retried", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in found.lanes:
        table.add_row(
            lane.lane,
            _count(lane.depth),
            _count(lane.consumers),
            "-" if lane.running is None else f"{lane.running}/{lane.slots}+{lane.due_slots}",
            _ms(lane.wait_p50_ms),
            _ms(lane.wait_p95_ms),
            *map(_count, (lane.throughput_per_min, lane.answered, lane.retried, lane.failed)),
        )
    console = Console()
    console.print(table)
    say = partial(console.print, highlight=False, soft_wrap=True)
    for lane in found.lanes:
        if lane.slots_limit is not None:
            say(f"{lane.lane} waits too long and gets no more slots: the limit is {lane.slots_limit}")
    for lane in found.lanes:
        if lane.waits_since_delivery:
            say(
                f"{lane.lane}: the waits of {lane.waits_since_delivery} of the latest requests count from their first "
                "delivery: they were published without x-lane-sent-ms"
            )
    for lane in found.lanes:
        if lane.deferred_for:
            text = ", ".join(f"{reason} {count}" for reason, count in sorted(lane.deferred_for.items()))
            say(f"{lane.lane} was put off since the workers began, for: {text}")
    for name, tenants in found.tenants.items():
        for tenant, figures in tenants.items():
            if figures["set_aside"] and (figures["running"] or figures["in_hand"]):
                text = f"{figures['running']} running, {figures['begun']} begun, {figures['set_aside']} set aside"
                say(f"{name}, tenant {tenant or '(none)'}: {text}")
    for line in (*found.waiting, *found.paused, *found.breakers):
        say(line)
    if dollars := {lane: figures["usd"] for lane, figures in found.spent.get("lane", {}).items() if figures.get("usd")}:
        text = ", ".join(f"{lane} ${usd:.4f}" for lane, usd in dollars.items())
        say(f"spent since the workers began, at prices of {found.prices_as_of}: {text}")
    for counts, words in ((found.dead_letters, DEAD_LETTERS), (found.control, CONTROL)):
        if text := ", ".join(f"{count} {words[name]}" for name in words if (count := counts.get(name))):
            say(f"since the workers began: {text}")
    if found.undelivered:
        say(f"{found.undelivered} replies were never taken by their queues")
    if found.simulated:
        text = "all workers" if found.simulated == found.workers else ", ".join(found.simulated)
        say(f"provider simulated by {text}: nothing is spent")
    if found.workers:
        say(f"answered by {', '.join(found.workers)}")
    else:
        say("No worker answered: start one with `lanekeeper serve` or `lanekeeper consume`.")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ms(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value} ms" if value < 10_000 else f"{value / 1000:.1f} s"
