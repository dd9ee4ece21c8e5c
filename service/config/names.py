"""The paths of all settings, the variables that stand for them, and the values that they allow."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from service.config.settings import PREFIX, Settings

Place = tuple[str, ...]
"""The path of a setting in the nested settings, such as ("lanes", "critical", "slots")."""
ANY: Final = "*"
"""In a setting's path, this stands for a name that the user chooses, such as the name of a provider: ("providers", "*",
"kind")."""


def is_section(kind: object) -> bool:
    """Whether a field's type is a group of settings (a pydantic model), not a single setting."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def declared(kind: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, FieldInfo]]:
    """Each setting of a group, and of the groups in it, with its path."""
    for name, info in kind.model_fields.items():
        here = (*place, name)
        if get_origin(info.annotation) is dict and is_section(inside := get_args(info.annotation)[1]):
            yield from declared(inside, (*here, ANY))
        elif is_section(info.annotation):
            yield from declared(info.annotation, here)  # type: ignore[arg-type]
        else:
            yield here, info


SETTINGS: Final[Mapping[Place, FieldInfo]] = dict(declared(Settings))
_GROUPS: Final = frozenset(place[:depth] for place in SETTINGS for depth in range(1, len(place)))


def pattern(place: Place) -> Place:
    """The key in `SETTINGS`: ("providers", "*", "kind") for ("providers", "eu", "kind")."""
    return tuple(ANY if (*place[:depth], ANY) in _GROUPS else step for depth, step in enumerate(place))


def is_setting(place: Place) -> bool:
    """Whether there is such a setting; a group is none."""
    return pattern(place) in SETTINGS


def variable(place: Place) -> str:
    """The environment variable: `LANEKEEPER_LANES__BATCH__SLOTS` for ("lanes", "batch", "slots")."""
    field = SETTINGS.get(pattern(place))
    return (field and field.alias) or PREFIX + "__".join(place).upper().replace("-", "_")


def inside(place: Place) -> list[str]:
    """The settings and groups in a group. Empty: `place` is no group."""
    at = pattern(place)
    return list(dict.fromkeys(each[len(at)] for each in SETTINGS if len(each) > len(at) and each[: len(at)] == at))


def _types(field: FieldInfo) -> Iterator[Any]:
    todo: list[Any] = [field.annotation]
    while todo:
        kind = todo.pop(0)
        if kind is not type(None):
            yield kind
            if get_origin(kind) is not Literal:
                todo.extend(get_args(kind))


def is_secret(field: FieldInfo) -> bool:
    """Whether the value must not be shown."""
    return SecretStr in _types(field)


def allowed_values(field: FieldInfo) -> str:
    """The values that a setting allows, in words for an error message, such as `a whole number from 1`."""
    types = list(_types(field))
    for kind in types:
        if get_origin(kind) is Literal:
            return " or ".join(get_args(kind))
    if bool in types:
        return "true or false"
    if int in types or float in types:
        return ("a whole number" if int in types else "a number") + _limits(field)
    if SecretStr in types or str in types:
        return "text" if tuple not in {get_origin(kind) for kind in types} else "a list of names"
    return "a file that is there and can be read"


def _limits(field: FieldInfo) -> str:
    text = ""
    for constraint in field.metadata:
        match constraint:
            case annotated_types.Ge(ge=low):
                text += f" from {low}"
            case annotated_types.Gt(gt=low):
                text += f" above {low}"
            case annotated_types.Le(le=high):
                text += f" to {high}" if " from " in text else f", at most {high}"
    return text
