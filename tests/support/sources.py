"""The files of the product and the tests, for tests that read them: each is read once."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
PACKAGES = ("lanekeeper", "topology", "consumers", "service")


@cache
def product() -> Mapping[str, str]:
    """The text of every file of the product, by its path."""
    paths = sorted(each for package in PACKAGES for each in (ROOT / package).rglob("*.py"))
    return MappingProxyType({str(path.relative_to(ROOT)): path.read_text() for path in paths})


@cache
def words() -> frozenset[str]:
    """Every word of the product's files."""
    return frozenset(word for text in product().values() for word in re.findall(r"\w+", text))


@cache
def functions_in(path: str) -> frozenset[str]:
    """The functions of a file of tests."""
    text = (ROOT / "tests" / path).read_text()
    return frozenset(re.findall(r"^\s*(?:async )?def (\w+)\(", text, re.MULTILINE))
