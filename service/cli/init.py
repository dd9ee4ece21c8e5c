"""`lanekeeper init`: the first settings of a folder: broker, provider, lanes, broker users and API keys."""

import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import typer

from lanekeeper.contract.problems import SettingsError
from service.cli import options
from service.cli.options import named
from service.cli.process import FAILED, print_note, run

if TYPE_CHECKING:
    from service.config.settings import Settings

PASSWORDS = Path("passwords.txt")
RANKS_APART = 10
"""Between two lanes, so that others fit in later."""
NEXT = """
Now:
  {serve}
  lanekeeper send "Name three rivers."
  http://127.0.0.1:8080/ is the live page; it asks for the operator's key"""
USERS = """
Each process can have a broker user of its own, with no more rights than it needs ({file} has the passwords):
  lanekeeper topology apply {users} --passwords {file}
docs/production.md says which process connects as which user."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the user wants."""

    broker: str
    provider: str
    api_key: str | None
    lanes: list[str]
    tenant: str


def init(
    broker: Annotated[str | None, named("--broker", "URL", "The broker's AMQP URL.")] = None,
    provider: Annotated[
        Literal["anthropic", "simulated"] | None,
        typer.Option("--provider", help="Who answers; others: docs/providers.md."),
    ] = None,
    lanes: Annotated[
        str | None, named("--lanes", "LANE,LANE…", "The lanes, the most urgent first. Default: critical,normal,batch.")
    ] = None,
    tenant: Annotated[
        str | None, named("--tenant", "TENANT", "The first application: a broker user and the tenant of a key.")
    ] = None,
    create_users: Annotated[
        bool, typer.Option("--create-users", help="Create the broker users; needs an administrator's URL.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Write lanekeeper.toml in this folder: broker, provider, lanes, two API keys; and check it.

    It asks for what no option says. Without a terminal it asks nothing, and takes the defaults. API keys are printed
    once; passwords for broker users go to passwords.txt. Both files can be read by you alone.

    Example:  lanekeeper init --provider simulated --lanes urgent,normal,nightly
    """
    from service.cli.status import passes_checks
    from service.cli.topology import apply_topology, users_of
    from service.config.loading import CONFIG_FILE, load_settings

    asks = sys.stdin.isatty()
    for file in (CONFIG_FILE, PASSWORDS):
        if file.exists() and not force and not (asks and typer.confirm(f"{file} exists. Overwrite it?")):
            raise SettingsError(f"{file} exists, and nothing was written; --force overwrites it")
    found = _answers(load_settings(), asks=asks, broker=broker, provider=provider, lanes=lanes, tenant=tenant)
    keys, text = _settings_file(found)
    roles = ["worker:worker", "gateway:operator", f"{found.tenant}:application:*"]
    _write(CONFIG_FILE, text)
    _write(PASSWORDS, "".join(f"{role.partition(':')[0]}:{secrets.token_urlsafe(24)}\n" for role in roles))
    print(f"wrote {CONFIG_FILE} and {PASSWORDS}")
    for name, key in keys.items():
        print(f"key of {name}, shown this once: {key}")
    settings = load_settings(CONFIG_FILE)
    if create_users or (asks and typer.confirm("Create broker users now? That needs an administrator's URL.")):
        run(apply_topology(settings, users_of(roles, PASSWORDS, settings, makes_passwords=False)))
    is_simulated = found.provider == "simulated"
    is_well = passes_checks(options.Given(None, {}), simulate=is_simulated)
    print(NEXT.format(serve="lanekeeper serve --simulate" if is_simulated else "lanekeeper serve"))
    print(USERS.format(file=PASSWORDS, users=" ".join(f"--user '{role}'" for role in roles)))
    if not is_well:
        print_note("check found what is wrong (FAIL above); `lanekeeper check` looks again")
        raise typer.Exit(FAILED)


def _answers(
    known: "Settings", *, asks: bool, broker: str | None, provider: str | None, lanes: str | None, tenant: str | None
) -> Answers:
    """What options say, else what the user answers, else the defaults."""
    from topology.lanes import DEFAULT_LANES

    def answer(given: str | None, question: str, default: str) -> str:
        if given is not None or not asks:
            return default if given is None else given
        return str(typer.prompt(question, default=default))

    has_key = known.anthropic_api_key is not None
    broker = answer(broker, "Broker (AMQP URL)", known.broker_url)
    provider = answer(provider, "Provider (anthropic, simulated)", "anthropic" if has_key else "simulated")
    if provider not in ("anthropic", "simulated"):
        raise typer.BadParameter(f"{provider!r}: anthropic or simulated", param_hint="--provider")
    key = None
    if provider == "anthropic" and not has_key and asks:
        key = typer.prompt("Anthropic's API key", hide_input=True)
    names = answer(lanes, "Lanes, the most urgent first", ",".join(lane.name for lane in DEFAULT_LANES))
    tenant = answer(tenant, "Name of the first application", "my-app")
    return Answers(broker, provider, key, [name.strip() for name in names.split(",")], tenant)


def _settings_file(found: Answers) -> tuple[dict[str, str], str]:
    """New API keys by the name of who uses them, and the text of lanekeeper.toml. Raises SettingsError if the broker,
    a lane or the tenant is wrong."""
    from service.config.loading import load_settings
    from service.gateway import access
    from topology.lanes import DEFAULT_LANES

    values: dict[str, Any] = {"amqp_url": found.broker}
    if found.api_key is not None:
        values["anthropic_api_key"] = found.api_key
    # the broker users that gateways connect as: that of the URL, until there is one for gateways alone
    users = ["gateway", unquote(urlsplit(found.broker).username or "guest")]
    values |= {"speakers": users, "control": {"operators": users}}
    defaults = [lane.name for lane in DEFAULT_LANES]
    lanes: dict[str, Any] = {}
    if found.lanes != defaults:
        lanes = {name: {"rank": RANKS_APART * number} for number, name in enumerate(found.lanes, 1)}
        lanes |= {name: {"enabled": False} for name in defaults if name not in found.lanes}
        values["lanes"] = lanes
    keys = {found.tenant: access.random_key(), "the operator": access.random_key()}
    of_tenant, of_operator = map(access.hash_of, keys.values())
    values["gateway"] = {
        "keys": {of_tenant: {"tenant": found.tenant}, of_operator: {"tenant": "ops", "name": "ops", "operator": "act"}}
    }
    load_settings(**values)
    return keys, "# Written by `lanekeeper init`. All settings: docs/settings.md\n" + "\n".join(_toml(values, ""))


def _toml(table: dict[str, Any], name: str) -> list[str]:
    plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    lines = [f"\n[{name}]", *plain] if name and plain else plain
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _toml(value, f"{name}.{key}" if name else key)
    return [*lines, ""] if not name else lines


def _write(file: Path, text: str) -> None:
    """Only this user may read it, because it has passwords."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
