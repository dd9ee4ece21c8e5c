"""What a part is given comes through its parameters; what it keeps or counts for itself does not."""

from collections import Counter
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pkgutil import walk_packages

import consumers


def test_what_a_part_keeps_or_counts_for_itself_is_no_parameter() -> None:
    parts = {
        part
        for module in walk_packages(consumers.__path__, "consumers.")
        for part in vars(import_module(module.name)).values()
        if isinstance(part, type) and is_dataclass(part)
    }
    wrong = {
        f"{part.__name__}.{field.name}"
        for part in parts
        for field in fields(part)
        if field.init
        and (field.default_factory is Counter or (field.name.startswith("_") and field.default_factory is not MISSING))
    }
    assert len(parts) > 100
    assert not wrong
