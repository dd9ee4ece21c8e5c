"""Every page that code and documents cite exists."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def tracked(*patterns: str) -> Iterator[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return (ROOT / name for name in names.splitlines())


@pytest.mark.slow
def test_each_page_that_is_named_exists() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in tracked("*.py", "*.md", "dev")
        for page in PAGE.findall(path.read_text())
    }

    assert {each for each in named if not (ROOT / each[1]).exists()} == set()


def test_each_link_of_a_document_has_a_target() -> None:
    broken = {
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked("*.md")
        for target in LINK.findall(path.read_text())
        if not (path.parent / target).exists()
    }

    assert broken == set()
