"""`lanekeeper pause`, `resume` and `pauses`: the brake."""

import asyncio
import getpass
import json as json_text
import platform
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lanekeeper.contract import names as n
from service.cli import options
from service.cli.process import connected, print_json, printable, run

if TYPE_CHECKING:
    from consumers.state.base import PauseKind
    from service.config.settings import Settings

ANSWERED_WITHIN_S = 5.0
Lane = Annotated[options.LaneName | None, typer.Option("--lane", help="A lane: no request of it starts.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="A tenant, in all lanes.")]
App = Annotated[
    str | None, typer.Option("--app", metavar="APP", help="An application: the second word of its routing keys.")
]
Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="A model, at all providers.")]
Provider = Annotated[str | None, typer.Option("--provider", metavar="PROVIDER", help="A provider: it is not called.")]


def pause(
    lane: Lane = None,
    tenant: Tenant = None,
    app: App = None,
    model: Model = None,
    provider: Provider = None,
    for_s: Annotated[
        float | None, typer.Option("--for", parser=options.seconds, metavar="DURATION", help="For how long: 30m.")
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option("--until", parser=options.moment, metavar="TIME", help="Until when: 2026-11-21T18:00:00Z."),
    ] = None,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Why; requesters can be told it.")] = "",
    who: Annotated[str, typer.Option("--who", metavar="NAME", help="Who; default: user and host.")] = "",
    json: options.Json = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Pause a lane, tenant, application, model or provider: what it concerns waits in the broker, and deadlines go on.

    Within a second every worker knows. Attempts that run are finished. What another provider can answer goes there. A
    second pause of the same name replaces the first.

    Example:  lanekeeper pause --tenant crm --for 30m --why "its loop floods the lane"
    """
    kind, name = _one_of(lane=lane, tenant=tenant, app=app, model=model, provider=provider)
    if for_s is not None and until is not None:
        raise typer.BadParameter("give one of them", param_hint="--for / --until")
    if for_s is not None:
        until = datetime.now(UTC) + timedelta(seconds=for_s)
    fields = {"kind": kind, "name": name, "who": who or f"{getpass.getuser()}@{platform.node()}", "why": why}
    if until is not None:
        fields["until"] = until.isoformat()
    found = run(_ask(options.settings_of(config, sets), n.PAUSE_KEY, fields, kept="it is paused"))
    _print(found, json=json)


def resume(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The pause's id.")] = None,
    lane: Lane = None,
    tenant: Tenant = None,
    app: App = None,
    model: Model = None,
    provider: Provider = None,
    json: options.Json = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """End a pause, named as it was made, or by its id.

    Example:  lanekeeper resume --tenant crm
    """
    from consumers.state.base import pause_id

    names = {"lane": lane, "tenant": tenant, "app": app, "model": model, "provider": provider}
    if id is None:
        kind, name = _one_of(**names)
        id = pause_id(cast("PauseKind", kind), name)
    elif any(names.values()):
        raise typer.BadParameter("give the id, or what is paused", param_hint="ID")
    found = run(_ask(options.settings_of(config, sets), n.RESUME_KEY, id, kept="it is resumed"))
    if json:
        print_json(found)
    else:
        print("\n".join(f"resumed: {line(each)}" for each in found) or "it was not paused")


def pauses(json: options.Json = False, config: options.Config = None, sets: options.Set = None) -> None:
    """List what is paused: since when, until when, by whom and why.

    Example:  lanekeeper pauses --json
    """
    found = run(_ask(options.settings_of(config, sets), n.PAUSES_KEY, None, kept=None))
    _print(found, json=json)


def line(pause: Mapping[str, str | None]) -> str:
    """One line of text about a pause."""
    until = f" until {pause['until']}" if pause["until"] else ""
    why = f": {pause['why']}" if pause["why"] else ""
    who = f" by {pause['who']}" if pause["who"] else ""
    return printable(
        f"{pause['kind']} {pause['name']} is paused since {pause['since']}{until}{who}{why} [{pause['id']}]"
    )


def _print(found: Sequence[Mapping[str, str | None]], *, json: bool) -> None:
    if json:
        print_json(found)
    else:
        print("\n".join(map(line, found)) or "nothing is paused")


def _one_of(**names: str | None) -> tuple[str, str]:
    given = [(kind, str(name)) for kind, name in names.items() if name]
    if len(given) != 1:
        raise typer.BadParameter("name one of them", param_hint=" / ".join(f"--{kind}" for kind in names))
    return given[0]


async def _ask(settings: "Settings", command: str, wanted: Any, *, kept: str | None) -> list[Mapping[str, str | None]]:
    """The pauses in a worker's answer. `kept`: what happens as soon as a worker runs, if none does; None: nothing."""
    from lanekeeper.amqp.publisher import Publisher
    from lanekeeper.amqp.replies import DirectReplies
    from lanekeeper.contract.messages import Message
    from lanekeeper.errors import ControlRefused, NoReply
    from lanekeeper.telemetry.tracing import Tracing

    message = Message(
        body=json_text.dumps({} if wanted is None else {command: wanted}).encode(),
        content_type="application/json",
        type=command,
        message_id=uuid.uuid4().hex,
        user_id=settings.credentials[0],
        persistent=kept is not None,
        expiration=None if kept is not None else str(round(1000 * ANSWERED_WITHIN_S)),
    )
    direct = DirectReplies()
    async with connected(settings, command) as connection:
        publisher = Publisher(connection, tracing=Tracing(), on_channel=direct.consume)
        try:
            with direct.expecting(message) as arrived:
                await publisher.publish(message, exchange=settings.names().control, routing_key=command, traced=False)
                direct.published(arrived)
                answer = await arrived.next(end=asyncio.get_running_loop().time() + ANSWERED_WITHIN_S)
        except TimeoutError:
            then = "" if kept is None else f": {kept} as soon as one runs"
            raise NoReply(f"no worker answered within {ANSWERED_WITHIN_S:g} s{then}") from None
        finally:
            await direct.close()
    found = json_text.loads(answer.body)
    if answer.headers.get(n.CONTROL) == "error":
        raise ControlRefused(found)
    return list(found["pauses"])
