"""The settings in effect, as `lanekeeper settings` shows them: without secrets."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from lanekeeper.contract.identity import urls_of
from service.config.names import ANY, SETTINGS, Place, variable
from service.config.settings import Settings
from service.config.value_types import mask_url

DEFAULT = "default"
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting with its value in effect, and the source of this value: a row of `lanekeeper settings`."""

    name: str
    """The setting's name in a TOML file and for `--set`, such as `lanes.batch.slots`."""
    variable: str
    value: Any
    source: str


def effective(settings: Settings, found: Mapping[Place, str]) -> Iterator[Effective]:
    """All settings with the values in effect. `found`: the source of each that a source has set."""
    for pattern in SETTINGS:
        for place in _places(settings, pattern):
            yield Effective(".".join(place), variable(place), shown_setting(settings, place), found.get(place, DEFAULT))


def _places(settings: Settings, pattern: Place) -> Iterator[Place]:
    if ANY not in pattern:
        yield pattern
        return
    at = pattern.index(ANY)
    table: Any = settings
    for part in ("lanes",) if pattern[at - 1] == "lanes" else pattern[:at]:
        table = getattr(table, part)
    for name in table:
        yield (*pattern[:at], name, *pattern[at + 1 :])


def shown_setting(settings: Settings, place: Place) -> Any:
    """A setting's value in effect, as JSON, without secrets."""
    match place:
        case ("store_url",):
            return settings.shown_store
        case ("budget", "lanes", lane, "share"):
            return settings.budget_spec().shares.get(lane)
    node: Any = settings
    for step in place:
        node = node.get(step) if isinstance(node, Mapping) else getattr(node, step, None)
    return as_json(node)


def as_json(value: Any) -> Any:
    """A value as JSON, without secrets."""
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        return ", ".join(mask_url(url) for url in urls_of(text)) if "://" in text else HIDDEN
    if is_dataclass(value) and not isinstance(value, type):
        return {name: entry for name, entry in asdict(value).items() if entry is not None}
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
