"""Loads the settings; the only file that reads the environment.

    load_settings()            options > environment > .env > TOML > defaults

pydantic-settings reads the sources. This file puts them together, and reports everything that is wrong with the names
that the user wrote.
"""

import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_settings import DotEnvSettingsSource, EnvSettingsSource, InitSettingsSource, TomlConfigSettingsSource

from lanekeeper.contract.problems import SettingsError
from service.config.contradictions import contradictions, missing_for_calls
from service.config.names import ANY, SETTINGS, Place, allowed_values, inside, is_secret, is_setting, pattern, variable
from service.config.settings import ANTHROPIC_URL, PREFIX, Settings
from service.config.value_types import ALLOWED, CONTRADICTION, Disagreement, mask, mask_url
from service.telemetry import redaction
from topology.lanes import DEFAULT_LANES

CONFIG_FILE = Path("lanekeeper.toml")
DOTENV_FILE = Path(".env")
_ALIASES = {info.alias: name for name, info in Settings.model_fields.items() if info.alias}
_OWN_HOSTS = {urlsplit(ANTHROPIC_URL).hostname, "localhost", "127.0.0.1", "::1"}
_OF_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?=.*|PORT_[0-9]+_[A-Z]+(_(PROTO|PORT|ADDR))?=.*|PORT=[a-z]+://.*)"
)
"""The variables that Kubernetes sets in each pod for a Service whose name begins with `lanekeeper`."""


@dataclass(frozen=True, slots=True)
class _Given:
    value: Any
    name: str
    """As the user wrote it, such as "LANEKEEPER_NAMESPACE in .env"."""
    source: str


def load_settings(config: Path | None = None, *, for_calls: bool = False, **options: Any) -> Settings:
    """Read all sources and validate them together.

    `config`: a TOML file that must exist; None: `lanekeeper.toml` is read if it exists. `options`: nested as `Settings`
    is (`lanes={"batch": {"slots": 12}}`). `for_calls`: whether the process will call providers, so that their keys must
    be set. Raises SettingsError, which names everything that is wrong; contradictions when each value is right.
    """
    return load_with_sources(config, for_calls=for_calls, **options)[0]


def load_with_sources(
    config: Path | None = None, *, for_calls: bool = False, **options: Any
) -> tuple[Settings, Mapping[Place, str]]:
    """The settings, and for each that is set its source: `environment`, `option`, or a file. Raises SettingsError."""
    found: dict[Place, _Given] = {}
    lines: list[str] = []
    for source, values, name in _sources(config, options):
        for place, value in values:
            if is_setting(place):
                found[place] = _Given(value, name(place), source)
            else:
                lines.append(f"{name(place)}: {_unknown(place, value, name)}")
    try:
        settings = Settings(**_nested(found))
    except ValidationError as error:
        lines += dict.fromkeys(_wrong_values(error, found))
    else:
        against = [*contradictions(settings), *(missing_for_calls(settings) if for_calls else ())]
        lines += (_contradiction(each, found) for each in against)
    lines += _keys_sent_elsewhere(found)
    if lines:
        count = "wrong setting: " if len(lines) == 1 else f"{len(lines)} wrong settings:\n  "
        raise SettingsError(count + "\n  ".join(lines))
    return settings, {place: each.source for place, each in found.items()}


def _sources(
    config: Path | None, options: dict[str, Any]
) -> Iterator[tuple[str, Iterable[tuple[Place, Any]], Callable[[Place], str]]]:
    """Each source, those that override the others last: its values, and how it names a setting."""
    file = config or CONFIG_FILE
    if config is not None and not config.is_file():
        raise SettingsError(f"configuration file {file} does not exist")
    try:
        toml = TomlConfigSettingsSource(Settings, file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"configuration file {file} cannot be read: {error}") from None
    try:
        if DOTENV_FILE.is_file() and DOTENV_FILE.stat().st_mode & stat.S_IWOTH:
            raise SettingsError(f".env can be written by every user of this machine; run: chmod o-w {DOTENV_FILE}")
        dotenv = DotEnvSettingsSource(Settings, DOTENV_FILE, dotenv_filtering="only_existing")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{DOTENV_FILE} cannot be read: {error}") from None
    yield str(file), _flat(toml()), lambda place: f"{'.'.join(place)} in {file}"
    yield str(DOTENV_FILE), _of_variables(dotenv), lambda place: f"{variable(place)} in {DOTENV_FILE}"
    yield "environment", _of_variables(EnvSettingsSource(Settings)), variable
    yield (
        "option",
        _flat(InitSettingsSource(Settings, options)()),
        lambda place: f"{'.'.join(place)} on the command line",
    )


def _flat(values: Mapping[str, Any], group: Place = ()) -> Iterator[tuple[Place, Any]]:
    for key, value in values.items():
        place = (*group, _ALIASES.get(key, key))
        if isinstance(value, Mapping) and not is_setting(place):
            yield from _flat(value, place)
        else:
            yield place, value


def _of_variables(source: EnvSettingsSource) -> Iterator[tuple[Place, Any]]:
    """With those that no setting has, which pydantic-settings leaves out."""
    for place, value in _flat(source()):
        if is_setting(place):
            yield _with_hyphens(place), value
    for name, value in source.env_vars.items():
        if name.upper().startswith(PREFIX) and not _OF_KUBERNETES.fullmatch(f"{name.upper()}={value}"):
            place = tuple(name[len(PREFIX) :].split("__"))
            if not is_setting(place):
                yield place, value


def _with_hyphens(place: Place) -> Place:
    """A lane's name may have `-`, but no variable, and it has no `_`."""
    at = place.index("lanes") + 1 if "lanes" in place else 0
    return (*place[:at], place[at].replace("_", "-"), *place[at + 1 :]) if pattern(place)[at] == ANY else place


def _nested(found: Mapping[Place, _Given]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for place, each in found.items():
        group = nested
        for step in place[:-1]:
            group = group.setdefault(step, {})
        group[place[-1]] = each.value
    return nested


def _unknown(place: Place, value: Any, name: Callable[[Place], str]) -> str:
    if within := inside(place):
        return f"found {mask(value)}, allowed is a table with {', '.join(within).replace(ANY, 'a table for each name')}"
    candidates = {
        ".".join(place[at] if step == ANY else step for at, step in enumerate(setting)): setting
        for setting in SETTINGS
        if ANY not in setting[len(place) :]
    }
    near = get_close_matches(".".join(place), candidates, n=1, cutoff=0.7)
    return "no such setting" + (f"; did you mean {name(tuple(near[0].split('.'))).partition(' ')[0]}?" if near else "")


def _wrong_values(error: ValidationError, found: Mapping[Place, _Given]) -> Iterator[str]:
    for details in error.errors():
        first, *rest = map(str, details["loc"])
        location = (_ALIASES.get(first, first), *rest)
        if details["type"] == CONTRADICTION:
            yield from (_contradiction(each.under(location), found) for each in details["ctx"]["found"])
            continue
        if details["type"] == "missing":  # only a lane's rank has no default
            near = get_close_matches(location[1], [lane.name for lane in DEFAULT_LANES])
            meant = f", did you mean {near[0]}?" if near else ";"
            text = f"no such lane{meant} a lane is declared by its rank, {variable(location)}"
            yield _contradiction(Disagreement(text, at=(location[:2],)), found)
        # pydantic's location may be longer than the setting's path, because it may name an item of a list
        for place in (location[:n] for n in range(1, len(location) + 1)):
            if place in found:
                field, value = SETTINGS[pattern(place)], found[place].value
                what = details["ctx"]["what"] if details["type"] == ALLOWED else allowed_values(field)
                yield f"{found[place].name}: found {_shown(value, is_secret(field))}, allowed is {what}"


def _shown(value: Any, is_secret: bool) -> str:
    if not is_secret:
        return mask(value)
    return mask_url(value.strip()) if isinstance(value, str) and "://" in value else "(hidden)"


def _contradiction(disagreement: Disagreement, found: Mapping[Place, _Given]) -> str:
    """With the names of those settings that are set; if none is, the first one's, written like its neighbour's."""
    names = [each.name for at in disagreement.at for place, each in found.items() if place[: len(at)] == at]
    if not names:
        first = disagreement.at[0]
        beside = next((place for place in found if place[:-1] == first[:-1]), first)
        dotted = ".".join(beside)
        is_dotted = beside in found and found[beside].name.startswith(dotted)
        names = [found[beside].name.replace(dotted, ".".join(first), 1) if is_dotted else variable(first)]
    return redaction.text(f"{', '.join(dict.fromkeys(names))}: {disagreement.text}")  # a key may stand for a name


def _keys_sent_elsewhere(found: Mapping[Place, _Given]) -> Iterator[str]:
    """The `.env` of whatever folder a command is run in may not say where a key that another source has set is sent."""
    for place, address in found.items():
        key = found.get((*place[:-1], place[-1].replace("base_url", "api_key")))
        if not place[-1].endswith("base_url") or key is None or key.source == address.source:
            continue
        text = str(address.value).strip()
        if address.source == str(DOTENV_FILE) and urlsplit(text).hostname not in _OWN_HOSTS:
            yield (
                f"{address.name}: {mask_url(text)} would get the key {key.name} of another source; "
                "if that is meant, set both in the same place"
            )


T = TypeVar("T")


class Changed(Generic[T]):
    """Reads a part of the settings again when a file that settings come from has changed. `part` takes it from all
    settings; the other arguments are those of `load_settings`. Make it before the settings are loaded, so that no
    change is missed."""

    def __init__(self, part: Callable[[Settings], T], config: Path | None = None, **options: Any) -> None:
        self._part = part
        self._config = config
        self._options = options
        self._files = (config or CONFIG_FILE, DOTENV_FILE)
        self._seen = self._state()

    def __call__(self) -> T | None:
        """The part; None if no file has changed since the last call. Raises SettingsError."""
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        return self._part(load_settings(self._config, **self._options))

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_state_of(file) for file in self._files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
