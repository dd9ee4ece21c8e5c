"""JSON that would block the event loop is recognised before it is parsed; JSON that is merely long is accepted."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.codec.bounds import Measure, excess

ANY = st.recursive(
    st.none() | st.integers() | st.booleans() | st.text(alphabet='a,:[{}]"\\\n9é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a,:"\\9'), inner),
)


def counted(value: Any) -> int:
    """All keys and values; an empty container counts twice, and the outermost one does not count."""
    match value:
        case dict():
            return sum(2 + counted(each) for each in value.values()) or 1
        case list():
            return sum(1 + counted(each) for each in value) or 1
    return 0


@pytest.mark.slow
@given(ANY, st.integers(1, 10), st.booleans())
def test_keys_and_values_are_counted_alike_in_pieces_of_any_size(value: Any, size: int, is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]

    for values in (counted(value), counted(value) - 1):
        measure = Measure(values)
        found = [measure.add(piece) for piece in pieces]
        if values < counted(value):
            assert any(found)
        else:
            assert not any(found)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"0,", b'"",', b'{"a":1},', b'"a,b",'])
def test_too_many_values_are_refused_with_the_limit(piece: bytes) -> None:
    raw = b"[" + piece * 100_000 + b"0]"

    assert excess(raw, max_values=200_001 + 100_000 * piece.count(b":")) is None
    found = excess(raw, max_values=99_000)
    assert found is not None
    assert "more than 99000 keys and values (LANEKEEPER_JSON_VALUES)" in found


def test_a_number_may_have_128_digits_wherever_it_stands() -> None:
    for at in range(40):
        text = b"[" + b" " * at + b"%s," + b" " * 40_000 + b"1]"
        assert excess(text % (b"7" * 128), max_values=100) is None
        assert excess(text % (b"7" * 144), max_values=100) == "a number of more than 128 digits"


@pytest.mark.parametrize("digits", [128, 129])
def test_only_digits_outside_strings_count_as_a_number(digits: int) -> None:
    measure = Measure(1000)
    found = measure.add(b'["' + b"7" * 500 + b'",' + b"7" * digits + b"," + b"7" * 100 + b"]")
    assert (found is None) == (digits == 128)


def test_escapes_are_understood_wherever_the_text_is_cut() -> None:
    text = rb'{"a\\":"b\",,\\\",,","\\\\":[1,"\"[[{{"]}'
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            cut = (text[:first], text[first:second], text[second:])
            exact, less = Measure(6), Measure(5)
            assert [exact.add(piece) for piece in cut] == [None] * 3
            assert exact.left == 0
            assert any(less.add(piece) for piece in cut)
