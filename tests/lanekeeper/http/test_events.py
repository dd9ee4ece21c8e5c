"""Server-Sent Events: the same, however the bytes are cut into chunks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanekeeper.http import events
from lanekeeper.http.events import Event, Events, EventTooLarge

STREAM = (
    b": a comment\r\nretry: 10\r\n\r\nid: 1\r\nevent: queued\r\ndata: {}\r\n\r\n"
    b"data:two\ndata: lines\n\nid\nevent: \xc3\xb4\rdata:  x\r\rdata: after the last blank line"
)
FOUND = [Event("queued", b"{}", "1"), Event("message", b"two\nlines", "1"), Event("ô", b" x", "")]


@given(st.lists(st.integers(0, len(STREAM))))
def test_chunks_do_not_change_the_events(cuts: list[int]) -> None:
    reading = Events()
    edges = [0, *sorted(cuts), len(STREAM)]
    assert [event for begin, end in pairwise(edges) for event in reading.read(STREAM[begin:end])] == FOUND


def test_an_event_without_data_is_none_and_an_id_with_nul_is_ignored() -> None:
    assert list(Events().read(b"event: started\n\nid: a\nid: b\0\ndata: 1\n\n")) == [Event("message", b"1", "a")]


@pytest.mark.parametrize("line", [b"data: " + b"x" * 50, b"x" * 50, b"data:\n" * 50])
def test_an_event_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(events, "LARGEST_BYTES", 40)
    reading = Events()
    with pytest.raises(EventTooLarge):
        _ = [event for at in range(0, len(line), 10) for event in reading.read(line[at : at + 10])]
