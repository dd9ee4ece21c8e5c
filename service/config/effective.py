"""Lists the settings in effect, each with its source, for `lanekeeper settings`: without keys, and without passwords in
URLs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from lanekeeper.amqp.driver.urls import urls_of
from service.config.masking import mask_url
from service.config.names import ANY, SETTINGS, Place, variable
from service.config.settings import Settings

DEFAULT = "default"
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting with its value in effect, and the source of this value: a row of `lanekeeper settings`."""

    name: str
    """The setting's name in a TOML file and for `--set`, such as `lanes.batch.slots`."""
    variable: str
    value: Any
    """The setting's value in effect, in a form that JSON can express."""
    source: str
    """Where the setting's value comes from: `default`, `environment`, `option`, or the file's name."""


def effective(settings: Settings, found: Mapping[Place, str]) -> Iterator[Effective]:
    """All settings with the values in effect, in the order of their declaration. `found`: the source of each setting
    that a source has set; the others have their defaults."""
    for pattern in SETTINGS:
        for place in _places(settings, pattern):
            value = settings.shown_store if place == ("store_url",) else plain(_value(settings, place))
            yield Effective(".".join(place), variable(place), value, found.get(place, DEFAULT))


def _places(settings: Settings, pattern: Place) -> Iterator[Place]:
    if ANY in pattern:
        yield from ((pattern[0], name, *pattern[2:]) for name in settings.providers)
    else:
        yield pattern


def _value(node: Any, place: Place) -> Any:
    for step in place:
        node = node[step] if isinstance(node, Mapping) else getattr(node, step)
    return node


def plain(value: Any) -> Any:
    """Convert a setting's value to one that JSON can express, with its secrets hidden."""
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        return ", ".join(mask_url(url) for url in urls_of(text)) if "://" in text else HIDDEN
    if is_dataclass(value) and not isinstance(value, type):
        return {name: entry for name, entry in asdict(value).items() if entry is not None}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
