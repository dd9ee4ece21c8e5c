"""docs/logs.md names every event that is logged, with its levels and fields, and no other."""

import re
from collections import defaultdict
from pathlib import Path

from consumers.job import Job
from tests.support.jobs import Bench
from tests.support.log_calls import log_calls

PAGE = (Path(__file__).parents[2] / "docs/logs.md").read_text(encoding="utf-8")
OF_A_REQUEST = {"request", "lane", "attempt", "trace_id"}


def names(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([\w.]+)`", cell))


def told() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """By event: its levels and its fields."""
    rows = [line.split("|")[1:5] for line in PAGE.splitlines() if re.match(r"\| `[\w.]+` \| [\w, ]+ \| ", line)]
    return {
        next(iter(names(event))): (frozenset(levels.strip().split(", ")), names(fields))
        for event, levels, fields, _ in rows
    }


def test_the_page_tells_of_each_event_what_the_code_writes() -> None:
    levels, fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for call in log_calls():
        levels[call.event].update(call.levels)
        fields[call.event] |= call.fields

    assert told() == {event: (frozenset(levels[event]), frozenset(fields[event])) for event in levels}


def test_fields_that_every_line_of_a_request_has_are_written_in_one_place() -> None:
    """Lines that are written where no request is bound may name one themselves."""
    itself = {call.event for call in log_calls() if call.fields & {"request", "trace_id"}}

    assert itself == {"handler.failed", "delivery.lost", "cancellation.unsent"}


def test_the_page_tells_what_every_line_of_a_request_has() -> None:
    job: Job = Bench().job(headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})

    assert set(job.log_fields()) == OF_A_REQUEST
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+\|$", PAGE, re.MULTILINE)) == OF_A_REQUEST
