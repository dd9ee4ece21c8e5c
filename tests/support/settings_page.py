"""Makes the lists of docs/settings.md from the declarations: `python -m tests.support.settings_page` writes them.

A setting's description is the docstring below its field, with `Example:` at its end; without it the default is shown.
"""

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from service.cli.status import value_text
from service.config.effective import as_json, shown_setting
from service.config.names import ANY, SETTINGS, Place, allowed_values, is_section, variable
from service.config.settings import LimitsSettings, Settings
from topology.lanes import DEFAULT_LANES

PAGE = Path(__file__).parents[2] / "docs/settings.md"
BEGIN, END = "<!-- begin: made of the declarations -->\n", "<!-- end -->"
LANE = "<LANE>"
UNITS = {
    "per_tenant_s": "a second",
    "_s": "s",
    "_bytes": "bytes",
    "_per_min": "a minute",
    "tokens": "tokens",
    "usd": "US dollars",
    "requests": "requests",
    "length": "messages",
    "side_queues": "queues",
}
TITLES = {
    "": "Broker, store, process",
    "providers": "Providers",
    "models": "Models",
    "prices": "Prices",
    "caps": "Caps of a day",
    "fair": "Shares of tenants",
    "handlers": "Handlers",
    "pipelines": "Pipelines",
    "metrics": "Metrics",
    "budget": "Budget",
    "lanes": "Lanes",
    "schedules": "Schedules",
    "gateway": "HTTP: health and the gateway",
    "client": "The command `batch`",
    "tls": "TLS",
    "reply_to": "Replies",
    "retry": "Retries",
    "results": "Results",
    "bodies": "Large bodies",
    "files": "Files at providers",
    "control": "Cancellations and questions",
    "webhooks": "Webhooks",
    "waiting": "Delayed requests",
    "dead": "Dead letters",
}
SAID_WITH_PROVIDERS = set(LimitsSettings.model_fields)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list: a setting, or the same setting of all lanes."""

    place: Place
    variable: str
    field: FieldInfo
    text: str
    example: str
    defaults: tuple[Any, ...]


@cache
def entries() -> list[Entry]:
    """All settings; those of the lanes appear once, with the defaults of the default lanes."""
    defaults = Settings()
    found = []
    for place in SETTINGS:
        kind, field, default = _declared(place, defaults)
        text, example = _documented(kind, place[-1])
        shared, values = place, (default,)
        if ANY in place and (at := place.index(ANY)) and place[at - 1] == "lanes":
            shared = (*place[:at], LANE, *place[at + 1 :])
            values = tuple(
                shown_setting(defaults, (*place[:at], lane.name, *place[at + 1 :])) for lane in DEFAULT_LANES
            )
        name = variable(place).replace(ANY, LANE if LANE in shared else "<NAME>")
        found.append(Entry(shared, name, field, text, example or _said(values[0]), values))
    return found


def lists() -> str:
    parts = []
    every = entries()
    for section, title in TITLES.items():
        rows = [each for each in every if (each.place[0] if len(each.place) > 1 else "") == section]
        assert rows, section
        if section == "budget":
            rows = [each for each in rows if each.place[-1] not in SAID_WITH_PROVIDERS]
        parts.append("\n".join([f"### {title}", "", *map(_row, rows)]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + lists() + END + rest.partition(END)[2]


def _row(entry: Entry) -> str:
    said = [_said(each) for each in entry.defaults]
    defaults = ", ".join(f"`{each}`" for each in (said if len(set(said)) > 1 else said[:1])).replace("`none`", "")
    text, limits, example = entry.text, _limits(entry.field), entry.example
    if entry.place[0] == "providers" and entry.place[-1] in SAID_WITH_PROVIDERS:
        text += f" Of the first provider: `LANEKEEPER_BUDGET__{entry.place[-1].upper()}`."
    if get_origin(entry.field.annotation) is Literal:
        text += f" Allowed: {limits}."
        limits = example = ""
    unit = _unit(entry.place[-1]) if defaults else ""
    default = " ".join(filter(None, (defaults, unit, limits)))
    given = f" Example: `{example}`" if example not in ("", "true", "false", *said) else ""
    return f"- `{entry.variable}`{f' ({default})' if default else ''}: {text}{given}"


def _unit(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def _limits(field: FieldInfo) -> str:
    """What a number (`[1…100]`) or a choice of words may be."""
    allowed = allowed_values(field)
    if get_origin(field.annotation) is Literal:
        return allowed
    numbers = allowed.partition("number")[2].strip()
    for words, sign in (
        ("above ", ">"),
        (", at most ", "…"),
        (" to ", "…"),
        ("from ", "" if " to " in numbers else "≥"),
    ):
        numbers = numbers.replace(words, sign)
    return f"[{numbers.replace('.0', '')}]" if numbers else ""


def _said(value: Any) -> str:
    """The value as it is written in the environment."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()  # a default is no secret
    if value is None or value in ((), {}):
        return "none"
    return value_text(int(value) if isinstance(value, float) and value.is_integer() else as_json(value))


def _declared(place: Place, defaults: Settings) -> tuple[type[BaseModel], FieldInfo, Any]:
    """The class that declares a setting, its field, and its default."""
    kind: type[BaseModel] = Settings
    node: Any = defaults
    for step in place[:-1]:
        if step == ANY:
            continue
        annotation = kind.model_fields[step].annotation
        if get_origin(annotation) is dict:
            kind, node = get_args(annotation)[1], None
        else:
            assert is_section(annotation)
            kind, node = annotation, getattr(node, step, None)  # type: ignore[assignment]
    field = kind.model_fields[place[-1]]
    return kind, field, field.get_default(call_default_factory=True) if node is None else getattr(node, place[-1])


def _documented(kind: type[BaseModel], name: str) -> tuple[str, str]:
    """The text and the example in a field's docstring, which may be in a base class."""
    for each in kind.__mro__:
        if name in inspect.get_annotations(each):
            found = _docstrings(each).get(name, "")
            text, _, example = re.sub(r"\s+", " ", found).partition(" Example: ")
            return text, example
    raise AssertionError(name)


@cache
def _docstrings(kind: type) -> dict[str, str]:
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
