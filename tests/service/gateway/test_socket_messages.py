"""What a client says on a WebSocket is read strictly; for anything else the connection is closed with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from service.gateway.described import socket
from service.gateway.polling import LARGEST_NUMBER
from service.gateway.socket_messages import FIELDS, ClientMessage, InvalidMessage, read

BODY = {"prompt": "x"}
SAID = [each["payload"] for name, each in socket.messages().items() if name in map(socket.name_of, FIELDS)]
AnyField = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([LARGEST_NUMBER, LARGEST_NUMBER + 1])
    | st.sampled_from(["", "a", "a" * 128, "a" * 129, BODY])
    | st.dictionaries(st.text("ab", max_size=3), st.sampled_from(["x", "\n", "é", "~", "x" * 1001, 1]), max_size=2)
)


def said(**fields: Any) -> str:
    return json.dumps(fields)


def test_each_message_is_read() -> None:
    assert read(said(type="subscribe", id="a", after=7, ref="r")) == ClientMessage(
        type="subscribe", id="a", after=7, ref="r"
    )
    assert read(said(type="unsubscribe", id="a")) == ClientMessage(type="unsubscribe", id="a")
    assert read(said(type="cancel", id="a")) == ClientMessage(type="cancel", id="a")
    assert read(said(type="submit", body=BODY, headers={"x-lane-name": "batch"}, subscribe=False)) == ClientMessage(
        type="submit", body=b'{"prompt": "x"}', headers={"x-lane-name": "batch"}, subscribe=False
    )


@given(
    st.sampled_from(sorted(FIELDS)),
    st.dictionaries(st.sampled_from(["ref", "id", "after", "subscribe", "headers", "more"]), AnyField, max_size=4),
    st.sampled_from([{}, {"body": BODY}, {"body": "x"}]),
)
def test_the_document_allows_what_is_read(type: str, fields: dict[str, Any], body: dict[str, Any]) -> None:
    fields = {"type": type, **fields, **body}
    try:
        read(json.dumps(fields))
    except InvalidMessage:
        assert not any(Draft202012Validator(each).is_valid(fields) for each in SAID)
    else:
        assert [Draft202012Validator(each).is_valid(fields) for each in SAID].count(True) == 1


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[]", "7", '"x"', "[" * 100_000, "1" * 5000])
def test_what_is_no_json_object_closes_with_1007(text: str) -> None:
    with pytest.raises(InvalidMessage) as error:
        read(text)
    assert error.value.code == 1007


@pytest.mark.parametrize("held", ["[]," * 200_000, "7" * 500_000])
def test_what_takes_long_to_parse_closes_with_1009_before_it_is_parsed(held: str) -> None:
    with pytest.raises(InvalidMessage, match="more than") as error:
        read(f'{{"type": "submit", "body": {{"x": [{held}')
    assert error.value.code == 1009


def test_a_body_may_have_as_many_values_as_over_http_and_more_is_for_it_to_refuse() -> None:
    body: dict[str, Any] = {"x": [[] for _ in range(9_998)]}
    assert read(said(type="submit", body=body, headers={"x-lane-name": "batch"}, ref="r"), max_values=20_000).ref == "r"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": "shout"},
        {"type": ["submit"]},
        {"type": "submit"},
        {"type": "submit", "body": "x"},
        {"type": "submit", "body": BODY, "headers": ["x"]},
        {"type": "submit", "body": BODY, "headers": {"x-lane-name": 1}},
        {"type": "submit", "body": BODY, "headers": {"x-lane-name": "a\nb"}},
        {"type": "submit", "body": BODY, "headers": {"x-lane-name": "a" * 1001}},
        {"type": "submit", "body": BODY, "headers": {f"x-{number}": "" for number in range(21)}},
        {"type": "submit", "body": BODY, "subscribe": 1},
        {"type": "submit", "body": BODY, "after": 1},
        {"type": "subscribe"},
        {"type": "subscribe", "id": None},
        {"type": "subscribe", "id": 7},
        {"type": "subscribe", "id": "a" * 129},
        {"type": "subscribe", "id": "a", "after": -1},
        {"type": "subscribe", "id": "a", "after": 1.5},
        {"type": "subscribe", "id": "a", "after": True},
        {"type": "subscribe", "id": "a", "after": 2**53 + 1},
        {"type": "cancel", "id": "a", "ref": 1},
        {"type": "cancel", "id": "a", "more": 1},
    ],
)
def test_what_is_no_known_message_closes_with_1008_and_a_reason(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage) as error:
        read(json.dumps(fields))
    assert error.value.code == 1008
    assert error.value.reason
