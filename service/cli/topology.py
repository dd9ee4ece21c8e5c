"""`lanekeeper topology …`: show which queues, exchanges and bindings Lanekeeper declares, compare them with those on
the broker, and declare them."""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from lanekeeper.contract.problems import BrokerError, BrokerUnreachable
from service.cli import options
from service.cli.options import Texts, named
from service.cli.process import FAILED, connected, print_json, print_note, printable, run

if TYPE_CHECKING:
    from service.config.settings import Settings
    from topology.broker.admin import Verification
    from topology.declaration import Topology
    from topology.export import User

app = typer.Typer(no_args_is_help=True, help="What is declared on the broker: compare, declare, export, draw it.")

DEFAULT_USERS = ("worker:worker", "operator:operator", "deployer:deployer")
"""What `export` creates if no users are named. No application is among them: an operator must choose its name, which is
the second word of its routing keys."""

For = Annotated[str | None, named("--for", "VERSION", "RabbitMQ's version, such as 4.3; default: that of the broker.")]
Users = Annotated[
    Texts, named("--user", "NAME:ROLE[:LANES]", "application, client, worker, operator, deployer; repeatable.")
]


@app.command()
@options.with_settings
def show(settings: "Settings", version: For = None, json: options.Json = False) -> None:
    """List the topology that Lanekeeper declares: exchanges, queues, bindings, and what depends on the broker's
    version.

    Example:  lanekeeper topology show --for 3.10
    """
    from topology.diagram import render

    declared = _declared(settings, version)
    if json:
        print_json(asdict(declared))
    else:
        print(render(declared))


@app.command()
@options.with_settings
def plan(
    settings: "Settings",
    every: Annotated[bool, typer.Option("--all", help="List each part of the delay levels, too.")] = False,
    json: options.Json = False,
) -> None:
    """Compare the broker with the topology that Lanekeeper declares; exit code 1 if they differ.

    `apply` declares what is missing, and never changes or deletes anything that exists.
    """
    from topology.plan import without_levels

    found = run(_verify(settings))
    if json:
        print_json(asdict(found))
    else:
        shown, levels = (found.differences, 0) if every else without_levels(found.differences, settings.names())
        for difference in shown:
            then = "apply makes it" if difference.change == "missing" else "apply leaves it"
            print(f"{printable(difference.line)}  ({then})")
        if levels:
            parts = len(found.differences) - len(shown)
            print(f"{levels} delay levels are missing, {parts} parts: --all lists them  (apply makes them)")
        print("nothing to change" if not found.differences else f"{len(found.differences)} differences")
    _end(found)


@app.command()
@options.with_settings
def apply(
    settings: "Settings",
    users: Users = None,
    passwords: Annotated[Path | None, named("--passwords", "FILE", "Lines NAME:PASSWORD, one for each --user.")] = None,
    remove_lanes: Annotated[
        Texts, named("--remove-lane", "LANE", "Delete the queues of a lane that the settings do not have.")
    ] = None,
) -> None:
    """Declare what is missing on the broker. Nothing that exists is changed or deleted, and the command can be
    repeated.

    With --remove-lane it deletes a former lane's queues, if they hold nothing and nobody consumes them.

    With --user it also creates users with their rights, their reply queues and the policies, the same that `export
    --user` prints. All of these are created through the management API, which requires a user with the tag
    `administrator`.

    Examples:

      lanekeeper topology apply --set namespace=staging

      lanekeeper topology apply --user worker:worker --passwords passwords.txt
    """
    for lane in remove_lanes or ():
        if lane in settings.lanes and settings.lanes[lane].enabled:
            raise typer.BadParameter(f"{lane} is in the settings; take it out there first", param_hint="--remove-lane")
    made = users_of(users or [], passwords, settings, makes_passwords=False)
    run(apply_topology(settings, made))
    if remove_lanes:
        run(_remove(settings, remove_lanes))


@app.command()
@options.with_settings
def verify(settings: "Settings", json: options.Json = False) -> None:
    """Check whether the broker is as declared; exit code 1 if it differs.

    Only the management API shows arguments and bindings. Without it, only missing queues and exchanges are found.
    """
    found = run(_verify(settings))
    if json:
        print_json(asdict(found))
    else:
        for difference in found.differences:
            print(printable(difference.line))
        if not found.differences:
            print("as declared")
    _end(found)


@app.command()
@options.with_settings
def export(
    settings: "Settings",
    version: For = None,
    vhost: Annotated[str | None, typer.Option("--vhost", help="Default: the AMQP URL's.")] = None,
    users: Users = None,
    passwords: Annotated[
        Path | None, named("--passwords", "FILE", "Lines NAME:PASSWORD; missing ones are created and shown.")
    ] = None,
    no_users: Annotated[bool, typer.Option("--no-users", help="Exchanges, queues and bindings alone.")] = False,
) -> None:
    """Print RabbitMQ definitions as JSON: the topology, and users with no more rights than they need.

    Example:  lanekeeper topology export --for 4.3 --user crm:application:normal,batch > definitions.json
    """
    from topology.export import APPLICATIONS, definitions

    declared = _declared(settings, version)
    accounts = [] if no_users else users_of(users or DEFAULT_USERS, passwords, settings, makes_passwords=True)
    if not settings.needs_user_id and any(user.role in APPLICATIONS for user in accounts):
        print_note(
            "requests without user_id share one tenant, whoever publishes them: have workers refuse them, "
            "LANEKEEPER_REQUIRE_USER_ID=true (docs/production.md)"
        )
    print_json(definitions(declared, vhost or settings.vhost, accounts))


@app.command()
@options.with_settings
def diagram(settings: "Settings") -> None:
    """Draw the topology as a Mermaid flowchart, which is the same for every broker version.

    Example:  lanekeeper topology diagram > topology.mmd
    """
    from topology.diagram import mermaid

    print(mermaid(_declared(settings, "4.3")), end="")


def _declared(settings: "Settings", version: str | None) -> "Topology":
    from topology.declaration import declare

    if version is None:
        version = run(_ask_version(settings))
    try:
        return declare(settings.lane_specs(), names=settings.names(), broker_version=version)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None


async def _ask_version(settings: "Settings") -> str:

    try:
        async with connected(settings, "topology") as connection:
            return connection.version
    except BrokerUnreachable as error:
        raise BrokerUnreachable(f"{error} Without one, say which version: --for 4.3") from error


async def _verify(settings: "Settings") -> "Verification":
    from service.connections import management_of
    from topology.broker.admin import verify
    from topology.declaration import declare

    async with connected(settings, "topology") as connection:
        declared = declare(settings.lane_specs(), names=settings.names(), broker_version=connection.version)
        return await verify(declared, await management_of(settings, connection), await connection.underlying())


async def apply_topology(settings: "Settings", users: "list[User]") -> None:
    """Declare what is missing, and create these users with their rights."""
    from service.connections import management_of
    from topology.broker.admin import apply
    from topology.declaration import declare
    from topology.export import definitions

    async with connected(settings, "topology") as connection:
        declared = declare(settings.lane_specs(), names=settings.names(), broker_version=connection.version)
        await apply(declared, await connection.underlying())
        if users:  # after the exchanges, which their topic permissions name
            management = await management_of(settings, connection)
            if management is None:
                raise BrokerError("--user needs the management API: set LANEKEEPER_MANAGEMENT_URL")
            await management.import_definitions(definitions(declared, settings.vhost, users))
    print(
        f"{len(declared.exchanges)} exchanges, {len(declared.queues)} queues, {len(declared.bindings)} bindings "
        f"are on RabbitMQ {declared.broker_version} at {settings.broker}"
    )
    if users:
        print(f"users: {', '.join(f'{user.name} ({user.role})' for user in users)}")


async def _remove(settings: "Settings", lanes: Sequence[str]) -> None:
    from service.connections import management_of
    from topology.broker.admin import remove_lane

    async with connected(settings, "topology") as connection:
        management = await management_of(settings, connection)
        if management is None:
            raise BrokerError("--remove-lane needs the management API: set LANEKEEPER_MANAGEMENT_URL")
        for lane in lanes:
            await remove_lane(lane, connection, management, names=settings.names())
            print(f"lane {lane} is removed; what comes back to it from a delay is answered unroutable, and parked")


def _end(found: "Verification") -> None:
    if found.note is not None:
        print_note(found.note)
    if found.differences:
        raise typer.Exit(FAILED)


def users_of(
    given: Sequence[str], passwords: Path | None, settings: "Settings", *, makes_passwords: bool
) -> "list[User]":
    """The users of options NAME:ROLE[:LANE,LANE…] (`*`: all lanes; none: the usual lane and those that are less
    urgent), with the passwords in the file. A password that is not there is made
    and told if `makes_passwords`; `apply` makes none, so that repeating it changes none. Raises typer.BadParameter."""
    from topology.export import SALT_BYTES, Role, User, hash_password
    from topology.lanes import usual

    known = {} if passwords is None else _passwords(passwords)
    missing = [name for user in given if (name := user.partition(":")[0]) not in known]
    if missing and not makes_passwords:
        raise typer.BadParameter(f"a line NAME:PASSWORD is missing for {', '.join(missing)}", param_hint="--passwords")
    roles: dict[str, Role] = {role: role for role in get_args(Role)}
    all_lanes = [lane.name for lane in settings.lane_specs()]
    usual_lanes = all_lanes[all_lanes.index(usual(settings.lane_specs()).name) :]
    users = []
    for text in given:
        name, role, lanes, *_ = *text.split(":", 2), "", ""
        if role not in roles:
            raise typer.BadParameter(f"{text!r}: the role is one of {', '.join(roles)}", param_hint="--user")
        chosen = tuple(all_lanes if lanes == "*" else lanes.split(",") if lanes else usual_lanes)
        if not set(chosen) <= set(all_lanes):
            raise typer.BadParameter(f"{text!r}: the lanes are {', '.join(all_lanes)}", param_hint="--user")
        password = known.get(name) or secrets.token_urlsafe(24)
        try:
            hashed = hash_password(password, salt=secrets.token_bytes(SALT_BYTES))
            users.append(User(name, roles[role], hashed, lanes=chosen))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--user") from None
        if name in missing:
            print(f"password of {name}, told this once: {password}", file=sys.stderr)
    return users


def _passwords(path: Path) -> dict[str, str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--passwords") from None
    if any(":" not in line or line.endswith(":") for line in lines):
        raise typer.BadParameter(f"{path}: every line is NAME:PASSWORD", param_hint="--passwords")
    return {name: password for name, _, password in (line.partition(":") for line in lines)}
