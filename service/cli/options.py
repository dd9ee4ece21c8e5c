"""Options that several commands have: settings, durations, times, lanes."""

import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from service.config.settings import Settings


class LaneName(StrEnum):
    """Lanes that a person can choose."""

    CRITICAL = "critical"
    NORMAL = "normal"
    BATCH = "batch"


Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file with settings; default: lanekeeper.toml, if there."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set one setting, as lanes.batch.slots=12; comes before all else."
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="Whose request it is: yourself, or whom you may speak for."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d|)")


def settings_of(config: Path | None, sets: list[str] | None, *, for_calls: bool = False, **options: Any) -> "Settings":
    """The settings that a command works with. `options`: the command's own options, nested as `Settings` is; None for
    those not given.
    `for_calls`: it calls providers.

    Raises SettingsError, typer.BadParameter.
    """
    from service.config.loading import load_settings

    return load_settings(config, for_calls=for_calls, **given_by(sets, options))


def given_by(sets: list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `--set` and a command's own options give, nested as `Settings` is. Raises
    typer.BadParameter."""
    given: dict[str, Any] = {}
    for each in sets or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{each!r} is not NAME=VALUE, such as lanes.batch.slots=12", param_hint="--set")
        _put(given, name.strip().split("."), value)
    for name, value in options.items():
        if isinstance(value, dict):
            for inner, inner_value in value.items():
                if inner_value is not None:
                    _put(given, [name, inner], inner_value)
        elif value is not None:
            given[name] = value
    return given


def _put(given: dict[str, Any], path: list[str], value: object) -> None:
    for step in path[:-1]:
        inside = given.setdefault(step, {})
        if not isinstance(inside, dict):
            raise typer.BadParameter(f"{'.'.join(path)} lies inside another value that is set", param_hint="--set")
        given = inside
    given[path[-1]] = value


def seconds(text: str) -> float:
    """A duration: `100ms`, `10s`, `5m`, `2h`, `1d`, or seconds. Raises typer.BadParameter."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration, such as 100ms, 10s, 5m, 2h or 1d")
    return float(found[1]) * _UNITS_S[found[2]]


def moment(text: str) -> datetime:
    """A time with a zone, as RFC 3339 has it. Raises typer.BadParameter."""
    allowed = "allowed is a time with its zone, such as 2026-11-21T18:00:00Z"
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: {allowed}") from None
    if found.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no zone: {allowed}")
    return found


def version() -> str:
    """The version of the installed distribution; unknown in a checkout that is not installed."""
    try:
        return metadata.version("lanekeeper")
    except metadata.PackageNotFoundError:
        return "0+checkout"
