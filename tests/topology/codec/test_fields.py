"""One field of a body changes, and no other byte."""

import json

import pytest

from topology.codec.fields import with_field, without_field

BODY = ' {"a" : 1e400, "b\\u0041":{"x":[ 1.50, "}\\",é\\ud800"]} ,\n"c":"\U0001f98a" }\n'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", BODY.replace("1e400", '"new"')),
        ("bA", BODY.replace('{"x":[ 1.50, "}\\",é\\ud800"]}', '"new"')),
        ("c", BODY.replace('"\U0001f98a"', '"new"')),
        ("d", BODY.replace("{", '{"d":"new",', 1)),
        ("x", BODY.replace("{", '{"x":"new",', 1)),
    ],
)
def test_the_value_of_a_field_is_replaced(name: str, expected: str) -> None:
    assert with_field(BODY.encode(), name, "new") == expected.encode()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", ' {"b\\u0041":{"x":[ 1.50, "}\\",é\\ud800"]} ,\n"c":"\U0001f98a" }\n'),
        ("bA", ' {"a" : 1e400 ,\n"c":"\U0001f98a" }\n'),
        ("c", ' {"a" : 1e400, "b\\u0041":{"x":[ 1.50, "}\\",é\\ud800"]} }\n'),
        ("d", BODY),
    ],
)
def test_a_field_is_removed(name: str, expected: str) -> None:
    assert without_field(BODY.encode(), name) == expected.encode()


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a":1}', b'{ "a" :\t[] }'])
def test_small_objects(body: bytes) -> None:
    assert json.loads(with_field(body, "a", {"b": None})) == {"a": {"b": None}}
    assert json.loads(without_field(body, "a")) == {}
