"""Records calls while a request is worked on: the functions in order, and the pairs of files that call each other."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lanekeeper.telemetry import logs

ROOT = Path(__file__).parents[2]
PACKAGES = ("lanekeeper/", "topology/", "consumers/", "service/worker/")


@dataclass
class Walk:
    """The calls of our own functions in this thread."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    """File and qualified name, in the order in which the calls begin."""
    borders: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of files: a function of the first calls one of the second while a request is worked on."""

    def visits(self, file: str, name: str, *, start: int) -> int | None:
        """The index, from `start` on, of the first call of this function or one nested in it; None if there is none."""
        wanted = name.split(".")
        for at in range(start, len(self.calls)):
            found, qualified = self.calls[at]
            parts = iter(qualified.split("."))
            if found == file and all(part in parts for part in wanted):
                return at
        return None


@contextmanager
def walked() -> Iterator[Walk]:
    """Record the calls inside this block."""
    walk = Walk()
    files: dict[str, str | None] = {}

    def ours(frame: FrameType | None) -> str | None:
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if name not in files:
            relative = name.removeprefix(f"{ROOT}/")
            files[name] = relative if relative.startswith(PACKAGES) else None
        return files[name]

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := ours(frame)) is None:
            return
        walk.calls.append((file, frame.f_code.co_qualname))
        caller = ours(frame.f_back)
        if caller is not None and caller != file and (caller, file) not in walk.borders and logs.fields_of_subject():
            walk.borders.add((caller, file))

    sys.setprofile(seen)
    try:
        yield walk
    finally:
        sys.setprofile(None)
