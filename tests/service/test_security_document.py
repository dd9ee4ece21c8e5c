"""docs/security.md has a row for every threat, and the tests that it cites exist."""

import re
from pathlib import Path

import pytest

from tests.support.sources import functions_in

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()
ROWS = {
    cells[0].strip(): [each.strip() for each in cells]
    for line in DOCUMENT.splitlines()
    if (cells := re.split(r"(?<!\\)\|", line.strip("|"))) and re.fullmatch(r"T\d+", cells[0].strip())
}
THREATS = [f"T{number}" for number in range(1, 28)]
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", DOCUMENT)))
SHOWN_BY, FAILS_WITHOUT = 3, 4
CODE = {
    path: path.read_text()
    for folder in ("lanekeeper", "topology", "consumers", "service", ".ci")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
NAMED = re.compile(r"`((?:_?[A-Za-z]+)\.(?:_?[a-zA-Z]\w*))`")
CONTROLS = sorted(
    {name for cells in ROWS.values() for name in NAMED.findall(cells[FAILS_WITHOUT])} - {"docker-compose.yml"}
)


def test_every_threat_has_its_row() -> None:
    assert list(ROWS) == THREATS
    assert {len(cells) for cells in ROWS.values()} == {6}


@pytest.mark.parametrize("threat", THREATS)
def test_every_row_names_a_test_and_the_control_unless_the_feature_does_not_exist_yet(threat: str) -> None:
    cells = ROWS[threat]
    assert "::" in cells[SHOWN_BY]
    assert cells[FAILS_WITHOUT] or "in this version" in " ".join(cells)


@pytest.mark.parametrize(("path", "name"), TESTS, ids=str)
def test_every_cited_test_exists(path: str, name: str) -> None:
    assert name in functions_in(path)


@pytest.mark.parametrize("control", CONTROLS)
def test_every_named_control_is_in_the_code(control: str) -> None:
    """A control is named by its class or file, and its function, attribute or constant; or as the code calls it."""
    place, name = control.split(".")
    defines = re.compile(rf"^\s*(async def|def|class) {name}\b|^\s*{name}(: [^=]+)? = ", re.MULTILINE)
    assert any(
        control in text or ((path.stem == place or f"class {place}" in text) and defines.search(text))
        for path, text in CODE.items()
    )


def test_every_entry_of_owasps_list_is_covered() -> None:
    assert sorted(re.findall(r"^\| (LLM\d\d) ", DOCUMENT, re.MULTILINE)) == [f"LLM{n:02d}" for n in range(1, 11)]
