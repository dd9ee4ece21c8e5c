"""docs/contract.md documents exactly what the code declares, and the tests that it names exist."""

import json
import re
from pathlib import Path

import pytest

from consumers.lifecycle import COMMON, EVENTS
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import PROBLEMS, RequestProblem
from service.cli.commands import LATER
from tests.support.sources import functions_in
from topology.codec.headers import UNSUPPORTED

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "contract.md").read_text()
CODES = re.findall(r"^### `(\w+)`: (\d+), (also in `lane\.dead`|not parked)$", DOCUMENT, re.MULTILINE)
DOCUMENTS = [json.loads(each) for each in re.findall(r"^```json\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)]
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", DOCUMENT)))
NOT_SENT = {"forbidden_webhook", "superseded"}


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def test_every_declared_header_is_documented_and_no_other() -> None:
    named = set(re.findall(r"`(x-lane-[a-z0-9-]*[a-z0-9])`", DOCUMENT))
    assert named == n.PUBLIC | n.OURS | UNSUPPORTED.keys() | {n.CODE}


def test_our_integer_headers_are_documented_with_their_type() -> None:
    said = {name for name in n.OURS if name.endswith("-ms")} | {n.ATTEMPT, n.SEQ}
    for name in said - {n.FIRST_SEEN_MS, n.DUE_MS, n.HOP_MS, n.BACK_MS}:
        assert re.search(rf"^\| `{name}` \| `l` \|", DOCUMENT, re.MULTILINE), name


def test_every_error_is_documented_with_its_code_status_and_parking() -> None:
    kept = {True: "also in `lane.dead`", False: "not parked"}
    assert [(each.code, str(each.status), kept[each.parked]) for each in PROBLEMS.values()] == CODES


def test_every_error_that_is_sent_has_an_example_document() -> None:
    assert [each["code"] for each in DOCUMENTS] == [code for code in PROBLEMS if code not in NOT_SENT]
    for each in DOCUMENTS:
        kind = PROBLEMS[each["code"]]
        detail = each["detail"].removesuffix(kind.advice)
        assert (detail != each["detail"]) == (kind.retryable and kind.kept)
        made = RequestProblem(each["code"], detail).document(request=each["request"], attempts=each["attempts"])
        assert json.loads(made) == each


def test_every_event_is_documented_with_its_fields() -> None:
    said = section("Events")
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|$", said, re.MULTILINE)
    assert {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows} == EVENTS
    assert all(f"`{field}`" in said.split("|")[0] for field in COMMON)


def test_control_messages_and_missing_features_are_documented() -> None:
    keys = re.findall(r"^\| `(\w+)` \| `\{", section("Control"), re.MULTILINE)
    assert set(keys) == {n.CANCEL_KEY, n.RESULT_KEY, n.STATUS_KEY}
    missing = section("Not in this version")
    assert all(f"`{name}`" in missing for name in (*UNSUPPORTED, *LATER))


@pytest.mark.parametrize(("path", "name"), TESTS, ids=lambda each: str(each))
def test_every_cited_test_exists(path: str, name: str) -> None:
    assert name in functions_in(path)
