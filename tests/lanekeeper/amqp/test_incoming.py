"""Frames from the socket: what a channel's tap wants is taken at once, the rest reaches aiormq in its order."""

import asyncio
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader
from typing_extensions import override

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver import Delivered, FrameReader, GatheringWriter, Tap, border, own_aiormq
from lanekeeper.amqp.wire import encoded, frames
from lanekeeper.backoff import LEAST_S, pause_s
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable

BEAT = b"\x08\0\0\0\0\0\0\xce"


def marshalled(channel: int, *frames: Any) -> bytes:
    return b"".join(frame.marshal(each, channel) for each in frames)


def message(channel: int, tag: int, *parts: bytes, redelivered: bool = False) -> bytes:
    size = sum(map(len, parts))
    properties = Basic.Properties(message_id=f"m{tag}", headers={"a": tag}, delivery_mode=2)
    return marshalled(
        channel,
        Basic.Deliver("tag", tag, redelivered, "lane.requests", "critical.a.b"),
        ContentHeader(body_size=size, properties=properties),
        *map(ContentBody, parts),
    )


class Socket(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    @override
    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    @override
    def write_eof(self) -> None:
        self.written.append(b"eof")

    @override
    def close(self) -> None:
        self.is_closed = True

    @override
    def is_closing(self) -> bool:
        return self.is_closed


def gathering(socket: Socket) -> GatheringWriter:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    return GatheringWriter(socket, asyncio.StreamReaderProtocol(reader), reader, loop)


async def test_frames_that_are_written_in_one_turn_of_the_loop_reach_the_socket_together_and_in_order() -> None:
    socket = Socket()
    writer = gathering(socket)
    for data in (b"1", b"2", b"3"):
        writer.write(data)
    assert socket.written == []
    await asyncio.sleep(0)
    writer.write(b"4")
    await writer.drain()
    assert socket.written == [b"123", b"4"]


async def test_frames_are_written_before_the_socket_is_closed_and_none_afterwards() -> None:
    socket = Socket()
    writer = gathering(socket)
    writer.write(b"last")
    writer.write_eof()
    writer.close()
    writer.write(b"late")
    await asyncio.sleep(0)
    assert (socket.written, socket.is_closed) == ([b"last", b"eof"], True)


class Reading:
    """A reader with a tap on channel 1, and what came of it."""

    def __init__(self) -> None:
        self.got: list[Delivered] = []
        self.confirms: list[tuple[int, bool, bool]] = []
        self.returned: list[Message] = []
        self.tap = Tap()
        self.tap.on_delivery = self.got.append
        self.tap.on_confirm = lambda *told: self.confirms.append(told)
        self.tap.on_return = self.returned.append
        self.reader = FrameReader({1: self.tap}, asyncio.get_running_loop())

    async def rest(self) -> bytes:
        """What is left to aiormq, without the heartbeats that stand for what was taken."""
        self.reader.feed_eof()
        return (await self.reader.read()).replace(BEAT, b"")


MINE = (
    message(1, 1, b"{}")
    + marshalled(1, Basic.Ack(3, False), Basic.Nack(4, True, False))
    + message(1, 2, b"one, ", b"two", redelivered=True)
    + marshalled(
        1,
        Basic.Return(312, "NO_ROUTE", "", "gone"),
        ContentHeader(body_size=1, properties=Basic.Properties(message_id="back")),
        ContentBody(b"x"),
    )
    + message(1, 3)
)
OTHERS = (
    marshalled(1, Basic.ConsumeOk("tag")),
    message(2, 7, b"of a channel without a tap"),
    marshalled(1, Basic.GetOk(9, False, "", "k", 0), ContentHeader(body_size=2), ContentBody(b"{}")),
    marshalled(1, Basic.Cancel("tag"), Channel.Close(404, "NOT_FOUND", 0, 0)),
)


@given(
    st.integers(0, len(MINE) - 1), st.binary(min_size=1, max_size=12).map(lambda found: bytes(b % 128 for b in found))
)
def test_bytes_that_nobody_sent_never_become_part_of_a_message(at: int, garbage: bytes) -> None:
    async def run() -> None:
        reading = Reading()
        reading.reader.feed_data(MINE[:at] + garbage + MINE[at:])
        reading.reader.feed_data(MINE)
        sent = {b"{}", b"one, two", b""}
        assert {each.message.body for each in reading.got} <= sent, "a frame's end is not where its length says"

    asyncio.run(run())


@given(st.lists(st.integers(1, 40), min_size=1))
def test_frames_are_recognised_however_the_bytes_are_cut(cuts: list[int]) -> None:
    async def run() -> None:
        reading, at, wire = Reading(), 0, OTHERS[0] + OTHERS[1] + MINE + OTHERS[2] + OTHERS[3]
        for count in range(len(wire)):
            size = cuts[count % len(cuts)]
            if piece := wire[at : at + size]:
                reading.reader.feed_data(piece)
            at += size
        assert [(each.tag, each.redelivered, each.message.body) for each in reading.got] == [
            (1, False, b"{}"),
            (2, True, b"one, two"),
            (3, False, b""),
        ]
        first = reading.got[0].message
        assert (first.exchange, first.routing_key, first.message_id) == ("lane.requests", "critical.a.b", "m1")
        assert (dict(first.headers), first.persistent) == ({"a": 1}, True)
        assert reading.confirms == [(3, False, True), (4, True, False)]
        assert [each.message_id for each in reading.returned] == ["back"]
        assert await reading.rest() == b"".join(OTHERS)

    asyncio.run(run())


async def test_aiormq_gets_a_heartbeat_for_each_frame_taken_from_it_so_that_it_sees_a_live_broker() -> None:
    reading = Reading()
    reading.reader.feed_data(MINE)
    assert await reading.reader.readexactly(len(BEAT)) == BEAT


async def test_an_unreadable_frame_closes_the_connection() -> None:
    reading = Reading()
    reading.reader.feed_data(struct.pack(">BHI", 1, 1, 5) + b"\0\x3c\0\x50\0" + b"\xce")
    with pytest.raises(ConnectionError, match="cannot be read"):
        await reading.reader.readexactly(1)


async def test_bytes_of_a_server_that_does_not_speak_amqp_are_left_to_aiormq() -> None:
    reading = Reading()
    for piece in (b"HTTP/1.1 400 ", b"Bad Request\r\n"):
        reading.reader.feed_data(piece)
    assert await reading.rest() == b"HTTP/1.1 400 Bad Request\r\n"


async def test_aiormq_gets_the_begin_of_a_frame_that_the_broker_did_not_finish() -> None:
    reading, begun = Reading(), OTHERS[0][:-3]
    reading.reader.feed_data(MINE + begun)
    assert await reading.rest() == begun


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


@pytest.mark.parametrize(
    "raised", [OSError("gone"), TimeoutError(), RuntimeError("closed"), Exception(), StopAsyncIteration()]
)
async def test_a_lost_connection_becomes_our_typed_error(raised: Exception) -> None:
    with pytest.raises(BrokerUnreachable, match="no channel"), border("no channel"):
        raise raised


async def test_a_programming_error_is_not_translated() -> None:
    with pytest.raises(ValueError, match="ours"), border("no channel"):
        raise ValueError("ours")


async def test_a_broker_that_closes_the_connection_as_it_is_opened_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a broker does that starts. Inside an async generator, StopAsyncIteration would become a RuntimeError."""

    async def at_eof(_: object) -> None:
        raise StopAsyncIteration

    async def connections(url: str) -> AsyncIterator[Connection]:
        async with Connection(url, name="test") as connection:
            yield connection

    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    url = f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        with pytest.raises(BrokerUnreachable):
            await anext(connections(url))
        monkeypatch.setattr(own_aiormq.FrameReceiver, "get_frame", at_eof)
        with pytest.raises(BrokerUnreachable, match="closed the connection as it was opened"):
            await anext(connections(url))


@pytest.mark.parametrize("failures", [0, 3, 1024, 100_000])
def test_a_pause_is_bounded_after_any_number_of_failures(failures: int) -> None:
    for _ in range(50):
        assert LEAST_S <= pause_s(failures, first_s=0.25, cap_s=2.5) <= 2.5
