import base64
import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from consumers.batches.ticket import (
    AT_MOST_BYTES,
    Ticket,
    TicketItem,
    TicketStage,
    UnreadTicket,
    pack,
    parts,
    unpack,
)
from consumers.state.base import Identity
from lanekeeper.amqp.tolerant import encoded, message_from, write_table
from lanekeeper.contract.messages import Headers, Message
from lanekeeper.contract.names import Names
from topology.codec.headers import carried


def ticket(*items: TicketItem, **fields: Any) -> Ticket:
    given: dict[str, Any] = {
        "lane": "batch",
        "account": "anthropic",
        "provider": "anthropic",
        "model": "claude-haiku-4-5",
        "gathered_ms": 1_790_000_000_000,
    }
    return Ticket(id="0" * 32, items=items, **given | fields)


def item(number: int = 0, *, body: bytes = b'{"prompt":"hi"}', params: bytes = b"", **fields: Any) -> TicketItem:
    return TicketItem(
        number=number,
        message=Message(body=body, message_id=f"id-{number}", **fields),
        routing_key="batch.shop.sum",
        identity=Identity("tenant", f"id-{number}"),
        deadline_ms=1_790_000_100_000,
        params=params or body,
        tokens=17,
    )


HEADERS: dict[str, Any] = {
    "integer": -5,
    "double": 1e300,
    "text": "größer",
    "flag": True,
    "nothing": None,
    "table": {"in": {"it": [1, "two", {"three": 3.0}]}},
    "decimal": Decimal("12.5"),
    "time": datetime(2026, 11, 26, tzinfo=UTC),
    "bytes": bytearray(b"\0\xff"),
    "not utf-8": b"\xff\xfe",
}
SHORT_TYPES = b"\x05small" + b"I\0\0\0\x07" + b"\x04tiny" + b"b\x05" + b"\x05float" + b"f\x3f\x80\0\0"


def received(headers: bytes) -> Message:
    """A message as the broker delivers it, with headers whose types our own code does not write."""
    properties = encoded(Message(body=b"", message_id="id-0", headers={"x": 1}))
    return message_from(properties.replace(write_table({"x": 1}), headers), b"body", exchange="e", routing_key="k")


def test_a_ticket_is_the_same_after_packing() -> None:
    full = ticket(
        item(0, headers=HEADERS, content_type="application/json", correlation_id="c", reply_to="r", priority=3),
        item(1, headers={}, type="t", timestamp_s=1_790_000_000.0, app_id="a", persistent=True, params=b'{"other":1}'),
        stage=TicketStage.ADOPTING,
        headers="a,b",
        dialect="openai.chat",
        batch_id="msgbatch_1",
        candidates=("x", "y"),
        requests=2,
        polls=4,
    )
    found = unpack(pack(full))
    assert replace(found, items=()) == replace(full, items=())
    assert [replace(each, message=Message(body=b"")) for each in found.items] == [
        replace(each, message=Message(body=b"")) for each in full.items
    ]
    for before, after in zip(full.items, found.items, strict=True):
        assert replace(after.message, routing_key="", headers={}) == replace(before.message, headers={})
        assert encoded(after.message) == encoded(before.message)


def test_headers_keep_the_types_that_their_requester_gave_them() -> None:
    headers = len(SHORT_TYPES).to_bytes(4, "big") + SHORT_TYPES
    message = received(headers)
    as_carried = replace(message, headers={**carried(message.headers, of=Names()), "x-lane-attempt": 2})
    for given in (message, as_carried):
        found = unpack(pack(ticket(replace(item(), message=given)))).items[0].message
        assert SHORT_TYPES in encoded(replace(found, headers=carried(found.headers, of=Names())))
        assert found.headers["small"] == 7
    assert found.headers["x-lane-attempt"] == 2
    assert isinstance(found.headers, Headers)
    assert found.headers.encoded("x-lane-attempt") == b"l" + (2).to_bytes(8, "big")


def test_a_body_of_any_bytes_and_its_params_come_back() -> None:
    body = random.Random(1).randbytes(300_000)
    found = unpack(pack(ticket(item(body=body, content_encoding="gzip", params=b'{"x":1}'))))
    assert found.items[0].message.body == body
    assert found.items[0].message.content_encoding == "gzip"
    assert found.items[0].params == b'{"x":1}'


@pytest.mark.slow
def test_items_are_divided_into_tickets_that_the_broker_takes() -> None:
    rng = random.Random(3)
    given = [item(number, body=rng.randbytes(700_000)) for number in range(20)]
    found = list(parts(given))
    assert [each.number for part in found for each in part] == list(range(20))
    assert len(found) == 4
    assert all(len(pack(ticket(*part))) <= AT_MOST_BYTES for part in found)


@pytest.mark.slow
def test_what_packs_very_well_is_divided_too_because_it_is_unpacked_in_memory() -> None:
    given = [item(number, body=b" " * 8_000_000) for number in range(9)]
    assert [len(part) for part in parts(given)] == [4, 4, 1]


@pytest.mark.parametrize("cut", [0, 3, 50, 300, -1])
def test_what_is_no_ticket_is_an_error_of_one_kind(cut: int) -> None:
    packed = pack(ticket(item(0, body=random.Random(4).randbytes(5000))))
    with pytest.raises(ValueError, match="not a ticket") as error:
        unpack(packed[:cut])
    assert isinstance(error.value, UnreadTicket) == (cut in (300, -1))  # else not even its head can be read


def test_the_ids_of_a_batch_s_requests_fit_the_provider_s_rules() -> None:
    full = ticket(item(499))
    assert full.custom_id(full.items[0]) == "0" * 32 + "-499"
    assert len(full.custom_id(item(99_999))) <= 64


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_ticket_that_was_cut_off_is_one_that_this_version_cannot_read(cut: int) -> None:
    packed = pack(ticket(item()))
    assert unpack(packed).items[0].params == item().params
    with pytest.raises(UnreadTicket):
        unpack(packed[:-cut])


OF_0_4_0 = base64.b64decode(
    "AAAArHsiaWQiOiAiYWIiLCAic3RhZ2UiOiAiZ2F0aGVyZWQiLCAiYWNjb3VudCI6ICJhIiwgInByb3ZpZGVyIjogInAiLCAibW9k"
    "ZWwiOiAibSIsICJiZXRhIjogImIiLCAiZ2F0aGVyZWRfbXMiOiAxLCAiYmF0Y2hfaWQiOiAiIiwgImNhbmRpZGF0ZXMiOiBbXSwg"
    "InJlcXVlc3RzIjogMCwgInBvbGxzIjogMH0fiwgAAAAAAAQDY2BgUI020FFQSkosSc7QSywo0CtJLM5WAoqUgIhMIGGqo2Aey8DA"
    "4LCvQQCoICczObEkMz9PP6s4Pw8orMhboZuTmJeqW5Kal5hXEgwUYixhzi/PywGyQICdiZkxmbGIMRPI1qpWys1PSc1RslLKVdJR"
    "yk2siC/Jz07NK1ayMgRyU4uLE9NTgZzo2FqQVgCBoHYznwAAAA=="
)
"""A ticket with one request, as 0.4.0 packed it."""


def test_a_ticket_of_the_version_before_is_read() -> None:
    found = unpack(OF_0_4_0)
    (only,) = found.items

    assert (found.lane, found.headers, found.returned) == ("batch", '{"anthropic-beta": "b"}', ())
    assert (only.identity, only.message.headers) == (Identity("t", "i"), {"x-lane-tenant": "t", "own": 7})
    assert (only.params, only.message.reply_to, only.message.priority) == (only.message.body, "r", 3)


def test_a_ticket_without_what_is_new_says_only_what_the_version_before_reads() -> None:
    def head(packed: bytes) -> set[str]:
        end = 4 + int.from_bytes(packed[:4], "big")
        return set(json.loads(packed[4:end]))

    new = {"lane", "headers", "returned"}
    assert head(pack(ticket(item()))) == head(OF_0_4_0) - {"beta"}
    assert head(pack(ticket(item(), headers="h", returned=(0,)))) & new == {"headers", "returned"}
    assert head(pack(ticket())) & new == {"lane"}


def test_a_head_that_is_nested_too_deep_is_no_ticket() -> None:
    head = b"[" * 100_000
    with pytest.raises(ValueError, match="not a ticket"):
        unpack(len(head).to_bytes(4, "big") + head)
