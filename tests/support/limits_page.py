"""Makes the tables of docs/limits.md from the code: `python -m tests.support.limits_page` writes them.

A limit is a constant (a name in capitals, of a module or a class) whose value is a number, or several. Not listed are
numbers that belong to a protocol, a format, an exit code or a fault for tests, units, and numbers that stand for "no
limit" (`NO_LIMITS`); and those of the demo, the simulated provider and the private broker, which no production process
uses (`NOT_IN_PRODUCTION`). The first sentence of the docstring below the constant says what it limits.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/limits.md"
BEGIN, END = "<!-- begin: made from the code -->\n", "<!-- end -->"
PACKAGES = ("lanekeeper", "topology", "consumers", "service")
NOT_IN_PRODUCTION = ("service/demo", "service/simulated", "service/private_broker")
NO_LIMITS = {
    "consumers/capacity/pace.py": {"UNLIMITED"},
    "consumers/failpoints.py": {"EXIT_CODE", "SOON_S"},
    "consumers/limits/adaptive.py": {"NO_LIMIT"},
    "consumers/limits/base.py": {"INPUT"},
    "consumers/limits/learned.py": {"VERSION"},
    "consumers/parking.py": {"HOUR_S"},
    "consumers/prices.py": {"MILLION"},
    "consumers/rank.py": {"DELAYED_BASE", "DELAYED_WITHOUT_PRIORITY"},
    "consumers/state/redis/shared_turns.py": {"FORM"},
    "consumers/state/sqlite/file.py": {"APPLICATION", "VERSION"},
    "consumers/waits.py": {"MS"},
    "lanekeeper/amqp/driver/fields.py": {"_DECIMAL", "_TIME"},
    "lanekeeper/amqp/driver/frames.py": {"_MORE_FLAGS"},
    "lanekeeper/amqp/driver/incoming.py": {"_BODY", "_HEADER", "_HEARTBEAT", "_METHOD"},
    "lanekeeper/amqp/driver/outgoing.py": {"_BASIC"},
    "lanekeeper/bodies.py": {"MIB"},
    "lanekeeper/http/calls.py": {"LANE_FULL"},
    "lanekeeper/telemetry/propagation.py": {"_FLAGS", "_KNOWN_FLAGS", "_TRACEPARENT_LENGTH"},
    "service/checks/replies.py": {"SINCE"},
    "service/cli/ending.py": {"BAD_USE", "FAILED", "STOPPED"},
    "service/cli/simulate.py": {"PORT"},
    "service/gateway/described/requests.py": {"_ACCESS"},
    "service/gateway/polling.py": {"LARGEST_NUMBER"},
    "topology/broker/admin/management.py": {"PORT", "TLS_PORT"},
    "topology/codec/bounds.py": {"_STEP"},
    "topology/declaration.py": {"OLDEST", "RECOMMENDED"},
    "topology/export.py": {"SALT_BYTES"},
    "topology/lanes.py": {"GIB", "MIB"},
}
WITHOUT_UNIT = (
    (r", in (seconds|ms|bytes)(,|(?=[:;.]))", ""),
    (r"\bFor how many seconds longer\b", "How much longer"),
    (r"\bFor how many (seconds|ms|milliseconds)\b", "How long"),
    (r"\bhow many seconds\b", "how long"),
    (r"\bHow many seconds\b", "How long"),
    (r"\b(this|so) many (seconds|ms)\b(?!')", "this time"),
    (r"\bThe seconds between\b", "The time between"),
)
"""How a docstring, which names the unit, is said where the value has its unit."""
TIMES_S = {"_S": 1.0, "_MS": 1e-3, "_NS": 1e-9}


@dataclass(frozen=True, slots=True)
class Limit:
    """One row of a table."""

    path: str
    name: str
    value: Any
    text: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


@cache
def limits() -> list[Limit]:
    """All limits, in the order of the page."""
    found = []
    for package in PACKAGES:
        paths = (str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))
        for path in sorted(paths, key=lambda each: each.rpartition("/")[::2]):
            if not path.startswith(NOT_IN_PRODUCTION):
                found += [each for each in _of(path) if each.name not in NO_LIMITS.get(path, ())]
    return found


def numbers(path: str) -> list[str]:
    """The names of all constants of a file that are numbers, whether they are limits or not."""
    return [each.name for each in _of(path)]


def tables() -> str:
    """The generated part of the page."""
    parts = []
    for folder, rows in groupby(limits(), key=lambda each: each.folder):
        about = _sentence(ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or "")
        head = ["| name | value | what it limits | file |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {folder}", "", about, "", *head, *map(_row, rows)]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The page with its tables regenerated."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


def said(name: str, value: Any) -> str:
    """A value as a reader wants it: with its unit, which the end of the name tells."""
    if isinstance(value, tuple):
        *first, last = (said(name, each) for each in value)
        return ", ".join([*(each.partition(" ")[0] for each in first), last])
    if name.endswith(("BYTES_S", "BYTES_PER_S")):
        return f"{_size(value)}/s"
    if name.endswith("BYTES"):
        return _size(value)
    for end, factor in TIMES_S.items():
        if name.endswith(end):
            return _time(round(value * factor, 12))
    return _number(value)


def _row(limit: Limit) -> str:
    cells = (f"`{limit.name}`", said(limit.name, limit.value), limit.text, f"`{Path(limit.path).name}`")
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def _of(path: str) -> Iterator[Limit]:
    """The numbers of one file. They are read from the imported module, so that each is what the code computes."""
    tree = ast.parse((ROOT / path).read_text())
    if any(_names(each) for each in ast.walk(tree)):
        module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        yield from _in(tree.body, module, path)


def _in(body: list[ast.stmt], owner: object, path: str) -> Iterator[Limit]:
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.ClassDef):
            yield from _in(statement.body, getattr(owner, statement.name), path)
        for name in _names(statement):
            value = getattr(owner, name)
            if not all(map(_is_number, value if type(value) is tuple and value else (value,))):
                continue
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield Limit(path, name, value, _without_unit(_sentence(text)))
                case _:
                    yield Limit(path, name, value, "")


def _names(statement: ast.AST) -> list[str]:
    """The constants that a statement defines."""
    match statement:
        case ast.Assign(targets=targets):
            found = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            found = [name]
        case _:
            found = []
    return [name for name in found if re.fullmatch(r"_*[A-Z][A-Z0-9_]*", name)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool | Enum)


def _sentence(text: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.split()), maxsplit=1)[0]


def _without_unit(text: str) -> str:
    for pattern, instead in WITHOUT_UNIT:
        text = re.sub(pattern, instead, text)
    return text


def _time(value_s: float) -> str:
    for unit, unit_s, least_s in (("days", 86_400, 86_400), ("h", 3600, 3600), ("min", 60, 120)):
        if value_s >= least_s and value_s % unit_s == 0:
            return "1 day" if value_s == 86_400 else f"{_number(value_s / unit_s)} {unit}"
    return f"{_number(value_s)} s" if value_s >= 1 else f"{_number(round(1000 * value_s, 9))} ms"


def _size(value: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << power and value % (1 << power) == 0:
            return f"{_number(value >> power)} {unit}"
    return f"{_number(value)} bytes"


def _number(value: float) -> str:
    if value != int(value):
        return f"{value:.12f}".rstrip("0")
    return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))


if __name__ == "__main__":
    PAGE.write_text(page())
