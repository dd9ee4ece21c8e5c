"""A published message as frames: pamqp, the codec of aiormq, reads the same message out of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from lanekeeper.amqp.driver.outgoing import encoded, frames
from lanekeeper.contract.messages import Message

MOST = 10
"""The largest body of one frame, in bytes."""


def written(body: bytes, *, mandatory: bool = True, routing_key: str = "critical.a.b") -> list[tuple[int, Any]]:
    """The frames of a publish, each with its channel, read by pamqp."""
    channel: Any = SimpleNamespace(number=3, max_content_size=MOST)
    made = frames(
        channel,
        body,
        exchange="lane.requests",
        routing_key=routing_key,
        properties=encoded(Message(body=body, message_id="m-1", priority=4)),
        mandatory=mandatory,
    )
    assert not made.should_close
    found, data = [], made.payload
    while data:
        size, number, read = frame.unmarshal(data)
        found.append((number, read))
        data = data[size:]
    return found


@pytest.mark.parametrize("mandatory", [True, False])
def test_a_publish_is_a_method_a_header_and_a_body(mandatory: bool) -> None:
    (one, method), (two, header), (three, body) = written(b"{}", mandatory=mandatory)

    assert (one, two, three) == (3, 3, 3)
    assert isinstance(method, Basic.Publish)
    assert (method.exchange, method.routing_key) == ("lane.requests", "critical.a.b")
    assert (method.mandatory, method.immediate) == (mandatory, False)
    assert isinstance(header, ContentHeader)
    assert header.body_size == 2
    assert (header.properties.message_id, header.properties.priority) == ("m-1", 4)
    assert isinstance(body, ContentBody)
    assert body.value == b"{}"


@pytest.mark.parametrize(
    ("size", "sizes"), [(0, []), (1, [1]), (MOST, [MOST]), (MOST + 1, [MOST, 1]), (3 * MOST, [MOST, MOST, MOST])]
)
def test_a_body_is_cut_into_frames_of_the_largest_size(size: int, sizes: list[int]) -> None:
    body = bytes(range(size))
    _, (_, header), *rest = written(body)

    assert header.body_size == size
    assert [len(each.value) for _, each in rest] == sizes
    assert b"".join(each.value for _, each in rest) == body


def test_a_routing_key_may_have_255_bytes() -> None:
    assert written(b"", routing_key="é" * 127 + "x")[0][1].routing_key == "é" * 127 + "x"
    with pytest.raises(ValueError, match="256 bytes, allowed are 255"):
        written(b"", routing_key="é" * 128)
