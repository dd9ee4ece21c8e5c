"""Replies on their way from the channel to who waits for them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lanekeeper.amqp.replies import UNREAD_BYTES, Arrivals, DirectReplies
from lanekeeper.amqp.tolerant import AS_READ, encoded
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ReplyLost
from lanekeeper.replies import Part
from tests.support.virtual_time import virtually


def delivered(message: Message) -> Any:
    properties = SimpleNamespace(headers={AS_READ: encoded(message)})
    header = SimpleNamespace(properties=properties)
    return SimpleNamespace(header=header, body=message.body, exchange="", routing_key="")


def part(seq: int, body: bytes = b"{}") -> Part:
    return Part(kind="event", seq=seq, body=body)


async def test_each_line_of_a_message_of_several_parts_goes_to_its_own_stream() -> None:
    direct, one, two = DirectReplies(), Message(body=b""), Message(body=b"")
    with direct.expecting(one) as first, direct.expecting(two) as second:
        lines = [
            f'["{one.correlation_id}","event",3,{{"text":"a, \\"b\\"]"}}]',
            f'["{two.correlation_id}","restart",0,{{}}]',
            '["nobody","event",1,{}]',
            f'["{one.correlation_id}","event",4,{{}}]',
        ]
        told = Message(body="\n".join(lines).encode(), headers={n.PART: n.SEVERAL})
        await direct._on_delivery(delivered(told))
        single = Message(
            body=b'{"x":1}', headers={n.PART: "event", n.SEQ: 5}, correlation_id=one.correlation_id
        )  # fmt: skip
        await direct._on_delivery(delivered(single))

        assert await first.all(end=None) == [part(3, b'{"text":"a, \\"b\\"]"}'), part(4), part(5, b'{"x":1}')]
        assert await second.all(end=None) == [Part(kind="restart", seq=0, body=b"{}")]


async def test_what_has_come_is_read_before_a_loss_is_raised() -> None:
    arrived = Arrivals()
    arrived.add(part(0))
    arrived.add(part(1))
    arrived.lose("gone")
    arrived.add(part(2))
    assert await arrived.all(end=None) == [part(0), part(1)]
    with pytest.raises(ReplyLost, match="gone"):
        await arrived.all(end=None)


async def test_a_reader_that_is_too_slow_loses_what_comes_later_and_costs_bounded_memory() -> None:
    arrived, kib = Arrivals(), bytes(1024)
    for seq in range(10 * UNREAD_BYTES // 1024):
        arrived.add(part(seq, kib))
    assert len(await arrived.all(end=None)) * 1024 <= UNREAD_BYTES + 1024
    with pytest.raises(ReplyLost, match="faster than they were read"):
        await arrived.all(end=None)


def test_each_wait_has_its_own_end() -> None:
    async def story() -> float:
        loop, arrived = asyncio.get_running_loop(), Arrivals()
        for seq in range(5):
            loop.call_later(8, arrived.add, part(seq))
            await arrived.all(end=loop.time() + 10)
        with pytest.raises(TimeoutError):
            await arrived.all(end=loop.time() + 3)
        return loop.time()

    began_s = 0.0

    async def timed() -> float:
        nonlocal began_s
        began_s = asyncio.get_running_loop().time()
        return await story() - began_s

    assert virtually(timed()) == pytest.approx(43)
