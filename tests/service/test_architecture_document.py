"""docs/architecture.md lists all folders, each described in the words of its `__init__`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PACKAGES = ("lanekeeper", "topology", "consumers", "service")


def test_the_map_lists_each_folder_with_the_text_of_its_init() -> None:
    said = {}
    for init in (each for package in PACKAGES for each in (ROOT / package).rglob("__init__.py")):
        paragraph = (ast.get_docstring(ast.parse(init.read_text())) or "").split("\n\n")[0]
        said[f"{init.parent.relative_to(ROOT)}/"] = " ".join(paragraph.split())

    told = dict(re.findall(rf"^\| `((?:{'|'.join(PACKAGES)})/[\w/]*)` \| (.*) \|$", PAGE, re.MULTILINE))

    assert told == said


def test_each_file_and_function_of_the_walk_exists() -> None:
    missing = []
    for file, names in re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]*) \|", PAGE, re.MULTILINE):
        path = ROOT / file
        source = path.read_text() if path.exists() else ""
        defined = {
            each.name
            for each in ast.walk(ast.parse(source))
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        wanted = {part for name in re.findall(r"`([\w.]+)`", names) for part in name.split(".")}
        missing += [f"{file}: {each}" for each in sorted(wanted - defined)]

    assert missing == []
