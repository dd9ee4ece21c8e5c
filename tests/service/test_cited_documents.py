"""Every page that code and documents cite exists, and so does each cited section of docs/facts.md."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SECTIONS = re.compile(r"facts\.md\)?,\s*sections?\s+((?:\d+(?:,\s*|\s+and\s+)?)+)")


def tracked(*patterns: str) -> Iterator[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return (ROOT / name for name in names.splitlines())


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


def test_each_cited_section_of_the_facts_exists() -> None:
    there = set(re.findall(r"^## (\d+)\. ", (ROOT / "docs/facts.md").read_text(), re.MULTILINE))
    cited = {
        (path.relative_to(ROOT).as_posix(), number)
        for path in tracked("*.py", "*.md")
        for numbers in SECTIONS.findall(path.read_text())
        for number in re.findall(r"\d+", numbers)
    }

    assert {each for each in cited if each[1] not in there} == set()
    assert len(cited) > 15, "the pattern above still finds them"


def test_the_facts_are_cited_with_a_section_number() -> None:
    """A citation without a section number, or of a page that is not in this repository, cannot be looked up."""
    without = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked("consumers/*.py", "topology/*.py", "service/*.py")
        for line in path.read_text().splitlines()
        if re.search(r"(?<!docs/)(facts|design)\.md|\breliability\.md, section", line)
    ]

    assert without == []
