"""An hour of history: once a minute each worker notes in the store how its lanes stand and what stops work, and the
live page draws the notes of all workers when it is opened. Here the notes are read."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from consumers.state.rows import HISTORY_MINUTES
from service.status import UNREADABLE, merged_sketch, quantiles

MINUTE_MS: Final = 60_000
LATE_MINUTES: Final = 2
"""Workers note a minute in the next one, so the last two may still be missing."""
MARKS: Final = 200
SILENT: Final = "no worker noted anything: none ran, or the store was away"


def read(minutes: Mapping[int, Mapping[str, str]], *, now_minute: int) -> dict[str, Any]:
    """What the page draws: `points`, one for each minute, and `marks` for what stopped work, restarts and outages."""
    notes = {minute: _read_notes(rows) for minute, rows in minutes.items()}
    notes = {minute: rows for minute, rows in sorted(notes.items()) if rows}
    return {
        "points": [_point(minute, rows.values()) for minute, rows in notes.items()],
        "marks": sorted(_marks(notes, now_minute), key=lambda mark: mark["from_ms"])[-MARKS:],
    }


def _read_notes(rows: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for worker, row in rows.items():
        try:
            note = json.loads(row)
            _point(0, [note])
            found[worker] = {"began_ms": int(note["began_ms"]), "stops": list(map(str, note["stops"])), **note}
        except UNREADABLE:  # another version's
            continue
    return found


def _point(minute: int, notes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    lanes: dict[str, list[Mapping[str, Any]]] = {}
    for note in notes:
        for lane, figures in note["lanes"].items():
            lanes.setdefault(lane, []).append(figures)
    return {
        "at_ms": (minute + 1) * MINUTE_MS,
        "waits": {lane: quantiles(merged_sketch(each["waits"] for each in all)) for lane, all in lanes.items()},
        **{
            name: {lane: sum(int(each[name]) for each in all) for lane, all in lanes.items()}
            for name in ("done", "failed", "retried")
        },
    }


def _marks(notes: Mapping[int, Mapping[str, Mapping[str, Any]]], now_minute: int) -> list[dict[str, Any]]:
    if not notes:
        return []
    first, lasts, marks = min(notes), dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for minute in range(first, max(max(notes) + 1, now_minute - LATE_MINUTES)):
        rows = notes.get(minute, {})
        for what in {stop for note in rows.values() for stop in note["stops"]} if rows else {SILENT}:
            mark = lasts.get(what)
            if mark is None or mark["to_ms"] != minute * MINUTE_MS:
                lasts[what] = mark = {"from_ms": minute * MINUTE_MS, "what": what}
                marks.append(mark)
            mark["to_ms"] = (minute + 1) * MINUTE_MS
    began = {(worker, note["began_ms"]) for rows in notes.values() for worker, note in rows.items()}
    marks += [
        {"from_ms": began_ms, "to_ms": began_ms, "what": f"worker {worker[:80]} started"}
        for worker, began_ms in began
        if began_ms >= (now_minute - HISTORY_MINUTES) * MINUTE_MS
    ]
    return marks
