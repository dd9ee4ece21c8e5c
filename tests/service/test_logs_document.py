"""docs/logs.md lists every log event with its levels and fields, and no other."""

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
    """For each event: its levels and its fields."""
    rows = [line.split("|")[1:5] for line in PAGE.splitlines() if re.match(r"\| `[\w.]+` \| [\w, ]+ \| ", line)]
    return {
        next(iter(names(event))): (frozenset(levels.strip().split(", ")), names(fields))
        for event, levels, fields, _ in rows
    }


def test_docs_logs_lists_each_event_with_the_fields_that_the_code_writes() -> None:
    levels, fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for call in log_calls():
        levels[call.event].update(call.levels)
        fields[call.event] |= call.fields

    assert told() == {event: (frozenset(levels[event]), frozenset(fields[event])) for event in levels}


def test_the_common_fields_of_a_requests_log_lines_are_set_in_one_place() -> None:
    """Lines outside the handling of a request may have one of these fields themselves."""
    itself = {call.event for call in log_calls() if call.fields & {"request", "trace_id"}}

    assert itself == {"handler.failed", "delivery.lost", "cancellation.unsent"}


def test_docs_logs_lists_the_common_fields_of_a_requests_log_lines() -> None:
    job: Job = Bench().job(headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})

    assert set(job.log_fields()) == OF_A_REQUEST
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+\|$", PAGE, re.MULTILINE)) == OF_A_REQUEST
