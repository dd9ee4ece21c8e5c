"""Loads the settings; the only file that reads the environment.

    load_settings()            options > environment > .env > TOML > defaults

A setting in several of these sources gets its value from the leftmost one. All sources are read into one table, which
contains the value of each setting, and its name as the user wrote it. So names that pydantic-settings would ignore are
noticed, and all errors are reported at once, under the names that the user wrote. pydantic-settings merges the table
with the defaults, so that one field of a lane can be set while the others keep their defaults, and validates it."""

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import ValidationError

from lanekeeper.contract.problems import SettingsError
from service.config import cross_checks, error_messages, names
from service.config.error_messages import Found
from service.config.names import Place
from service.config.settings import PREFIX, Settings

CONFIG_FILE = Path("lanekeeper.toml")
DOTENV_FILE = Path(".env")


def load_settings(
    config: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: Path = DOTENV_FILE,
    for_calls: bool = False,
    **options: Any,
) -> Settings:
    """Read all sources and validate them together.

    `config`: a TOML file that must exist; None: `lanekeeper.toml` is read if it exists. `options`: nested as `Settings`
    is (`lanes={"batch": {"slots": 12}}`), with None for options that were not given. `for_calls`: whether the process
    will call providers, so that their keys must be set. Raises SettingsError, which names everything that is wrong.
    """
    return _read(config, os.environ if environ is None else environ, dotenv, options).settings(for_calls=for_calls)


def load_with_sources(config: Path | None = None, **options: Any) -> tuple[Settings, Mapping[Place, str]]:
    """Load the settings, and report for each setting (by its path in the nested settings) which source set it:
    `environment`, `option`, or the file's name. Raises SettingsError."""
    given = _read(config, os.environ, DOTENV_FILE, options)
    return given.settings(for_calls=False), {place: found.source for place, found in given.found.items()}


def _read(config: Path | None, environ: Mapping[str, str], dotenv: Path, options: Mapping[str, Any]) -> "_Given":
    given = _Given()
    if config is not None or CONFIG_FILE.is_file():
        file = config or CONFIG_FILE
        given.add(_toml(file), source=str(file), where=f" in {file}")
    if dotenv.is_file():
        given.add_variables(_dotenv(dotenv), source=str(dotenv), where=f" in {dotenv}")
    given.add_variables(environ, source="environment")
    given.add(options, source="option", where=" on the command line")
    return given


def _toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. pydantic-settings' own reader is not used, because it silently ignores a path that does not
    exist or is a pipe."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"configuration file {path} cannot be read: {error}") from None


def _dotenv(path: Path) -> dict[str, str]:
    try:
        return {name: value or "" for name, value in dotenv_values(path, encoding="utf-8").items()}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


@dataclass(slots=True)
class _Given:
    """Everything that was read from the sources of settings. A source that is added later overrides earlier ones."""

    found: dict[Place, Found] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Error messages: one line for each name that is not a setting."""

    def add(self, values: Mapping[str, Any], *, source: str, where: str, group: Place = ()) -> None:
        """Add the values of a file or of options. `where`: appended to names in error messages, such as " in .env".
        `group`: the path, in the nested settings, of the group to which `values` belong."""
        for key, value in values.items():
            place = (*group, key)
            name = ".".join(place) + where
            if value is None:
                continue
            if names.is_setting(place):
                self.found[place] = Found(value, name, source)
            elif names.is_group(place) and isinstance(value, Mapping):
                self.add(value, source=source, where=where, group=place)
            else:
                self.problems.append(f"{name}: {names.unknown_key(place, value)}")

    def add_variables(self, variables: Mapping[str, str], *, source: str, where: str = "") -> None:
        """Add environment variables. An empty variable counts as not set, because Docker Compose passes an empty one
        for `${NAME:-}` if NAME is not set."""
        for name, value in variables.items():
            if (place := names.place_of(name)) is None:
                if name.upper().startswith(PREFIX):
                    self.problems.append(f"{name}{where}: {names.unknown_variable(name)}")
            elif value.strip():
                self.found[place] = Found(value, name + where, source)

    def settings(self, *, for_calls: bool) -> Settings:
        """Create the settings and check them. Raises SettingsError, which names everything wrong."""
        settings, wrong = self._validated()
        disagreements = [
            *cross_checks.every(settings),
            *(cross_checks.missing_for_calls(settings) if for_calls else ()),
        ]
        lines = [
            *self.problems,
            *wrong.values(),
            *error_messages.of_disagreements(disagreements, self.found, wrong=wrong.keys()),
        ]
        if lines:
            count = "wrong setting: " if len(lines) == 1 else f"{len(lines)} wrong settings:\n  "
            raise SettingsError(count + "\n  ".join(lines))
        return settings

    def _validated(self) -> tuple[Settings, dict[Place, str]]:
        """Create the settings, leaving out wrong values until pydantic accepts the rest. Returns the settings, with
        defaults in place of wrong values, and the error message for each wrong value."""
        wrong: dict[Place, str] = {}
        while True:
            try:
                return Settings(**self._nested(omitted=wrong)), wrong
            except ValidationError as error:
                lines = error_messages.of_values(error, self.found)
                if not lines.keys() - wrong.keys():  # no further value to leave out: the loop would not end
                    raise
                wrong |= lines

    def _nested(self, *, omitted: Collection[Place]) -> dict[str, Any]:
        """The values from all sources as nested dictionaries with the structure of `Settings`, without those of the
        settings in `omitted`."""
        nested: dict[str, Any] = {}
        for place, found in self.found.items():
            group = nested
            for step in place[:-1]:
                group = group.setdefault(step, {})
            if place not in omitted:
                group[place[-1]] = found.value
        for lane in nested.get("lanes", {}).values():
            if "slots" in lane:  # a lane whose slots are set gets no more of them, unless `slots_max` is set as well
                lane.setdefault("slots_max", lane["slots"])
        return nested
