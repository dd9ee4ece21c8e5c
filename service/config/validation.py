"""The settings that the sources gave, made; and a line for everything that is wrong, under the name that it was given.

A value that is none is left out, and the rest looked at without it: so all is told at once, and nothing twice.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from service.config.masking import mask, mask_url
from service.config.sources import ANY, Known, Place, Reading, is_section
from service.config.value_types import ALLOWED
from service.telemetry import redaction

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Settings that are each right by themselves, and do not go together; or one that another needs."""

    text: str
    at: tuple[Place, ...]
    """Which it is about: told under those of them that were given."""
    by: tuple[Place, ...] = ()
    """What else it follows from: where one of all these is wrong by itself, this is not told."""

    def under(self, place: Place) -> "Disagreement":
        """The same of a section that lies there."""
        return Disagreement(
            self.text, tuple((*place, *each) for each in self.at), tuple((*place, *each) for each in self.by)
        )


def validate(kind: type[S], reading: Reading, known: Known) -> tuple[S, dict[Place, str]]:
    """The settings, with the defaults for those that are wrong, and what is wrong, by its place."""
    wrong: dict[Place, str] = {}
    while True:
        try:
            return kind(**reading.nested(without=wrong)), wrong
        except ValidationError as error:
            found = {_place(each, known): _line(kind, each, reading, known) for each in error.errors()}
            if not found.keys() - wrong.keys():
                raise
            wrong |= found


def disagreed(
    disagreements: Iterable[Disagreement], reading: Reading, known: Known, *, wrong: Collection[Place]
) -> list[str]:
    """One line for each, but for what follows from settings that are wrong."""
    return [
        redaction.text(f"{_names(each.at, reading, known)}: {each.text}")  # a key may stand where a name belongs
        for each in disagreements
        if not any(_overlap(place, other) for place in (*each.at, *each.by) for other in wrong)
    ]


def _overlap(one: Place, other: Place) -> bool:
    return all(ANY in (x, y) or x == y for x, y in zip(one, other, strict=False))


def _names(places: tuple[Place, ...], reading: Reading, known: Known) -> str:
    """As their author wrote them; where none was written, as it might have been."""
    found = [each.name for at in places for place, each in reading.found.items() if place[: len(at)] == at]
    return ", ".join(dict.fromkeys(found)) or reading.name_of(places[0], known)


def _line(kind: type[BaseModel], error: ErrorDetails, reading: Reading, known: Known) -> str:
    place = _place(error, known)
    found, field = reading.found[place], _field(kind, place)
    what = error["ctx"]["what"] if error["type"] == ALLOWED else allowed(field)
    return f"{found.name}: found {_shown(field, found.value)}, allowed is {what}"


def _place(error: ErrorDetails, known: Known) -> Place:
    """The setting that an error is about: its location can go on into the items of a list."""
    location = tuple(str(step) for step in error["loc"])
    places = (location[:n] for n in range(len(location), 0, -1))
    return next((each for each in places if known.pattern(each) in known.env_names), location)


def _field(kind: type[BaseModel], place: Place) -> FieldInfo:
    field = kind.model_fields[place[0]]
    if len(place) == 1:
        return field
    if is_section(field.annotation):
        return _field(field.annotation, place[1:])  # type: ignore[arg-type]
    return _field(get_args(field.annotation)[1], place[2:])


def _types(field: FieldInfo) -> Iterator[Any]:
    """What a field's annotation is made of, `None` left out."""
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
