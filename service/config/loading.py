"""Loads the settings; the only file that reads the environment.

    load_settings()            options > environment > .env > TOML > defaults

pydantic-settings splits the environment's names, merges the sources and validates the values. But it ignores unknown
names, and does not report which source gave a value. This file adds both, so that all errors are reported at once,
under the names that the user wrote."""

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dotenv import dotenv_values
from pydantic_settings import EnvSettingsSource, InitSettingsSource
from pydantic_settings.sources import DefaultSettingsSource

from lanekeeper.contract.problems import SettingsError
from service.config import cross_checks, error_messages, names
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

    `config`: a TOML file that must exist; None: `lanekeeper.toml`, if there. `options`: nested as `Settings` is
    (`lanes={"batch": {"slots": 12}}`), with None for options that were not given. `for_calls`: whether the process will
    call providers, so that their keys must be set. Raises SettingsError, which names everything that is wrong.
    """
    return _read(config, os.environ if environ is None else environ, dotenv, options).settings(for_calls=for_calls)


def load_with_sources(config: Path | None = None, **options: Any) -> tuple[Settings, Mapping[Place, str]]:
    """Load the settings, and report for each setting (by its path in the nested settings) which source set it:
    `environment`, `option`, or the file's name. Raises SettingsError."""
    given = _read(config, os.environ, DOTENV_FILE, options)
    return given.settings(for_calls=False), {place: found.source for place, found in given.found.items()}


@dataclass(slots=True)
class _Given:
    """Everything that was read from the sources of settings: options, environment, `.env` and TOML files."""

    values: list[dict[str, Any]] = field(default_factory=list)
    """The values of each source, nested as the settings are. Later sources override earlier ones."""
    found: dict[Place, error_messages.Found] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Error messages: one line for each name that is not a setting."""

    def add(self, values: Mapping[str, Any], *, source: str, where: str) -> None:
        """Add the values of a file or of options. `where`: appended to names in error messages, such as " in .env"."""
        self.values.append(self._settings_in(values, (), source, where))

    def add_variables(self, variables: Mapping[str, str], *, source: str, where: str = "") -> None:
        """Add environment variables. An empty variable counts as not set: Compose passes one for `${NAME:-}`."""
        reader = EnvSettingsSource(Settings)
        reader.env_vars = used = {}
        for name, value in variables.items():
            if (place := names.place_of(name)) is None:
                if name.upper().startswith(PREFIX):
                    self.problems.append(f"{name}{where}: {names.unknown_variable(name)}")
            elif value.strip():
                used[name.lower()] = value
                self.found[place] = error_messages.Found(value, name + where, source)
        self.values.append({names.field_name(key): value for key, value in reader().items()})

    def _settings_in(self, values: Mapping[str, Any], place: Place, source: str, where: str) -> dict[str, Any]:
        """The values that are settings, nested as before. Adds them to `found`, and unknown names to `problems`."""
        known = {}
        for key, value in values.items():
            here = (*place, key)
            name = ".".join(here) + where
            if value is None:
                continue
            if names.is_setting(here):
                # A table with names that the user chooses is a single setting. pydantic-settings would merge a dict
                # with the same table of other sources.
                known[key] = MappingProxyType(value) if isinstance(value, dict) else value
                self.found[here] = error_messages.Found(value, name, source)
            elif names.is_group(here) and isinstance(value, Mapping):
                if inside := self._settings_in(value, here, source, where):
                    known[key] = inside
            else:
                self.problems.append(f"{name}: {names.unknown_key(here, value)}")
        return known

    def settings(self, *, for_calls: bool) -> Settings:
        """Create the settings from all sources and check them. Raises SettingsError, which names everything wrong."""
        settings, wrong = error_messages.validate(self.create, self.found)
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

    def create(self, omitted: Collection[Place]) -> Settings:
        """Create the settings from all sources, without the values of the settings in `omitted` (their paths). Raises
        ValidationError."""
        layers = [{"lanes": self._fixed_slots(omitted)}, *(_without(values, omitted) for values in self.values)]
        sources = (
            *(InitSettingsSource(Settings, values) for values in reversed(layers)),
            DefaultSettingsSource(Settings),
        )
        return Settings(_build_sources=(sources, {}))  # type: ignore[call-arg]  # mypy knows only fields as arguments

    def _fixed_slots(self, omitted: Collection[Place]) -> dict[str, Any]:
        """A default for `slots_max` of each lane whose `slots` are set: the same number, so that the lane gets no more
        slots than the user has set."""
        places = (place for place in self.found if place[0] == "lanes" and place[2] == "slots" and place not in omitted)
        return {place[1]: {"slots_max": self.found[place].value} for place in places}


def _without(values: Mapping[str, Any], places: Collection[Place], here: Place = ()) -> dict[str, Any]:
    """A copy of nested values, without those at the given places. `here`: the place of `values` themselves."""
    return {
        key: _without(value, places, (*here, key)) if names.is_group((*here, key)) else value
        for key, value in values.items()
        if (*here, key) not in places
    }


def _read(config: Path | None, environ: Mapping[str, str], dotenv: Path, options: Mapping[str, Any]) -> _Given:
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
    """Read a TOML file. pydantic-settings is not used, because it ignores a missing file, and a pipe."""
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
