"""Dead letters as values: their cause, what a filter means, how a body is edited, what the page holds."""

from typing import Any

import pytest

from lanekeeper.contract.messages import Message
from service.deadletters import Filter, LetterEdit, Overview, ReplayRefused, merge_patch, position
from topology.broker.deadletters import DeadLetter, cause_of, line_of, message_of_line

HEADERS = {
    "x-lane-dead-code": "provider_rejected",
    "x-lane-dead-detail": "400 invalid_request_error: model 'x' is not there (req_011CSq)",
    "x-lane-dead-at": "2026-11-21T18:00:00.123Z",
    "x-lane-attempt": 2,
    "x-lane-routing-key": "normal.shop.ask",
    "x-lane-errors": ["one", "two"],
}


def letter(id: str = "x", **headers: Any) -> DeadLetter:
    return DeadLetter(Message(body=b"{}", message_id=id, headers={**HEADERS, **headers}))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("400: field 'a' in 12 parts", "400: field 'b' in 7 parts", True),
        ("all 5 attempts failed; the last: 529 overloaded", "all 8 attempts failed; the last: 529 overloaded", True),
        ("rejected (req_011CSqAb)", "rejected (req_999)", True),
        ("404 not_found_error: model: gpt-9", "404 not_found_error: model: claude-nothing", True),
        ("400 invalid_request_error: model: x", "400 invalid_request_error: model: y", False),
        ('model "a" is unknown', 'model "b-c d" is unknown', True),
        ("it can't be, said the provider's model", "it can't do, said the provider's model", False),
        ("header x: wrong", "header y: wrong", False),
        ("spaces  here", "spaces here", True),
    ],
)
def test_a_cause_is_the_error_without_numbers_ids_and_quoted_values(one: str, other: str, is_same: bool) -> None:
    assert (cause_of("code", one) == cause_of("code", other)) is is_same
    assert cause_of("code", one) != cause_of("another", one)
    assert len(cause_of("code", one)) == 8


def test_a_long_hostile_detail_has_a_cause_soon() -> None:
    assert cause_of("code", "'\"`1" * 100_000)


def test_what_is_no_dead_letter_of_ours_has_a_value_for_everything() -> None:
    wrong = dict.fromkeys(HEADERS, 5) | {"x-lane-attempt": "many", "x-lane-dead-at": "soon", "traceparent": b"\xff"}
    for headers in ({}, wrong):
        found = DeadLetter(Message(body=b"\xff", headers=headers, routing_key="what"))
        assert (found.code, found.lane, found.app, found.tenant) == ("unknown", "what", "unknown", "")
        assert (found.at_ms, found.attempts, found.replays, found.errors, found.trace_id) == (0, 0, 0, (), None)
        assert len(found.id) == 16
        assert message_of_line(line_of(found.message)).body == b"\xff"


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (Filter(), True),
        (Filter(ids=frozenset({"x", "y"})), True),
        (Filter(ids=frozenset({"y"})), False),
        (Filter(codes=frozenset({"provider_rejected"}), lanes=frozenset({"normal"}), apps=frozenset({"shop"})), True),
        (Filter(codes=frozenset({"provider_rejected"}), lanes=frozenset({"batch"})), False),
        (Filter(tenants=frozenset({"crm"})), False),
        (Filter(causes=frozenset({letter().cause})), True),
        (Filter(since_ms=letter().at_ms), True),
        (Filter(since_ms=letter().at_ms + 1), False),
    ],
)
def test_a_letter_matches_if_each_given_field_has_one_of_its_values(wanted: Filter, matches: bool) -> None:
    assert wanted.matches(letter()) is matches
    assert wanted.is_empty is (wanted == Filter())


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_is_applied_as_rfc_7396_says(target: Any, patch: Any, result: Any) -> None:
    assert merge_patch(target, patch) == result


def test_an_edit_is_an_object() -> None:
    with pytest.raises(ReplayRefused, match="JSON object"):
        LetterEdit(patch=[1])


@pytest.mark.parametrize(
    ("at", "shown"),
    [
        ("0001-01-01T00:00:00+14:00", "1970-01-01T00:00:00.000Z"),
        ("9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59.000Z"),
        ("9999-12-31T23:59:59.9999999Z", "9999-12-31T23:59:59.000Z"),
    ],
)
def test_a_time_beyond_the_years_of_the_calendar_does_not_end_the_list(at: str, shown: str) -> None:
    overview = Overview(Filter())
    overview.keeps(Message(body=b"{}", headers={"x-lane-dead-at": at}), 1)
    assert overview.as_json(jaeger_url=None)["groups"][0]["newest"] == shown


def test_a_page_has_the_newest_and_the_next_goes_on_after_it() -> None:
    letters = [letter(f"m-{n}", **{"x-lane-dead-at": f"2026-11-21T18:00:{n // 2:02}Z"}) for n in range(50)]
    letters[3] = letter("m-3", **{"x-lane-replays": 2})
    ids, after = [], None
    while True:
        overview = Overview(Filter(), limit=7, after=after)
        for each in letters:
            overview.keeps(Message(body=b"x" * 10, message_id=each.id, headers=each.message.headers), 1)
        page = overview.as_json(jaeger_url=None)
        assert (page["total"], page["matched"]) == (50, 50)
        ids += [each["id"] for each in page["letters"]]
        assert {each["body_bytes"] for each in page["letters"]} == {10}
        if page["next"] is None:
            break
        after = position(page["next"])
    assert sorted(ids) == sorted(each.id for each in letters)
    (group,) = page["groups"]
    assert (group["count"], group["relapses"], group["last_hour"]) == (50, 1, 0)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"5",
        b"{}",
        b'{"body": "x"}',
        b'{"body": "x", "routing_key": 5}',
        b'{"body": "x", "routing_key": "k", "x": 1}',
        b'{"body": 5, "routing_key": "k"}',
        b'{"body": "x", "routing_key": "k", "priority": "high"}',
        b'{"body": "x", "routing_key": "k", "headers": []}',
        b'{"body_base64": "%", "routing_key": "k"}',
        b'{"body": "x", "body_base64": "eA==", "routing_key": "k"}',
    ],
)
def test_a_line_that_is_no_exported_letter_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        message_of_line(line)
