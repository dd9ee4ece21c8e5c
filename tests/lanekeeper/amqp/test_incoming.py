"""Frames from the socket: what a channel's tap wants is taken at once, the rest reaches aiormq in its order."""

import asyncio
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader

from lanekeeper.amqp.driver.frames import patch_pamqp
from lanekeeper.amqp.driver.incoming import Delivered, FrameReader, Tap
from lanekeeper.contract.messages import Message

patch_pamqp()
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
