"""Each decision has a date, a status and the alternatives that were tried; the code that it names exists."""

import re
from pathlib import Path

import pytest

from tests.support.sources import words

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_each_decision_has_date_status_and_alternatives(path: Path) -> None:
    text = path.read_text()

    assert re.match(r"# .+\n\n- Date: \d{4}-\d\d-\d\d\n- Status: (in force|replaced by \[)", text)
    assert re.search(r"^## What else was (tried|considered)\n\n\S", text, re.MULTILINE)


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_files_and_constants_named_by_a_decision_exist(path: Path) -> None:
    text = path.read_text()

    files = re.findall(r"`((?:lanekeeper|topology|consumers|service|tests|benchmarks)/[\w/.]*)`", text)
    assert [each for each in files if not (ROOT / each).exists()] == []
    constants = re.findall(r"`([A-Z][A-Z_]+_[A-Z]+|\w+\(\))`", text)
    assert [each for each in constants if not {each.removesuffix("()"), each.lower()} & words()] == []
