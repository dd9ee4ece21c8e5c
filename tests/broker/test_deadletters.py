"""Reading the queue of dead letters: all of them, in order, without keeping them from others for long."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable, TopologyMismatch
from tests.support.brokers import Vhost, close_connection
from tests.support.waiting import until
from topology.broker import deadletters
from topology.broker.deadletters import line_of, message_of_line, scanned
from topology.declaration import Broker, _unlimited

QUEUE = "lane.dead"


@dataclass
class Seen:
    """Keeps every `nth` message, at most `most`."""

    nth: int = 0
    most: int = 10**9
    ids: list[str] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def is_enough(self) -> bool:
        return len(self.kept) >= self.most

    def keeps(self, message: Message, tag: int) -> bool:
        self.ids.append(message.message_id or "")
        if self.nth and len(self.ids) % self.nth == 0:
            self.kept[message.message_id or ""] = tag
            return True
        return False


@pytest.fixture
async def connection(vhost: Vhost) -> AsyncIterator[Connection]:
    async with Connection(vhost.amqp_url, name=vhost.name) as connection:
        channel = await connection.channel(confirms=False)
        arguments: dict[str, Any] = dict(_unlimited(Broker(connection.version)))
        await channel.queue_declare(QUEUE, durable=True, arguments=arguments)
        await channel.close()
        yield connection


async def fill(connection: Connection, count: int, *, body: bytes = b"{}", first: int = 0) -> list[str]:
    publisher, ids = Publisher(connection, tracing=None), [f"m-{first + number}" for number in range(count)]
    answers = [await publisher.write(Message(body=body, message_id=id), exchange="", routing_key=QUEUE) for id in ids]
    await asyncio.gather(*answers)
    await until(lambda: holds(connection, first + count))
    return ids


async def holds(connection: Connection, count: int) -> bool:
    return (await depths(connection, [QUEUE]))[QUEUE].ready == count


async def seen(connection: Connection) -> list[str]:
    async with scanned(connection, QUEUE, Seen) as scan:
        return scan.reader.ids


@pytest.mark.every_version
async def test_a_scan_sees_all_messages_and_gives_them_back(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadletters, "WINDOW", 10)
    ids = await fill(connection, 35)
    assert await seen(connection) == ids
    assert await seen(connection) == ids
    await fill(connection, 1, first=35)
    assert sorted(await seen(connection)) == sorted([*ids, "m-35"])
    assert await holds(connection, 36)


async def test_an_empty_queue_is_read_at_once_and_a_missing_one_is_told(connection: Connection) -> None:
    async with asyncio.timeout(1):
        assert await seen(connection) == []
    with pytest.raises(TopologyMismatch, match="topology apply"):
        async with scanned(connection, "lane.none", Seen):
            pass


async def test_what_is_kept_is_hidden_until_it_is_removed_or_the_scan_ends(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadletters, "OTHERS_END_WITHIN_S", 0.2)
    await fill(connection, 20)
    async with scanned(connection, QUEUE, lambda: Seen(nth=5, most=3)) as scan:
        assert list(scan.reader.kept) == ["m-4", "m-9", "m-14"]
        assert len(await seen(connection)) == 17
        await scan.remove(scan.reader.kept["m-9"])
    await until(lambda: holds(connection, 19))
    assert sorted(await seen(connection)) == sorted(f"m-{number}" for number in range(20) if number != 9)


async def test_if_the_connection_is_lost_everything_returns(vhost: Vhost, connection: Connection) -> None:
    await fill(connection, 20)
    async with connection.another("killed") as other, scanned(other, QUEUE, lambda: Seen(nth=2)) as scan:
        loss = other.loss
        await close_connection(vhost, f"{vhost.name}: killed")
        await until(loss.done)
        with pytest.raises(BrokerUnreachable):
            await scan.remove(scan.reader.kept["m-3"])
        await until(lambda: holds(connection, 20))


async def test_two_that_read_at_once_both_see_everything(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadletters, "WINDOW", 100)
    ids = await fill(connection, 1000)
    async with connection.another("second") as second:
        one, other = await asyncio.gather(seen(connection), seen(second))
    assert sorted(one) == sorted(other) == sorted(ids)


async def test_another_consumer_that_stays_keeps_a_scan_only_for_a_while(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadletters, "OTHERS_END_WITHIN_S", 0.2)
    await fill(connection, 10)
    channel = await connection.channel(confirms=False)
    await channel.basic_qos(prefetch_count=4)
    await channel.basic_consume(QUEUE, _leave)
    await until(lambda: holds(connection, 6))
    assert len(await seen(connection)) == 6


async def _leave(_: object) -> None:
    pass


async def test_an_error_of_the_reader_is_raised_and_nothing_is_lost(connection: Connection) -> None:
    class Fails(Seen):
        def keeps(self, message: Message, tag: int) -> bool:
            raise ValueError("unreadable")

    await fill(connection, 5)
    with pytest.raises(ValueError, match="unreadable"):
        async with scanned(connection, QUEUE, Fails):
            pass
    await until(lambda: holds(connection, 5))


async def test_held_letters_come_with_all_their_copies_also_those_behind_a_full_batch(connection: Connection) -> None:
    publisher = Publisher(connection, tracing=None)
    for id in ("m-0", "m-1", "other", "m-0", "m-2", "m-0"):
        await publisher.publish(Message(body=b"{}", message_id=id), exchange="", routing_key=QUEUE)
    await until(lambda: holds(connection, 6))
    keys = {deadletters.DeadLetter(Message(body=b"{}", message_id=f"m-{number}")).key for number in range(3)}
    found: list[str] = []
    async for scan in deadletters.held(connection, QUEUE, keys, most=2):
        found += [letter.id for _, letter in scan.reader.held]
        await scan.remove_all()
    assert sorted(found) == ["m-0", "m-0", "m-0", "m-1", "m-2"]
    assert await seen(connection) == ["other"]


async def test_what_was_removed_does_not_come_back_when_the_channel_closes(connection: Connection) -> None:
    await fill(connection, 1000)
    async with scanned(connection, QUEUE, lambda: Seen(nth=2)) as scan:
        await scan.remove_all()
    await until(lambda: holds(connection, 500))
    assert [id for id in await seen(connection) if int(id.removeprefix("m-")) % 2] == []


HEADERS = {"text": "x", "number": 5, "flag": True, "double": 1.5, "list": [1, "a"], "raw": b"\xff", "none": None}


async def test_an_exported_line_makes_an_equal_message(connection: Connection) -> None:
    publisher, lines = Publisher(connection, tracing=None), list[bytes]()

    class Lines(Seen):
        def keeps(self, message: Message, tag: int) -> bool:
            lines.append(line_of(message))
            return True

    sent = [
        Message(body=body, message_id=f"m-{number}", headers=HEADERS, priority=3, reply_to="q", timestamp_s=5)
        for number, body in enumerate((b'{"prompt":  "\xc3\xa9"}', b"\xff\x00", b"plain", b""))
    ]
    for message in sent:
        await publisher.publish(message, exchange="", routing_key=QUEUE)
    for _ in range(2):
        lines.clear()
        async with scanned(connection, QUEUE, Lines) as scan:
            for tag in range(1, len(sent) + 1):
                await scan.remove(tag)
        assert len(lines) == len(sent)
        for line, message in zip(lines, sent, strict=True):
            read = message_of_line(line)
            assert (read.body, read.message_id, read.priority) == (message.body, message.message_id, 3)
            await publisher.publish(read, exchange="", routing_key=QUEUE)
    assert b'"prompt\\":  ' in lines[0], "the body is as it was, to the byte"
    headers = message_of_line(lines[0]).headers
    assert {name: headers[name] for name in ("text", "number", "flag")} == {"text": "x", "number": 5, "flag": True}
    assert headers["double"][:1] == b"d"
    assert headers["raw"] == b"S\x00\x00\x00\x01\xff"
