"""Imports what only some kinds of providers need."""

from importlib import import_module
from typing import Any, Final

MISSING: Final = "needs a package that is not installed; run: pip install {package}"


class ExtraMissing(Exception):
    """A provider needs a Python package, which the text names."""


def imported(module: str, package: str) -> Any:
    """The module. Raises ExtraMissing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ExtraMissing(MISSING.format(package=package)) from error
