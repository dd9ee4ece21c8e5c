"""Makes the tables of docs/fixed-values.md from the code: `python -m tests.support.fixed_values_page` writes them.

They hold each number (and each row of numbers) that a file defines in capitals, with the text below it.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/fixed-values.md"
BEGIN, END = "<!-- begin: made of the code -->\n", "<!-- end -->"
TITLES = {
    "lanekeeper": "Client, connections, what is sent",
    "topology": "Exchanges, queues, reading of requests",
    "consumers": "Requests on their way through a worker",
    "service/config": "Settings",
    "service/telemetry": "Logs and traces",
    "service/worker": "A worker process",
}


class Entry(NamedTuple):
    """One row of a table."""

    name: str
    value: object
    text: str


def entries(folder: str) -> Iterator[Entry]:
    """The fixed values of a folder and those below it, by name."""
    found = [each for path in (ROOT / folder).rglob("*.py") for each in _of_file(path)]
    yield from sorted(found, key=lambda each: (each.name.lstrip("_"), str(each.value), each.text))


def page() -> str:
    """The page with new tables."""
    before, rest = PAGE.read_text().split(BEGIN)
    return (
        before + BEGIN + "".join(_table(folder, title) for folder, title in TITLES.items()) + END + rest.split(END)[1]
    )


def rows(text: str) -> list[str]:
    """The names and values of a page, without the texts, which may be reworded."""
    return [" | ".join(line.split(" | ")[:2]) for line in text.splitlines() if line.startswith("| `")]


def _of_file(path: Path) -> Iterator[Entry]:
    module = None
    body = ast.parse(path.read_text()).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if not isinstance(target, ast.Name) or not target.id.isupper():
            continue
        module = module or importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        value = getattr(module, target.id)
        if _is_number(value) or (isinstance(value, tuple) and value and all(map(_is_number, value))):
            yield Entry(target.id, value, _docstring(after))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _docstring(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split()).replace("|", "\\|")
    return ""


def _table(folder: str, title: str) -> str:
    rows = [f"| `{each.name}` | {_shown(each.value)} | {each.text} |\n" for each in entries(folder)]
    return f"\n## {title}: `{folder}`\n\n| name | value | |\n|---|---|---|\n" + "".join(rows)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return f"{value:_}" if isinstance(value, int) else repr(value).removesuffix(".0")


if __name__ == "__main__":
    PAGE.write_text(page())
