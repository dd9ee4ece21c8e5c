import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.failures import AnswerTooLargeError
from consumers.providers.events import EventSplitter


def split(stream: bytes, cuts: list[int] | None = None) -> list[bytes]:
    splitter = EventSplitter(max_event_bytes=10_000)
    found: list[bytes] = []
    at = 0
    for cut in [*sorted(cuts or []), len(stream)]:
        found += splitter.feed(stream[at:cut])
        at = cut
    return found


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_ends_at_a_blank_line_with_any_line_ending(end: bytes) -> None:
    stream = end.join([b"event: ping", b'data: {"a": 1}', b"", b'data: {"b": 2}', b"", b""])

    assert split(stream) == [b'{"a": 1}', b'{"b": 2}']


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data: 1\ndata: 2\n\n", [b"1\n2"]),
        (b"data:1\n\n", [b"1"]),
        (b"data:  1\n\n", [b" 1"]),
        (b"data: 1\ndata\ndata: 2\n\n", [b"1\n\n2"]),
        (b": a comment\n\ndata: 1\n\n", [b"1"]),
        (b": data: 0\nid: 3\nretry: 5\ndata: 1\nnonsense\n\n", [b"1"]),
        (b"database: 1\n\n", []),
        (b"event: ping\n\n", []),
        (b"data\n\n", []),
        (b"\n\n\n\ndata: 1\n\n\n\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"\xef\xbb\xbfdata: 1\n\n", [b"1"]),
        (b"data: 1\n", []),
        (b"data: 1", []),
        (b"", []),
    ],
)
def test_event_fields_are_read_as_the_standard_says(stream: bytes, data: list[bytes]) -> None:
    assert split(stream) == data


LINES = st.one_of(
    st.sampled_from([b"", b"", b":", b": ping", b"event: a", b"data", b"data:", b"id: 1"]),
    st.binary(max_size=12).map(lambda text: b"data: " + text.replace(b"\r", b"").replace(b"\n", b"")),
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=20).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def by_lines(stream: bytes) -> list[bytes]:
    """The standard's algorithm, line by line, for a complete stream."""
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found: list[bytes] = []
    data: list[bytes] = []
    for line in lines[:-1]:
        field, _, value = line.partition(b":")
        if not line:
            if (joined := b"\n".join(data)) != b"":
                found.append(joined)
            data = []
        elif field == b"data":
            data.append(value.removeprefix(b" "))
    return found


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 300), max_size=12))
def test_bytes_in_any_pieces_give_the_events_of_the_standard(stream: bytes, cuts: list[int]) -> None:
    assert split(stream, [min(cut, len(stream)) for cut in cuts]) == by_lines(stream)


@pytest.mark.slow
@given(events=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), min_size=1), max_size=5))
def test_a_stream_read_byte_by_byte_gives_its_events(events: list[dict[str, str]]) -> None:
    stream = b"".join(b"event: x\r\ndata: " + json.dumps(event).encode() + b"\r\n\r\n" for event in events)

    found = split(stream, list(range(len(stream))))

    assert [json.loads(data) for data in found] == events


def test_an_endless_event_is_refused() -> None:
    splitter = EventSplitter(max_event_bytes=1000)
    splitter.feed(b"data: " + b"x" * 900)

    with pytest.raises(AnswerTooLargeError, match="more than 1000 bytes"):
        splitter.feed(b"x" * 200)


def test_an_event_that_is_too_large_is_refused_in_one_piece_and_in_many() -> None:
    with pytest.raises(AnswerTooLargeError):
        EventSplitter(max_event_bytes=1000).feed(b"data: " + b"x" * 2000 + b"\n\n")


def test_a_line_end_that_is_cut_in_two_is_one_line_end() -> None:
    for end in (b"\r\n", b"\r", b"\n"):
        stream = end.join([b"event: a", b"data: 1", b"data: 2", b"", b"data: 3", b"", b""])
        for cut in range(len(stream)):
            assert split(stream, [cut]) == [b"1\n2", b"3"]
