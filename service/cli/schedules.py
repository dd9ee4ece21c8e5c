"""`lanekeeper schedules …`: recurring requests."""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import brake, options
from service.cli.options import duration, named
from service.cli.process import connected, print_json, printable, run

if TYPE_CHECKING:
    from consumers.flows.schedules import ScheduleSpec
    from service.config.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Recurring requests: when they run; run one now; pause one.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name in the settings.")]


@app.command("list")
@options.with_settings
def every(settings: "Settings", json: options.Json = False) -> None:
    """List the schedules, with their next run, and the request of the last one: `lanekeeper result ID` shows it.

    Example:  lanekeeper schedules list --json
    """
    found = run(_told(settings))
    if json:
        print_json(found)
    else:
        print(
            "\n".join(schedule_line(name, schedule) for name, schedule in found.items())
            or "no schedules are in the settings"
        )


@app.command("run")
@options.with_settings
def run_now(settings: "Settings", name: Name, json: options.Json = False) -> None:
    """Publish a schedule's request now, besides its times, and print the request's id.

    Example:  lanekeeper schedules run nightly
    """
    id = run(_publish(settings, _spec(settings, name)))
    print_json({"id": id}) if json else print(id)


@app.command("pause")
@options.with_settings
def pause(
    settings: "Settings",
    name: Name,
    for_s: Annotated[float | None, duration("--for", "For how long: 30m.")] = None,
    why: Annotated[str, named("--why", "TEXT", "Why.")] = "",
    json: options.Json = False,
) -> None:
    """Let a schedule publish nothing until `lanekeeper resume --schedule NAME`. What falls due meanwhile is missed.

    Example:  lanekeeper schedules pause nightly --for 12h --why "the data is not there yet"
    """
    brake.begin(settings, "schedule", _spec(settings, name).name, for_s=for_s, why=why, json=json)


def schedule_line(name: str, schedule: Mapping[str, Any]) -> str:
    """One line of text about a schedule."""
    more = "".join(f"; {text}" for text in (schedule["paused"], *_faults(schedule)) if text)
    return printable(
        f"{name}: {schedule['cron']} ({schedule['timezone']}) to {schedule['key']}, next {schedule['next']}, "
        f"last {schedule['last'] or 'never'}{more}"
    )


def _faults(schedule: Mapping[str, Any]) -> Iterator[str]:
    if trouble := schedule.get("trouble"):
        yield f"FAILS with {trouble}, tried again each second; see schedule.failed in the log"
    if since := schedule.get("late_since"):
        yield f"DID NOT RUN at {since}; see schedule.missed and schedule.unpublished in the log"
    if failed := schedule.get("failed"):
        yield f"FAILED: {failed}"


async def _told(settings: "Settings") -> Mapping[str, Mapping[str, Any]]:
    from service.status import gather, merge

    async with connected(settings, "schedules") as connection:
        answers = await gather(connection, names=settings.names())
    now_ms = round(1000 * time.time())
    told = merge(answers, {}, lanes=(), names=settings.names()).schedules
    return {spec.name: spec.figures(now_ms, None) for spec in settings.schedule_specs()} | dict(told)


async def _publish(settings: "Settings", spec: "ScheduleSpec") -> str:
    from lanekeeper.amqp.publisher import Publisher
    from lanekeeper.telemetry.tracing import Tracing

    now_ms = round(1000 * time.time())
    user = settings.credentials[0] if settings.needs_user_id else None
    message = spec.message(now_ms, now_ms=now_ms, user=user)
    async with connected(settings, "schedules") as connection:
        publisher = Publisher(connection, tracing=Tracing())
        await publisher.publish_surely(message, exchange=settings.names().requests, routing_key=spec.key)
    return str(message.message_id)


def _spec(settings: "Settings", name: str) -> "ScheduleSpec":
    found = {spec.name: spec for spec in settings.schedule_specs()}
    if name not in found:
        raise typer.BadParameter(f"no schedule {name!r}; there are {', '.join(found) or 'none'}", param_hint="NAME")
    return found[name]
