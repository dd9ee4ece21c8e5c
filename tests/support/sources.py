"""The files of the product, for tests that read them: each is read once."""

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
