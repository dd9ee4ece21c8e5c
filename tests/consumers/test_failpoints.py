"""Places where tests kill a worker: only at the named place, with its probability."""

import asyncio
import os

import pytest

from consumers.failpoints import EXIT_CODE, Failpoints
from tests.support.waiting import until


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


async def test_a_process_dies_only_at_the_named_place(exits: list[int]) -> None:
    points = Failpoints({"here": 1.0, "never": 0.0})

    for other in ("elsewhere", "never"):
        points.reach(other)
        points.reach_soon(other)
    await asyncio.sleep(0.01)
    assert exits == []

    points.reach("here")
    assert exits == [EXIT_CODE]
    points.reach_soon("here")
    assert exits == [EXIT_CODE], "the publish is written first"
    await until(lambda: exits == [EXIT_CODE] * 2)
