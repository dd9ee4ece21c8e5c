"""Declares options that several commands have, and reads their values: settings, durations, times, lanes."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from service.config.settings import Settings


def named(name: str, metavar: str, help: str) -> Any:
    """Declares an option; `metavar` stands for its value in `--help`."""
    return typer.Option(name, metavar=metavar, help=help)


def duration(name: str, help: str) -> Any:
    """Declares an option whose value is a duration, in seconds."""
    return typer.Option(name, parser=seconds, metavar="DURATION", help=help)


def instant(name: str, help: str) -> Any:
    """Declares an option whose value is a time with its zone."""
    return typer.Option(name, parser=moment, metavar="TIME", help=help)


Texts = list[str] | None
Config = Annotated[
    Path | None, named("--config", "FILE", "TOML file with settings; default: lanekeeper.toml, if there.")
]
Set = Annotated[
    Texts,
    named("--set", "NAME=VALUE", "Set one setting, such as lanes.batch.slots=12; overrides all other sources."),
]
Tenant = Annotated[
    str | None, named("--tenant", "TENANT", "The request's tenant: yourself, or one that you may act for.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Host = Annotated[str | None, typer.Option("--host", help="Where the HTTP server listens.")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65_535, help="Its port; 0: any free one.")]

LONGEST_S = 10 * 366 * 86_400
MOST_PER_S = 100_000
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d|)")


class Given(NamedTuple):
    """What options say about the settings: the file, and values nested as `Settings` is."""

    config: Path | None
    values: dict[str, Any]

    def settings(self, *, for_calls: bool = False) -> "Settings":
        """`for_calls`: the command calls providers, which need keys. Raises SettingsError."""
        from service.config.loading import load_settings

        return load_settings(self.config, for_calls=for_calls, **self.values)


def taking(make: Callable[..., object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, as its first parameter, what `make` returns for its own options: they become the command's."""
    own = signature(make).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        first, *others = signature(command).parameters.values()

        @wraps(command)
        def run(**given: Any) -> None:
            made = make(**{name: given.pop(name) for name in own})
            command(**{first.name: made}, **given)

        parameters = [*others, *own.values()]
        run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


@taking
def with_given(config: Config = None, sets: Set = None) -> Given:
    """Raises typer.BadParameter."""
    return Given(config, _given_by(sets))


@taking
def with_server(host: Host = None, port: Port = None, config: Config = None, sets: Set = None) -> Given:
    """Raises typer.BadParameter."""
    return Given(config, _given_by(sets, host=host, port=port))


@taking
def with_settings(config: Config = None, sets: Set = None) -> "Settings":
    """The settings. Raises SettingsError, typer.BadParameter."""
    return Given(config, _given_by(sets)).settings()


def lane_names(settings: "Settings", named: Sequence[str]) -> Sequence[str]:
    """The lanes that the option `--lane` names, if they exist. Raises typer.BadParameter."""
    known = [lane.name for lane in settings.lane_specs()]
    for name in named:
        if name not in known:
            raise typer.BadParameter(f"no lane {name!r}; there are {', '.join(known)}", param_hint="--lane")
    return named


def _given_by(sets: list[str] | None, **gateway: str | int | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for option in sets or ():
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{option!r} is not NAME=VALUE, such as lanes.batch.slots=12", param_hint="--set")
        _put(given, name.strip().split("."), value)
    for name, of_server in gateway.items():
        if of_server is not None:
            _put(given, ["gateway", name], of_server)
    return given


def _put(given: dict[str, Any], path: list[str], value: object) -> None:
    for step in path[:-1]:
        inside = given.setdefault(step, {})
        if not isinstance(inside, dict):
            raise typer.BadParameter(f"{'.'.join(path)} lies inside another value that is set", param_hint="--set")
        given = inside
    given[path[-1]] = value


def seconds(text: str) -> float:
    """Read a duration: `100ms`, `10s`, `5m`, `2h`, `1d`; without a unit, seconds. Raises typer.BadParameter."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or (duration_s := float(found[1]) * _UNITS_S[found[2]]) > LONGEST_S:
        raise typer.BadParameter(f"{text[:80]!r} is no duration, such as 100ms, 10s, 5m, 2h or 1d (at most ten years)")
    return duration_s


def per_second(text: str) -> float:
    """Read how many a second. Raises typer.BadParameter."""
    with suppress(ValueError):
        if 0.001 <= (found := float(text)) <= MOST_PER_S:
            return found
    raise typer.BadParameter(f"{text[:80]!r}: allowed is a number from 0.001 to {MOST_PER_S}")


def moment_or_ago(text: str) -> datetime:
    """Read a time with its zone, or a duration before now. Raises typer.BadParameter."""
    return moment(text) if "T" in text else datetime.now(UTC) - timedelta(seconds=seconds(text))


def moment(text: str) -> datetime:
    """Read a time with its zone, in the format of RFC 3339. Raises typer.BadParameter."""
    allowed = "allowed is a time with its zone, such as 2026-11-21T18:00:00Z"
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: {allowed}") from None
    if found.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no zone: {allowed}")
    return found


Rate = Annotated[
    float | None, typer.Option("--rate", parser=per_second, metavar="NUMBER", help="At most so many a second.")
]
