"""The names of settings: `lanes.batch.slots` in a TOML file and for `--set`, `LANEKEEPER_LANES__BATCH__SLOTS` in the
environment; and the error messages for names that are no settings."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from service.config.masking import mask
from service.config.settings import PREFIX, Settings

Place = tuple[str, ...]
"""The path of a setting in the nested settings, such as ("lanes", "critical", "slots")."""
ANY: Final = "*"
"""In a setting's path, this stands for a name that the user chooses, such as the name of a provider: ("providers", "*",
"kind")."""
_LATER: Final[Mapping[Place, str]] = {("webhooks",): "the sending of webhooks"}
"""Names that are reserved for settings of later versions, and what these will configure. To use such a name is an
error."""


def is_section(kind: object) -> bool:
    """Whether a field's type is a group of settings (a pydantic model), not a single setting."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _declared(kind: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, FieldInfo]]:
    for name, info in kind.model_fields.items():
        here = (*place, name)
        if get_origin(info.annotation) is dict and is_section(inside := get_args(info.annotation)[1]):
            yield from _declared(inside, (*here, ANY))
        elif is_section(info.annotation):
            yield from _declared(info.annotation, here)  # type: ignore[arg-type]
        else:
            yield here, info


SETTINGS: Final[Mapping[Place, FieldInfo]] = dict(_declared(Settings))
"""All settings by their path, such as ("lanes", "batch", "slots"), in the order of their declaration."""
_GROUPS: Final = frozenset(place[:depth] for place in SETTINGS for depth in range(1, len(place)))
_ALIASES: Final = {info.alias: name for name, info in Settings.model_fields.items() if info.alias}
"""For each environment variable without the prefix `LANEKEEPER_`, such as ANTHROPIC_API_KEY: the field of `Settings`
that it sets."""


def field_name(name: str) -> str:
    """The field of `Settings` that an environment variable without the prefix `LANEKEEPER_`, such as ANTHROPIC_API_KEY,
    sets. Any other name is returned as it is."""
    return _ALIASES.get(name, name)


def pattern(place: Place) -> Place:
    """A setting's path with `*` in place of a name that the user chooses, as in the keys of `SETTINGS`: ("providers",
    "*", "kind") for ("providers", "eu", "kind")."""
    return (place[0], ANY, *place[2:]) if len(place) > 1 and (place[0], ANY) in _GROUPS else place


def is_setting(place: Place) -> bool:
    """Whether there is a setting with this path, such as ("lanes", "batch", "slots")."""
    return pattern(place) in SETTINGS


def is_group(place: Place) -> bool:
    """Whether there is a group of settings with this path, such as ("lanes", "batch")."""
    return pattern(place) in _GROUPS


def variable(place: Place) -> str:
    """The environment variable of the setting with this path: `LANEKEEPER_LANES__BATCH__SLOTS` for ("lanes", "batch",
    "slots")."""
    return SETTINGS[pattern(place)].alias or PREFIX + "__".join(place).upper()


def place_of(name: str) -> Place | None:
    """The path of the setting that an environment variable sets; None if no setting has exactly this variable."""
    place = (_ALIASES[name],) if name in _ALIASES else _as_place(name)
    return place if is_setting(place) and variable(place) == name else None


def _as_place(name: str) -> Place:
    return tuple(name.upper().removeprefix(PREFIX).lower().split("__"))


def unknown_variable(name: str) -> str:
    """The error message for an environment variable that begins with `LANEKEEPER_` and sets nothing."""
    place = _as_place(name)
    if (later := _later(place)) is not None:
        return later
    if place in _GROUPS:
        inside = next(setting for setting in SETTINGS if setting[: len(place)] == place)
        return f"is a group of settings; set one of them, such as {variable(inside)}"
    # A setting whose path contains `*` is a candidate only if the variable has a name at that position.
    candidates = [
        (setting[0], place[1], *setting[2:]) if ANY in setting else setting
        for setting in SETTINGS
        if len(place) > 1 or ANY not in setting
    ]
    return _no_setting(
        name.upper().removeprefix(PREFIX), {known.removeprefix(PREFIX): known for known in map(variable, candidates)}
    )


def unknown_key(place: Place, value: Any) -> str:
    """The error message for a key or an option that is no setting, or for a value in place of a group."""
    if (later := _later(place)) is not None:
        return later
    if is_group(place):
        inside = ", ".join(_inside(place)).replace(ANY, "a table for each name")
        return f"found {mask(value)}, allowed is a table with {inside}"
    return _no_setting(place[-1], {key: key for key in _inside(place[:-1])})


def _later(place: Place) -> str | None:
    found = next((what for later, what in _LATER.items() if place[: len(later)] == later), None)
    return None if found is None else f"{found} is not available in this version; remove it"


def _no_setting(name: str, known: Mapping[str, str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return "no such setting" + (f"; did you mean {known[near[0]]}?" if near else "")


def _inside(place: Place) -> list[str]:
    """The names of the settings and groups directly inside the group of settings with the path `place`."""
    at = pattern(place)
    return list(dict.fromkeys(setting[len(at)] for setting in SETTINGS if setting[: len(at)] == at))
