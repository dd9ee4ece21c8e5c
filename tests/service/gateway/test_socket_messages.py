"""What a client says on a WebSocket is read strictly; for anything else the connection is closed with a reason."""

import json
from typing import Any

import pytest

from service.gateway.socket_messages import Rubbish, Said, read

BODY = {"prompt": "x"}


def said(**fields: Any) -> str:
    return json.dumps(fields)


def test_each_message_is_read() -> None:
    assert read(said(type="subscribe", id="a", after=7, ref="r")) == Said(type="subscribe", id="a", after=7, ref="r")
    assert read(said(type="unsubscribe", id="a")) == Said(type="unsubscribe", id="a")
    assert read(said(type="cancel", id="a")) == Said(type="cancel", id="a")
    assert read(said(type="submit", body=BODY, headers={"x-lane-name": "batch"}, subscribe=False)) == Said(
        type="submit", body=b'{"prompt": "x"}', headers={"x-lane-name": "batch"}, subscribe=False
    )


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[]", "7", '"x"', "[" * 100_000, "1" * 5000])
def test_what_is_no_json_object_closes_with_1007(text: str) -> None:
    with pytest.raises(Rubbish) as rubbish:
        read(text)
    assert rubbish.value.code == 1007


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
    with pytest.raises(Rubbish) as rubbish:
        read(json.dumps(fields))
    assert rubbish.value.code == 1008
    assert rubbish.value.reason
