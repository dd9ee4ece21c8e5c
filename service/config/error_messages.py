"""Error messages for wrong settings: one line for each, with the name that the user wrote."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from service.config import names
from service.config.masking import mask, mask_url
from service.config.names import ANY, Place
from service.config.sections import Disagreement
from service.config.value_types import ALLOWED
from service.telemetry import redaction


@dataclass(frozen=True, slots=True)
class Found:
    """The value of a setting, as a source (a file, the environment or an option) gave it, with the name as the user
    wrote it, such as "LANEKEEPER_NAMESPACE in .env"."""

    value: Any
    name: str
    source: str
    """Where the value comes from: `environment`, `option`, or the file's name."""


def of_values(error: ValidationError, found: Mapping[Place, Found]) -> dict[Place, str]:
    """The error message for each wrong value in `found`, by the path of its setting."""
    lines: dict[Place, str] = {}
    for details in error.errors():
        first, *rest = map(str, details["loc"])
        location = (names.field_name(first), *rest)
        # pydantic's location may be longer than the setting's path, because it may name an item of a list.
        for place in (location[:n] for n in range(1, len(location) + 1)):
            if place in found:
                lines[place] = _line(place, details, found[place])
    return lines


def of_disagreements(
    disagreements: Iterable[Disagreement], found: Mapping[Place, Found], *, wrong: Collection[Place]
) -> list[str]:
    """The error messages for contradictions between settings. Contradictions with a setting that is wrong by itself are
    left out."""
    return [
        redaction.text(f"{_names(disagreement.at, found)}: {disagreement.text}")  # a key may stand where a name belongs
        for disagreement in disagreements
        if not any(_overlap(place, other) for place in (*disagreement.at, *disagreement.by) for other in wrong)
    ]


def _overlap(one: Place, other: Place) -> bool:
    """Whether two paths of settings or groups of settings are the same, or one group contains the other path: ("lanes",
    "batch") contains ("lanes", "batch", "slots")."""
    return all(ANY in (x, y) or x == y for x, y in zip(one, other, strict=False))


def _names(places: tuple[Place, ...], found: Mapping[Place, Found]) -> str:
    """The names of the settings at `places`, for an error message: as the user wrote them. If the user set none of
    them, only the first of `places` is named: in the notation of TOML if the user wrote another setting of the same
    group in this notation, else as an environment variable."""
    given = [value.name for at in places for place, value in found.items() if place[: len(at)] == at]
    if given:
        return ", ".join(dict.fromkeys(given))
    first = places[0]
    for near, value in found.items():
        if near[:-1] == first[:-1] and value.name.startswith(".".join(near)):
            return value.name.replace(".".join(near), ".".join(first), 1)
    return names.variable(first)


def _line(place: Place, error: ErrorDetails, found: Found) -> str:
    field = names.SETTINGS[names.pattern(place)]
    what = error["ctx"]["what"] if error["type"] == ALLOWED else allowed_values(field)
    return f"{found.name}: found {_shown(field, found.value)}, allowed is {what}"


def _types(field: FieldInfo) -> Iterator[Any]:
    """All types that occur in a field's annotation, also inside unions and lists, except `None`."""
    todo: list[Any] = [field.annotation]
    while todo:
        kind = todo.pop(0)
        if kind is not type(None):
            yield kind
            if get_origin(kind) is not Literal:
                todo.extend(get_args(kind))


def _shown(field: FieldInfo, value: Any) -> str:
    if SecretStr not in _types(field):
        return mask(value)
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    return "(hidden)"


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
