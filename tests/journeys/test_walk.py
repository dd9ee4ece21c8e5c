"""How far the reading of one request takes you: the pairs of files between which its calls pass."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from consumers.log_subject import fields_of_subject
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving

ROOT = Path(__file__).parents[2]
PACKAGES = ("lanekeeper/", "topology/", "consumers/", "service/worker/")


@dataclass
class Walk:
    """The calls of our own functions in this thread."""

    borders: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of files: a function of the first calls one of the second while a request is worked on."""


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
        caller = ours(frame.f_back)
        if caller is not None and caller != file and (caller, file) not in walk.borders and fields_of_subject():
            walk.borders.add((caller, file))

    sys.setprofile(seen)
    try:
        yield walk
    finally:
        sys.setprofile(None)


BORDERS_AT_MOST = 105
"""Pairs of files of which one calls a function of the other, with all helpers, while a fresh request is answered."""


async def test_a_fresh_request_passes_between_few_files(vhost: Vhost) -> None:
    async with serving(vhost), requester(vhost) as app:
        await app.ask({"prompt": "warm up"})
        with walked() as walk:
            reply = await app.ask({"prompt": "hello"})
        assert reply.status == "ok"

    assert 20 < len(walk.borders) <= BORDERS_AT_MOST, sorted(walk.borders)
