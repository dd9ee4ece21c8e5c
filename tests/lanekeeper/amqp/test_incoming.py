"""Between aiormq and the socket: the frames of both directions, as they are passed on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage
from aiormq.connection import FrameReceiver
from hypothesis import given
from hypothesis import strategies as st
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Connection
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat
from typing_extensions import override

from lanekeeper.amqp import connection as connections_of_ours
from lanekeeper.amqp.driver import Incoming, Outgoing, translate_broker_errors
from lanekeeper.amqp.tolerant import message_of
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable


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


def outgoing(socket: Socket) -> Outgoing:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    return Outgoing(socket, asyncio.StreamReaderProtocol(reader), reader, loop)


async def test_frames_are_written_before_the_socket_is_closed_and_none_afterwards() -> None:
    socket = Socket()
    writer = outgoing(socket)
    writer.write(b"last")
    writer.write_eof()
    writer.close()
    writer.write(b"late")
    await asyncio.sleep(0)
    assert (socket.written, socket.is_closed) == ([b"last", b"eof"], True)


class Passing:
    """What aiormq gets of what the broker sends, and what else came of it."""

    def __init__(self) -> None:
        self.alarms: list[str | None] = []
        self.closed: list[int] = []
        self.incoming = Incoming(on_alarm=self.alarms.append, on_close=self.closed.append)

    def passed(self, *pieces: bytes) -> list[tuple[int, Any]]:
        """The frames that aiormq reads, each with its channel."""
        data, found = b"".join(map(self.incoming.passed, pieces)), []
        while data:
            size, channel, read = frame.unmarshal(data)
            found.append((channel, read))
            data = data[size:]
        return found


def body_of(header: Any) -> Message:
    deliver = Basic.Deliver("c", 1, False, "", "")
    return message_of(DeliveredMessage(deliver, header, b"", None))  # type: ignore[arg-type]


WIRE = (
    marshalled(1, Basic.ConsumeOk("tag"))
    + message(1, 200, b"{}")
    + marshalled(1, Basic.Ack(3, False), Basic.Nack(4, True, False))
    + marshalled(0, Connection.Blocked("low on memory"))
    + message(2, 7, b"one, ", b"two", redelivered=True)
    + marshalled(
        1,
        Basic.Return(312, "NO_ROUTE", "", "gone"),
        ContentHeader(body_size=1, properties=Basic.Properties(message_id="back")),
        ContentBody(b"x"),
    )
    + marshalled(0, Connection.Unblocked(), Heartbeat())
    + marshalled(1, Basic.Cancel("tag"), Channel.Close(404, "NOT_FOUND", 0, 0))
)
NAMES = (
    "Basic.ConsumeOk", "Basic.Deliver", "ContentHeader", "ContentBody", "Basic.Ack", "Basic.Nack", "Basic.Deliver",
    "ContentHeader", "ContentBody", "ContentBody", "Basic.Return", "ContentHeader", "ContentBody", "Heartbeat",
    "Basic.Cancel", "Channel.Close",
)  # fmt: skip


@given(st.lists(st.integers(1, 40), min_size=1))
def test_frames_are_recognised_however_the_bytes_are_cut(cuts: list[int]) -> None:
    passing, at = Passing(), 0
    pieces: list[bytes] = []
    while at < len(WIRE):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(WIRE[at : at + size])
        at += size
    found = passing.passed(*pieces)
    assert tuple(read.name for _, read in found) == NAMES
    assert [channel for channel, _ in found] == [1] * 6 + [2] * 4 + [1] * 3 + [0] + [1] * 2
    headers = [read for _, read in found if isinstance(read, ContentHeader)]
    assert [each.properties.message_id for each in headers] == ["", "", "back"] or [
        each.properties.message_id for each in headers
    ] == [None, None, "back"]
    assert [(body_of(each).message_id, dict(body_of(each).headers)) for each in headers] == [
        ("m200", {"a": 200}), ("m7", {"a": 7}), ("back", {}),
    ]  # fmt: skip
    assert (passing.alarms, passing.closed) == (["low on memory", None], [1])


@given(st.integers(0, len(WIRE) - 1), st.binary(min_size=1, max_size=12))
def test_bytes_that_nobody_sent_raise_no_error_of_ours(at: int, garbage: bytes) -> None:
    passing = Passing()
    for piece in (WIRE[:at] + garbage, WIRE[at:], WIRE):
        passing.incoming.passed(piece)


def test_bytes_of_a_server_that_does_not_speak_amqp_are_left_to_aiormq() -> None:
    passing = Passing()
    assert b"".join(map(passing.incoming.passed, (b"HTTP/1.1 400 ", b"Bad Request\r\n"))) == (
        b"HTTP/1.1 400 Bad Request\r\n"
    )


# ---- what is sent ----------------------------------------------------------------------------------------------------

PUBLISH = marshalled(3, Basic.Publish(routing_key="q"), ContentHeader(body_size=1), ContentBody(b"x"))
OPEN, CLOSE, CLOSE_OK = (
    marshalled(3, each) for each in (Channel.Open(), Channel.Close(200, "", 0, 0), Channel.CloseOk())
)
OF_ANOTHER = marshalled(4, Basic.Ack(1))


async def written(*steps: bytes | int) -> bytes:
    """What reaches the socket; a number is a channel that the broker closes at that moment."""
    socket = Socket()
    writer = outgoing(socket)
    for each in steps:
        writer.on_close(each) if isinstance(each, int) else writer.write(each)
    await writer.drain()
    return b"".join(socket.written)


async def test_after_the_broker_has_closed_a_channel_only_its_answer_is_sent_until_it_is_opened_again() -> None:
    assert await written(OPEN, PUBLISH, 3, PUBLISH, OF_ANOTHER, CLOSE_OK, CLOSE, OPEN, PUBLISH) == (
        OPEN + PUBLISH + CLOSE_OK + OF_ANOTHER + OPEN + PUBLISH
    )


async def test_after_a_close_nothing_is_sent_but_the_answer_to_one_of_the_brokers_that_crossed_it() -> None:
    assert await written(PUBLISH, CLOSE, PUBLISH, CLOSE, OF_ANOTHER) == PUBLISH + CLOSE + OF_ANOTHER
    assert await written(PUBLISH, CLOSE, 3, CLOSE_OK) == PUBLISH + CLOSE + CLOSE_OK


@pytest.mark.parametrize(
    "raised", [OSError("gone"), TimeoutError(), RuntimeError("closed"), Exception(), StopAsyncIteration()]
)
async def test_a_lost_connection_becomes_our_typed_error(raised: Exception) -> None:
    with pytest.raises(BrokerUnreachable, match="no channel"), translate_broker_errors("no channel"):
        raise raised


async def test_a_broker_that_closes_the_connection_as_it_is_opened_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a broker does that starts. Inside an async generator, StopAsyncIteration would become a RuntimeError."""

    async def at_eof(_: object) -> None:
        raise StopAsyncIteration

    async def connections(url: str) -> AsyncIterator[connections_of_ours.Connection]:
        async with connections_of_ours.Connection(url, name="test") as connection:
            yield connection

    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    url = f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        with pytest.raises(BrokerUnreachable):
            await anext(connections(url))
        monkeypatch.setattr(FrameReceiver, "get_frame", at_eof)
        with pytest.raises(BrokerUnreachable, match="closed the connection as it was opened"):
            await anext(connections(url))
