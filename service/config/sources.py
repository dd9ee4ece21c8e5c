"""Where settings come from: a TOML file, `.env`, the environment, command-line options; later ones win.

Each source is read into `Found` values, so that whatever is wrong can be called by the name under which its author
wrote it. What is not a setting, or is one only in a later version, is a problem of the source that has it.
"""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from dotenv import dotenv_values
from pydantic import BaseModel

from lanekeeper.contract.problems import SettingsError
from service.config.masking import mask

PREFIX = "LANEKEEPER_"
Place = tuple[str, ...]
"""A setting's place: ("lanes", "critical", "slots")."""
ANY = "*"
"""In the place of a known setting: the name of a section that its author chooses, ("providers", "*", "kind")."""


@dataclass(frozen=True, slots=True)
class Found:
    """A value, the name under which it was found ("LANEKEEPER_NAMESPACE in .env"), and where."""

    value: Any
    name: str
    source: str
    """`environment`, `option`, or the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """All settings that there are: environment name by place, and what is not available in this version."""

    env_names: Mapping[Place, str]
    later: Mapping[Place, str]
    """Place -> what it belongs to ("the store")."""

    def pattern(self, place: Place) -> Place:
        """The place as it stands in `env_names`."""
        if len(place) > 1 and (*place[:1], ANY) in self.sections:
            return (place[0], ANY, *place[2:])
        return place

    @property
    def sections(self) -> frozenset[Place]:
        return frozenset(path[:depth] for path in self.env_names for depth in range(1, len(path)))

    def belongs_to_later(self, path: Place) -> str | None:
        return next((what for place, what in self.later.items() if path[: len(place)] == place), None)


def env_names(kind: type[BaseModel], place: Place = ()) -> dict[Place, str]:
    """The environment's name of every field of a model and of the models in it."""
    found: dict[Place, str] = {}
    for name, info in kind.model_fields.items():
        here = (*place, name)
        if get_origin(info.annotation) is dict and is_section(inside := get_args(info.annotation)[1]):
            found |= env_names(inside, (*here, ANY))
        elif is_section(info.annotation):
            found |= env_names(info.annotation, here)  # type: ignore[arg-type]
        else:
            found[here] = PREFIX + "__".join(here).upper()
    return found


def _filled_in(name: str, place: Place) -> str:
    """An environment name, with the name of the section that its author chose."""
    return name.replace(f"__{ANY}__", f"__{place[1].upper()}__") if f"__{ANY}__" in name else name


def is_section(kind: object) -> bool:
    """Whether it is a model, with settings in it."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@dataclass(slots=True)
class Reading:
    """What the sources gave so far, by place, and what is wrong with their names."""

    found: dict[Place, Found] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def nested(self, *, without: Collection[Place] = ()) -> dict[str, Any]:
        """The values as nested dicts; of those left out, the sections alone."""
        root: dict[str, Any] = {}
        for path, each in self.found.items():
            node = root
            for step in path[:-1]:
                node = node.setdefault(step, {})
            if path not in without:
                node[path[-1]] = each.value
        return root

    def name_of(self, place: Place, known: Known) -> str:
        """Of a setting that was not given: as the author of its neighbours would write it."""
        for near, each in self.found.items():
            if near[:-1] == place[:-1] and each.name.startswith(".".join(near)):
                return each.name.replace(".".join(near), ".".join(place), 1)
        return _filled_in(known.env_names[known.pattern(place)], place)


def read_toml(reading: Reading, known: Known, path: Path) -> None:
    """Add a TOML file's settings. Raises SettingsError where it cannot be read at all."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"configuration file {path} cannot be read: {error}") from None
    _walk(reading, known, document, (), where=f" in {path}")


def read_options(reading: Reading, known: Known, options: Mapping[str, Any]) -> None:
    """Add command-line options, nested as the settings are; None: not given."""
    _walk(reading, known, options, (), where=" on the command line")


def read_dotenv(reading: Reading, known: Known, path: Path) -> None:
    """Add the settings of a `.env` file, if there is one; keys that are not ours are left alone."""
    if not path.is_file():
        return
    try:
        values = dotenv_values(path, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    read_environment(reading, known, {key: value or "" for key, value in values.items()}, where=f" in {path}")


def read_environment(reading: Reading, known: Known, environ: Mapping[str, str], *, where: str = "") -> None:
    """Add environment variables. An empty one counts as not set: Compose writes `${NAME:-}` so."""
    paths = {name: path for path, name in known.env_names.items()}
    for name, value in environ.items():
        if (path := paths.get(name, _in_named_section(known, name))) is not None:
            if value.strip():
                reading.found[path] = Found(value, name + where, where.removeprefix(" in ") or "environment")
        elif name.upper().startswith(PREFIX):
            reading.problems.append(_unknown_variable(known, name, where=where))


def _in_named_section(known: Known, name: str) -> Place | None:
    place = tuple(name.removeprefix(PREFIX).lower().split("__"))
    is_ours = name.startswith(PREFIX) and name == name.upper() and ANY not in place
    return place if is_ours and ANY in known.pattern(place) and known.pattern(place) in known.env_names else None


def _unknown_variable(known: Known, name: str, *, where: str) -> str:
    path = tuple(name.upper().removeprefix(PREFIX).lower().split("__"))
    if (what := known.belongs_to_later(path)) is not None:
        return f"{name}{where}: {what} is not available in this version; remove it"
    if path in known.sections:
        inside = next(env for place, env in known.env_names.items() if place[: len(path)] == path)
        return f"{name}{where}: is a group of settings; set one of them, such as {inside}"
    known_names = {_filled_in(env, path).removeprefix(PREFIX): _filled_in(env, path) for env in _near(known, path)}
    near = get_close_matches(name.upper().removeprefix(PREFIX), known_names, n=1, cutoff=0.7)
    return f"{name}{where}: no such setting" + (f"; did you mean {known_names[near[0]]}?" if near else "")


def _near(known: Known, path: Place) -> Iterator[str]:
    """Names that may be meant; those in named sections only where there is such a name."""
    return (env for env in known.env_names.values() if len(path) > 1 or ANY not in env)


def _walk(reading: Reading, known: Known, node: Mapping[str, Any], path: Place, *, where: str) -> None:
    for key, value in node.items():
        place = (*path, key)
        name = ".".join(place) + where
        if value is None:
            continue
        if known.pattern(place) in known.env_names:
            source = where.removeprefix(" in ") if where.startswith(" in ") else "option"
            reading.found[place] = Found(value, name, source)
        elif (what := known.belongs_to_later(place)) is not None:
            reading.problems.append(f"{name}: {what} is not available in this version; remove it")
        elif known.pattern(place) in known.sections:
            if isinstance(value, Mapping):
                _walk(reading, known, value, place, where=where)
            else:
                inside = ", ".join(_inside(known, known.pattern(place))).replace(ANY, "a table for each name")
                reading.problems.append(f"{name}: found {mask(value)}, allowed is a table with {inside}")
        else:
            near = get_close_matches(key, _inside(known, known.pattern(path)), n=1, cutoff=0.7)
            reading.problems.append(f"{name}: no such setting" + (f"; did you mean {near[0]}?" if near else ""))


def _inside(known: Known, path: Place) -> list[str]:
    return list(dict.fromkeys(place[len(path)] for place in known.env_names if place[: len(path)] == path != place))
