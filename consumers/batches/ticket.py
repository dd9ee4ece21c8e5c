"""A ticket: the message that stands for the requests of one provider batch, from their gathering until the last of them
went back to its lane. It carries the requests whole, so that nothing but the broker need remember them."""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from consumers.state.base import Identity
from lanekeeper.amqp.tolerant import encoded, message_from
from lanekeeper.contract.messages import Headers, Message
from lanekeeper.contract.names import ANTHROPIC_BETA, ANTHROPIC_MESSAGES
from topology.codec.headers import provider_headers_json

CONTENT_TYPE: Final = "application/octet-stream"
AT_MOST_BYTES: Final = 4 * 1024 * 1024
"""How large a ticket may be when it is packed."""
_TIMES: Final = 8
"""What packs better than this counts as if it did not: a ticket is unpacked in memory."""
_UNPACKED_AT_MOST: Final = 2 * _TIMES * AT_MOST_BYTES
_LENGTH: Final = struct.Struct(">I")
_GZIP: Final = 16 + zlib.MAX_WBITS
_QUICK: Final = 1
_FLUSHED_EACH: Final = 64 * 1024
"""After so many bytes the compressor's output is asked for, so that the size is known."""


class TicketStage(StrEnum):
    """How far a ticket has come."""

    GATHERED = "gathered"
    ADOPTING = "adopting"
    """Its batch may have been created, and which it is will be known when one of `candidates` has ended."""
    SUBMITTED = "submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketItem:
    """One request of a ticket."""

    number: int
    """Its place in the ticket as it was gathered; it stays when others leave the ticket."""
    message: Message
    """As its lane gets it back: the requester's headers (`headers.carried`), and those of `hop_headers`."""
    routing_key: str
    identity: Identity
    deadline_ms: int
    params: bytes
    """What the provider gets: the JSON of a call."""
    tokens: int = 0
    """How many it is expected to use."""

    @property
    def lane(self) -> str:
        return self.routing_key.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The requests of one batch."""

    id: str
    """Hex. The ids of the batch's requests begin with it. If the ticket was split, its parts' ids begin with it too."""
    lane: str
    stage: TicketStage = TicketStage.GATHERED
    account: str
    provider: str
    model: str
    headers: str = ""
    """The `anthropic-*` headers of its requests (`BatchHop.headers`)."""
    dialect: str = ANTHROPIC_MESSAGES
    gathered_ms: int
    batch_id: str = ""
    candidates: tuple[str, ...] = ()
    requests: int = 0
    """How many its batch has; 0: it was not submitted yet, as far as is known."""
    polls: int = 0
    returned: tuple[int, ...] = ()
    """The numbers of those that went back to their lanes with their results, before reading the others failed."""
    items: tuple[TicketItem, ...] = ()
    """None: all have left, and it is only counted what the batch has cost."""

    def custom_id(self, item: TicketItem) -> str:
        return f"{self.id}-{item.number}"


class Packing:
    """Packs items one by one; `size`, never less than the bytes that they take so far, tells when a ticket is full."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(_QUICK, zlib.DEFLATED, _GZIP)
        self._packed = bytearray()
        self._added = self._unflushed = 0

    @property
    def size(self) -> int:
        return max(len(self._packed) + self._unflushed + 64, self._added // _TIMES)

    def add(self, item: TicketItem) -> None:
        record = _record(item)
        self._packed += self._compressor.compress(record)
        self._added += len(record)
        self._unflushed += len(record)
        if self._unflushed >= _FLUSHED_EACH:
            self._packed += self._compressor.flush(zlib.Z_SYNC_FLUSH)
            self._unflushed = 0

    def finish(self) -> bytes:
        self._packed += self._compressor.flush()
        return bytes(self._packed)


def pack(ticket: Ticket, items: bytes | None = None) -> bytes:
    """The body of a ticket's message. `items`: the ticket's items, if they are packed already (`Packing`,
    `items_in`)."""
    if items is None:
        packing = Packing()
        for item in ticket.items:
            packing.add(item)
        items = packing.finish()
    fields = {name: getattr(ticket, name) for name in _HEAD}
    if ticket.items and ticket.items[0].lane == ticket.lane:  # they say it
        del fields["lane"]
    if ticket.dialect == ANTHROPIC_MESSAGES:
        del fields["dialect"]
    # 0.4.0 knows no lane, headers, dialect and returned: its workers can read a ticket that needs none of them
    head = json.dumps({name: value for name, value in fields.items() if value or name not in _SINCE_0_5}).encode()
    return _LENGTH.pack(len(head)) + head + items


def ticket_message(ticket: Ticket, packed: bytes, headers: Mapping[str, Any] | None = None) -> Message:
    """The message of a packed ticket."""
    return Message(body=packed, headers=headers or {}, content_type=CONTENT_TYPE, message_id=ticket.id)


def items_in(packed: bytes) -> bytes:
    """The packed items of a packed ticket."""
    return packed[_LENGTH.size + _LENGTH.unpack_from(packed)[0] :]


def ticket_bytes(message: Message) -> int:
    """How many bytes a ticket takes when it is unpacked: gzip says so at its end."""
    body = message.body
    return len(body) + min(int.from_bytes(body[-4:], "little"), _UNPACKED_AT_MOST)


class UnreadTicket(ValueError):
    """It is a ticket: another version may be able to read it."""


def unpack(packed: bytes) -> Ticket:
    """Raises ValueError if these bytes are no ticket, UnreadTicket if they are one that this version cannot read."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(packed)[0]
        head: dict[str, Any] = dict(json.loads(packed[_LENGTH.size : end]))
    except (struct.error, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a ticket: {type(error).__name__}") from error
    try:
        unpacker = zlib.decompressobj(wbits=_GZIP)
        raw = unpacker.decompress(packed[end:], _UNPACKED_AT_MOST)
        if not unpacker.eof:
            raise ValueError
        if beta := head.pop("beta", ""):  # of an earlier version
            head["headers"] = provider_headers_json({ANTHROPIC_BETA: beta})
        items, lists = tuple(_items(raw)), {name: tuple(head.get(name, ())) for name in ("candidates", "returned")}
        head |= {"stage": TicketStage(head["stage"]), **lists}
        if items and "lane" not in head:
            head["lane"] = items[0].lane
        return Ticket(**head, items=items)
    except (struct.error, zlib.error, TypeError, KeyError, IndexError, ValueError, RecursionError) as error:
        raise UnreadTicket(f"not a ticket that this version reads: {type(error).__name__}") from error


def parts(items: Iterable[TicketItem], *, at_most_bytes: int = AT_MOST_BYTES) -> Iterator[tuple[TicketItem, ...]]:
    """Divide items so that each part fits into a ticket."""
    packing, part = Packing(), list[TicketItem]()
    for item in items:
        packing.add(item)
        if part and packing.size > at_most_bytes:
            yield tuple(part)
            packing, part = Packing(), []
            packing.add(item)
        part.append(item)
    if part:
        yield tuple(part)


_HEAD: Final = (
    "id", "lane", "stage", "account", "provider", "model", "headers", "dialect", "gathered_ms", "batch_id",
    "candidates", "requests", "polls", "returned",
)  # fmt: skip
_SINCE_0_5: Final = frozenset({"headers", "returned"})


def _record(item: TicketItem) -> bytes:
    message, headers = item.message, item.message.headers
    facts = json.dumps(
        [item.number, item.routing_key, item.identity.tenant, item.identity.id, item.deadline_ms, item.tokens]
    ).encode()
    if isinstance(headers, Headers):  # the requester's own types
        message = Message(**{name: getattr(message, name) for name in _PROPERTIES}, body=b"")
        message.headers = {name: headers.encoded(name) for name in headers}
    # most are sent to the provider as they were published
    params = item.params if item.params != item.message.body else b""
    pieces = (facts, encoded(message), item.message.body, params)
    return b"".join(_LENGTH.pack(len(piece)) + piece for piece in pieces)


_PROPERTIES: Final = (
    "content_type", "content_encoding", "message_id", "correlation_id", "reply_to", "priority", "type", "expiration",
    "timestamp_s", "user_id", "app_id", "persistent",
)  # fmt: skip


def _items(raw: bytes) -> Iterator[TicketItem]:
    at = 0
    while at < len(raw):
        pieces = []
        for _ in range(4):
            (length,) = _LENGTH.unpack_from(raw, at)
            begin = at + _LENGTH.size
            at = begin + length
            if at > len(raw):
                raise ValueError
            pieces.append(raw[begin:at])
        facts, properties, body, params = pieces
        number, routing_key, tenant, id, deadline_ms, tokens = json.loads(facts)
        yield TicketItem(
            number=number,
            message=message_from(properties, body, exchange="", routing_key=routing_key),
            routing_key=routing_key,
            identity=Identity(tenant, id),
            deadline_ms=deadline_ms,
            params=params or body,
            tokens=tokens,
        )
