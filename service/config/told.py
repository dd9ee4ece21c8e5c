"""Error messages for wrong settings: one line each, under the name that the user wrote. Wrong values are left out and
the rest is checked again, so that everything is reported at once and nothing twice."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from service.config.settings import Settings
from service.config.value_types import ALLOWED
from service.telemetry import redaction


@dataclass(frozen=True, slots=True)
class Found:
    """A value, the name under which it was given ("LANEKEEPER_NAMESPACE in .env"), and by which source."""

    value: Any
    name: str
    source: str
    """`environment`, `option`, or the file."""


def validated(
    made: Callable[[Collection[Place]], Settings], found: Mapping[Place, Found]
) -> tuple[Settings, dict[Place, str]]:
    """The settings, with defaults in place of wrong values, and the messages by place. `made` makes the settings
    without the values at some places; it raises ValidationError."""
    wrong: dict[Place, str] = {}
    while True:
        try:
            return made(wrong), wrong
        except ValidationError as error:
            lines = {place: _line(place, each, found[place]) for place, each in _errors(error) if place in found}
            if not lines.keys() - wrong.keys():
                raise
            wrong |= lines


def disagreed(
    disagreements: Iterable[Disagreement], found: Mapping[Place, Found], *, wrong: Collection[Place]
) -> list[str]:
    """One line for each, except for those that follow from settings that are wrong by themselves."""
    return [
        redaction.text(f"{_names(each.at, found)}: {each.text}")  # a key may stand where a name belongs
        for each in disagreements
        if not any(_overlap(place, other) for place in (*each.at, *each.by) for other in wrong)
    ]


def _overlap(one: Place, other: Place) -> bool:
    return all(ANY in (x, y) or x == y for x, y in zip(one, other, strict=False))


def _names(places: tuple[Place, ...], found: Mapping[Place, Found]) -> str:
    """The names that the user wrote. If none was written: the first, in the style of a neighbouring setting."""
    given = [each.name for at in places for place, each in found.items() if place[: len(at)] == at]
    if given:
        return ", ".join(dict.fromkeys(given))
    first = places[0]
    for near, each in found.items():
        if near[:-1] == first[:-1] and each.name.startswith(".".join(near)):
            return each.name.replace(".".join(near), ".".join(first), 1)
    return names.variable(first)


def _errors(error: ValidationError) -> Iterator[tuple[Place, ErrorDetails]]:
    """Each error with the place of its setting. An error's location can be longer: it can name an item of a list."""
    for each in error.errors():
        first, *rest = map(str, each["loc"])
        location = (names.field_name(first), *rest)
        places = (location[:n] for n in range(len(location), 0, -1))
        yield next((place for place in places if names.is_setting(place)), location), each


def _line(place: Place, error: ErrorDetails, found: Found) -> str:
    field = names.SETTINGS[names.pattern(place)]
    what = error["ctx"]["what"] if error["type"] == ALLOWED else allowed(field)
    return f"{found.name}: found {_shown(field, found.value)}, allowed is {what}"


def _types(field: FieldInfo) -> Iterator[Any]:
    """The types in a field's annotation, without `None`."""
    todo: list[Any] = [field.annotation]
    while todo:
        each = todo.pop(0)
        if each is not type(None):
            yield each
            if get_origin(each) is not Literal:
                todo.extend(get_args(each))


def _shown(field: FieldInfo, value: Any) -> str:
    if SecretStr not in _types(field):
        return mask(value)
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    return "(hidden)"


def allowed(field: FieldInfo) -> str:
    """What a setting may be, in words."""
    types = list(_types(field))
    for each in types:
        if get_origin(each) is Literal:
            return " or ".join(get_args(each))
    if bool in types:
        return "true or false"
    if int in types or float in types:
        return ("a whole number" if int in types else "a number") + _limits(field)
    if SecretStr in types or str in types:
        return "text" if tuple not in {get_origin(each) for each in types} else "a list of names"
    return "a file that is there and can be read"


def _limits(field: FieldInfo) -> str:
    said = ""
    for each in field.metadata:
        match each:
            case annotated_types.Ge(ge=low):
                said += f" from {low}"
            case annotated_types.Gt(gt=low):
                said += f" above {low}"
            case annotated_types.Le(le=high):
                said += f" to {high}" if " from " in said else f", at most {high}"
    return said
