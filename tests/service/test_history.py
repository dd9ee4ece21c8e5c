"""The last hour, as workers have noted it in the store."""

import json
from typing import Any

import pytest
from ddsketch import DDSketch

from consumers.slots.activity import ACCURACY
from service.history import MINUTE_MS, SILENT, read
from service.status import packed_sketch


def note(*waits_ms: int, began_ms: int = 0, stops: tuple[str, ...] = (), failed: int = 0, lane: str = "batch") -> str:
    sketch = DDSketch(ACCURACY)
    for wait_ms in waits_ms:
        sketch.add(wait_ms)
    figures = {"waits": packed_sketch(sketch), "done": len(waits_ms), "failed": failed, "retried": 0}
    return json.dumps({"began_ms": began_ms, "lanes": {lane: figures}, "stops": stops})


def test_a_minute_is_that_of_all_workers_together() -> None:
    found = read({100: {"a": note(10, 10, 10, failed=1), "b": note(1000), "c": "{}"}}, now_minute=101)
    (point,) = found["points"]
    assert point["done"] == {"batch": 4}
    assert point["failed"] == {"batch": 1}
    assert point["waits"]["batch"]["p50"] == pytest.approx(10, rel=0.05)
    assert point["waits"]["batch"]["p99"] > 5


def test_what_stopped_work_is_marked_from_its_first_minute_to_its_last_and_so_is_an_hour_without_workers() -> None:
    began_ms = 103 * MINUTE_MS + 5
    paused = ("lane batch paused by ann",)
    minutes = {
        100: {"a": note()},
        101: {"a": note(stops=paused)},
        102: {"a": note(stops=paused), "b": note()},
        104: {"c": note(began_ms=began_ms, stops=paused)},
        105: {"c": note(began_ms=began_ms)},
    }
    marks: list[dict[str, Any]] = read(minutes, now_minute=110)["marks"]
    told = [(mark["what"], mark["from_ms"] // MINUTE_MS, mark["to_ms"] // MINUTE_MS) for mark in marks]
    assert told == [
        (paused[0], 101, 103),
        (SILENT, 103, 104),
        ("worker c started", 103, 103),
        (paused[0], 104, 105),
        (SILENT, 106, 108),
    ]
