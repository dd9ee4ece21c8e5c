"""`lanekeeper pause`, `resume` and `pauses`: the brake."""

import asyncio
import getpass
import json as json_text
import platform
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanekeeper.contract import names as n
from service.cli import options
from service.cli.options import duration, instant, named
from service.cli.process import connected, print_json, printable, run

if TYPE_CHECKING:
    from consumers.state.base import PauseKind
    from service.config.settings import Settings

ANSWERED_WITHIN_S = 5.0


@options.taking
def of_name(
    lane: Annotated[str | None, named("--lane", "LANE", "A lane: no request of it starts.")] = None,
    tenant: Annotated[str | None, named("--tenant", "TENANT", "A tenant, in all lanes.")] = None,
    app: Annotated[str | None, named("--app", "APP", "An application: the second word of its routing keys.")] = None,
    model: Annotated[str | None, named("--model", "MODEL", "A model, at all providers.")] = None,
    provider: Annotated[str | None, named("--provider", "PROVIDER", "A provider: it is not called.")] = None,
    schedule: Annotated[str | None, named("--schedule", "NAME", "A schedule: it publishes nothing.")] = None,
) -> "Sequence[tuple[PauseKind, str]]":
    """The kind and the name of each that is given."""
    names: dict[PauseKind, str | None] = {
        "lane": lane, "tenant": tenant, "app": app, "model": model, "provider": provider,
        "schedule": schedule,
    }  # fmt: skip
    return [(kind, str(name)) for kind, name in names.items() if name]


@of_name
@options.with_settings
def pause(
    settings: "Settings",
    named: "Sequence[tuple[PauseKind, str]]",
    for_s: Annotated[float | None, duration("--for", "For how long: 30m.")] = None,
    until: Annotated[datetime | None, instant("--until", "Until when: 2026-11-21T18:00:00Z.")] = None,
    why: Annotated[str, named("--why", "TEXT", "Why; requesters can be told it.")] = "",
    who: Annotated[str, named("--who", "NAME", "Who; default: user and host.")] = "",
    json: options.Json = False,
) -> None:
    """Pause a lane, tenant, application, model or provider: what it concerns waits in the broker, and deadlines go on.
    A schedule publishes nothing meanwhile.

    Within a second every worker knows. Attempts that run are finished. What another provider can answer goes there. A
    second pause of the same name replaces the first.

    Example:  lanekeeper pause --tenant crm --for 30m --why "its loop floods the lane"
    """
    kind, name = _only(named)
    options.lane_names(settings, [name] if kind == "lane" else [])
    begin(settings, kind, name, for_s=for_s, until=until, why=why, who=who, json=json)


def begin(
    settings: "Settings",
    kind: "PauseKind",
    name: str,
    *,
    for_s: float | None,
    until: datetime | None = None,
    why: str,
    who: str = "",
    json: bool,
) -> None:
    """Pause what has this name. Raises typer.BadParameter."""
    if for_s is not None and until is not None:
        raise typer.BadParameter("give one of them", param_hint="--for / --until")
    if for_s is not None:
        until = datetime.now(UTC) + timedelta(seconds=for_s)
    fields = {"kind": kind, "name": name, "who": who or f"{getpass.getuser()}@{platform.node()}", "why": why}
    if until is not None:
        fields["until"] = until.isoformat()
    _print(run(ask(settings, n.PAUSE_KEY, {n.PAUSE_KEY: fields}, kept="it is paused"))["pauses"], json=json)


@of_name
@options.with_settings
def resume(
    settings: "Settings",
    named: "Sequence[tuple[PauseKind, str]]",
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The pause's id.")] = None,
    json: options.Json = False,
) -> None:
    """End a pause, named as it was made, or by its id.

    Example:  lanekeeper resume --tenant crm
    """
    from consumers.state.base import pause_id

    if id is None:
        id = pause_id(*_only(named))
    elif named:
        raise typer.BadParameter("give the id, or what is paused", param_hint="ID")
    found = run(ask(settings, n.RESUME_KEY, {n.RESUME_KEY: id}, kept="it is resumed"))["pauses"]
    if json:
        print_json(found)
    else:
        print("\n".join(f"resumed: {pause_line(each, was=True)}" for each in found) or "it was not paused")


@options.with_settings
def pauses(settings: "Settings", json: options.Json = False) -> None:
    """List what is paused: since when, until when, by whom and why.

    Example:  lanekeeper pauses --json
    """
    _print(run(ask(settings, n.PAUSES_KEY, {}))["pauses"], json=json)


def pause_line(pause: Mapping[str, str | None], *, was: bool = False) -> str:
    """One line of text about a pause; `was`: one that has ended."""
    until = f" until {pause['until']}" if pause["until"] else ""
    why = f": {pause['why']}" if pause["why"] else ""
    who = f" by {pause['who']}" if pause["who"] else ""
    state = "was paused from" if was else "is paused since"
    return printable(f"{pause['kind']} {pause['name']} {state} {pause['since']}{until}{who}{why} [{pause['id']}]")


def _print(found: Sequence[Mapping[str, str | None]], *, json: bool) -> None:
    if json:
        print_json(found)
    else:
        print("\n".join(map(pause_line, found)) or "nothing is paused")


def _only(named: "Sequence[tuple[PauseKind, str]]") -> "tuple[PauseKind, str]":
    if len(named) != 1:
        raise typer.BadParameter("name one of them", param_hint="--lane / --tenant / --app / --model / --provider")
    return named[0]


async def ask(
    settings: "Settings", command: str, body: Mapping[str, Any], *, kept: str | None = None
) -> dict[str, Any]:
    """A worker's answer to an operator's command. `kept`: what happens later, if no worker runs now."""
    from lanekeeper.contract.messages import Message
    from lanekeeper.replies import ControlRefused, NoReply
    from service.status import asked

    message = Message(
        body=json_text.dumps(body).encode(),
        content_type="application/json",
        type=command,
        message_id=uuid.uuid4().hex,
        user_id=settings.credentials[0],
        persistent=kept is not None,
        expiration=None if kept is not None else str(round(1000 * ANSWERED_WITHIN_S)),
    )
    try:
        async with connected(settings, command) as connection, asked(connection, message, settings.names()) as arrived:
            answer = await arrived.next(end=asyncio.get_running_loop().time() + ANSWERED_WITHIN_S)
    except TimeoutError:
        then = "" if kept is None else f": {kept} as soon as one runs"
        raise NoReply(f"no worker answered within {ANSWERED_WITHIN_S:g} s{then}") from None
    found: dict[str, Any] = json_text.loads(answer.body)
    if answer.headers.get(n.CONTROL) == "error":
        raise ControlRefused(found)
    return found
