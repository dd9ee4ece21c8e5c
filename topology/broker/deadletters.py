"""Reads `lane.dead`, the queue of dead letters: all in one pass (`scanned`), each as a value (`DeadLetter`) or as JSON.

AMQP can only look at a message by taking it. A scan takes all letters without acknowledging them, keeps in memory only
what its caller keeps, and then gives them back: 100,000 letters take about six seconds. Meanwhile nobody else sees
them. So a scan waits for another one to end, and two that begin together both give way for a random time. What a scan
holds for longer, to publish it again, is removed when that is confirmed, and otherwise returns when its channel closes,
also if its process dies. RabbitMQ counts these deliveries, and `lane.dead` has no delivery limit. Letters keep their
order on RabbitMQ 4; on 3.x those that arrive during a scan come before the others.
"""

import asyncio
import base64
import json
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Final, Generic, Protocol, TypeVar

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from lanekeeper.amqp.connection import Connection, depth
from lanekeeper.amqp.driver import RPC_TIMEOUT_S, close, delivered, fetch, translate_broker_errors
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import UNREADABLE, Depth, Encoded, Headers, Message
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable
from lanekeeper.telemetry.tracing import context_in
from topology.codec.decoding import app_of
from topology.lanes import MIB

WINDOW: Final = 5000
"""How many letters one consumer takes; then another one joins it on the same channel."""
OTHERS_END_WITHIN_S: Final = 10.0
"""After that long, a scan begins although there are other consumers, and sees what these have not taken. RabbitMQ also
counts one that was cancelled and still holds messages, such as that of a replay."""
ARRIVED_WITHIN_S: Final = 0.5
SILENT: Final = 20
"""How often nothing arrives within this time, although the queue has messages, until a scan gives up."""
LOOKS: Final = 20
LOOK_PAUSE_S: Final = 0.01
"""How often, and with which pause, a scan looks whether the queue has what it gave back."""
HELD_BYTES: Final = 32 * MIB
TRIES: Final = 5
AGAIN_AFTER_S: Final = 0.5
REPLAYS_SHOWN: Final = 999
LAST_MS: Final = 253_402_300_799_000
"""The last second of the year 9999; a time in another zone may be later."""
_DETAIL: Final = 1000
_QUOTED = re.compile(r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`""")
_NUMBERED = re.compile(r"[\w.:-]*\d[\w.:-]*")
_MODEL = re.compile(r"(?<=not_found_error: model: )\S+")  # it is not quoted, and has a number or none
_SPACE = re.compile(r"\s+")


def cause_of(code: str, detail: str) -> str:
    """A short fingerprint of an error: equal for details that differ only in numbers, ids and quoted values."""
    return blake2b(f"{code} {normalised(detail)}".encode(errors="replace"), digest_size=4).hexdigest()


def normalised(detail: str) -> str:
    """An error's text with `#` in place of numbers, ids, quoted values and unknown models."""
    return _SPACE.sub(" ", _NUMBERED.sub("#", _MODEL.sub("#", _QUOTED.sub("#", detail[:_DETAIL])))).strip()


@dataclass(frozen=True)
class DeadLetter:
    """A message of `lane.dead`. Whoever may write there can put anything into it, so every field has a value also if
    the message is no request, or cannot be read."""

    message: Message

    def _text(self, header: str) -> str:
        value = self.message.headers.get(header)
        return value if isinstance(value, str) else ""

    @cached_property
    def id(self) -> str:
        message = self.message
        return message.message_id or blake2b(message.body + message.routing_key.encode(), digest_size=8).hexdigest()

    @property
    def code(self) -> str:
        return self._text(n.DEAD_CODE) or ("unreadable" if UNREADABLE in self.message.headers else "unknown")

    @property
    def detail(self) -> str:
        return self._text(n.DEAD_DETAIL) or str(self.message.headers.get(UNREADABLE, ""))

    @cached_property
    def cause(self) -> str:
        return cause_of(self.code, self.detail)

    @property
    def routing_key(self) -> str:
        return self._text(n.ROUTING_KEY) or self.message.routing_key

    @property
    def lane(self) -> str:
        return self.routing_key.partition(".")[0]

    @property
    def app(self) -> str:
        return app_of(self.routing_key)

    @property
    def tenant(self) -> str:
        """Empty if it is unknown. Workers have checked it (`consumers/settle.py`)."""
        return self._text(n.TENANT) or self._text(n.USER_ID)

    @property
    def at(self) -> str:
        return self._text(n.DEAD_AT)

    @cached_property
    def at_ms(self) -> int:
        try:
            return min(max(0, round(1000 * datetime.fromisoformat(self.at).timestamp())), LAST_MS)
        except (ValueError, OverflowError):
            return 0

    @property
    def attempts(self) -> int:
        return self._number(n.ATTEMPT)

    @property
    def replays(self) -> int:
        """How often it was published again before; above 0, it is a relapse."""
        return min(self._number(n.REPLAYS), REPLAYS_SHOWN)

    @property
    def replayed_at(self) -> str:
        return self._text(n.REPLAYED_AT)

    @property
    def errors(self) -> tuple[str, ...]:
        errors = self.message.headers.get(n.ERRORS)
        return tuple(map(str, errors)) if isinstance(errors, list) else ()

    @property
    def trace_id(self) -> str | None:
        found = context_in(self.message.headers)
        return None if found is None else f"{found.trace_id:032x}"

    @property
    def user_id(self) -> str:
        return self._text(n.USER_ID)

    @cached_property
    def body_bytes(self) -> int:
        return len(self.message.body)

    def without_body(self) -> "DeadLetter":
        assert self.id
        assert self.key
        assert self.body_bytes >= 0
        self.message.body = b""
        return self

    @cached_property
    def key(self) -> int:
        """Equal for copies of one letter, and different for two ends of one request. A letter is there twice if its
        worker died between publishing it and acknowledging its request."""
        named = f"{self.tenant}\0{self.id}\0{self.at}\0".encode(errors="replace")
        return int.from_bytes(blake2b(named + self.message.body, digest_size=7).digest(), "big")

    def _number(self, header: str) -> int:
        value = self.message.headers.get(header)
        return value if type(value) is int and value > 0 else 0


# ---- reading the queue -----------------------------------------------------------------------------------------------


class ScanReader(Protocol):
    """What a scan shows its messages to."""

    @property
    def is_enough(self) -> bool: ...

    def keeps(self, message: Message, tag: int) -> bool: ...


R = TypeVar("R", bound=ScanReader)


class Scan(Generic[R]):
    """One pass over a queue. What `reader` keeps stays with it until `remove`, or until its `async with` block ends."""

    def __init__(self, channel: Channel, queue: str, reader: R) -> None:
        self.reader = reader
        self._channel = channel
        self._queue = queue
        self._kept: set[int] = set()
        self._seen = 0
        self._changed = asyncio.Event()
        self._failed: Exception | None = None

    async def take_all(self, *, gives_way: bool) -> bool:
        """False if another consumer reads the queue and this one `gives_way`."""
        self._channel.closing.add_done_callback(lambda _: self._changed.set())
        await self._channel.basic_qos(prefetch_count=WINDOW, timeout=RPC_TIMEOUT_S)
        own: list[str] = []  # none is cancelled before the end, so that others always see one
        while True:
            found = await self._look()
            if found.consumers > len(own) and gives_way:
                return False
            if not found.ready or self.reader.is_enough or self._failed is not None:
                break
            expected = self._seen + min(found.ready, WINDOW)
            consuming = await self._channel.basic_consume(self._queue, self._on_delivery, timeout=RPC_TIMEOUT_S)
            own.append(consuming.consumer_tag or "")
            await self._arrived(expected)
        for tag in own:
            await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT_S)
        if self._failed is not None:
            raise self._failed
        return True

    async def give_back(self) -> None:
        """Return all messages that are not kept, in the order in which they came, and wait until others see them."""
        for tag in range(1, self._seen + 1):
            if tag not in self._kept:
                await self._channel.basic_nack(tag, requeue=True, wait=False)
        for _ in range(LOOKS):
            if (await self._look()).ready >= self._seen - len(self._kept):
                return
            await asyncio.sleep(LOOK_PAUSE_S)

    async def remove(self, tag: int) -> None:
        with translate_broker_errors(f"channel lost before a message of {self._queue} was removed"):
            await self._channel.basic_ack(tag, wait=True)
        self._kept.discard(tag)

    async def remove_all(self) -> None:
        """Remove all that is kept. More than 32 acknowledgements wait in the broker's channel, and if it is closed
        meanwhile, a quorum queue forgets them: of 500 letters up to 151 came back. A fetch is answered only when the
        queue has all that it was sent before, and then the channel sends the rest."""
        if not self._kept:
            return
        with translate_broker_errors(f"channel lost before messages of {self._queue} were removed"):
            for tag in sorted(self._kept):
                await self._channel.basic_ack(tag, wait=False)
            if (found := await fetch(self._channel, self._queue)) is not None:
                await self._channel.basic_nack(found[0].tag, requeue=True, wait=False)
            await self._look()
        self._kept.clear()

    async def _look(self) -> Depth:
        return await depth(self._channel, self._queue)

    async def _arrived(self, count: int) -> None:
        silent = 0
        while self._seen < count and not (self.reader.is_enough or self._failed or self._channel.is_closed):
            before = self._seen
            with suppress(TimeoutError):
                async with asyncio.timeout(ARRIVED_WITHIN_S):
                    await self._changed.wait()
            self._changed.clear()
            silent = 0 if self._seen > before else silent + 1
            if silent and not (await self._look()).ready:
                return
            if silent > SILENT:
                raise BrokerUnreachable(f"{self._queue}: the broker says that it has messages, and delivers none")

    async def _on_delivery(self, found: DeliveredMessage) -> None:
        self._seen = found.delivery_tag or 0
        try:
            is_over = self.reader.is_enough or self._failed is not None
            if not is_over and self.reader.keeps(delivered(found).message, self._seen):
                self._kept.add(self._seen)
        except Exception as error:  # raised where the caller awaits, and not in a task of aiormq
            self._failed = error
        self._changed.set()


@asynccontextmanager
async def scanned(connection: Connection, queue: str, begin: Callable[[], R]) -> AsyncIterator[Scan[R]]:
    """A finished scan. `begin` makes its reader, and another one if it has to give way and begin again. Raises
    AccessRefused, BrokerUnreachable, TopologyMismatch, and what the reader raises."""
    loop = asyncio.get_running_loop()
    end = loop.time() + OTHERS_END_WITHIN_S
    while True:
        channel = await connection.channel(confirms=False)
        scan = Scan(channel, queue, begin())
        try:
            with translate_broker_errors(f"cannot read {queue!r}"):
                is_done = await scan.take_all(gives_way=loop.time() < end)
                if is_done:
                    await scan.give_back()
            if is_done:
                yield scan
                return
        except AccessRefused as error:
            raise AccessRefused(f"{error}; the exported role `operator` may read it") from error
        finally:
            await close(channel)
        await asyncio.sleep(random.uniform(0.02, 0.3))


@dataclass(slots=True)
class LetterBatch:
    """Keeps letters with these keys, at most `most`, and of not much more than `HELD_BYTES`."""

    keys: set[int]
    most: int
    held: list[tuple[int, DeadLetter]] = field(default_factory=list)
    bytes: int = 0

    @property
    def is_enough(self) -> bool:
        return len(self.held) >= self.most or self.bytes >= HELD_BYTES

    def keeps(self, message: Message, tag: int) -> bool:
        letter = DeadLetter(message)
        if letter.key not in self.keys:
            return False
        self.held.append((tag, letter))
        self.bytes += letter.body_bytes
        return True


async def held(
    connection: Connection, queue: str, keys: set[int], *, most: int
) -> AsyncGenerator[Scan[LetterBatch], None]:
    """The letters with these keys, and all their copies, in batches of `most`. Each batch is held until it is removed,
    or the next one is begun; meanwhile others do not see it."""
    left, is_cut, tries = set(keys), False, 0
    while (left or is_cut) and tries < TRIES:
        async with scanned(connection, queue, partial(LetterBatch, keys, most)) as scan:
            yield scan
            found = {letter.key for _, letter in scan.reader.held}
            is_cut = scan.reader.is_enough  # copies may be behind it
        left -= found
        tries = 0 if found else tries + 1
        if left and not found:
            await asyncio.sleep(AGAIN_AFTER_S)


# ---- lines of JSON ---------------------------------------------------------------------------------------------------

_WRITTEN = (
    "message_id", "routing_key", "content_type", "content_encoding", "reply_to", "correlation_id", "priority", "type",
    "app_id", "timestamp_s",
)  # fmt: skip
_PLAIN: Final = frozenset(b"Stl")
"""The AMQP types (string, boolean, 64-bit integer) that JSON's own types stand for."""
_AMQP: Final = "amqp"


def line_of(message: Message) -> bytes:
    """A message as one line of JSON, from which `message_of_line` makes an equal one. The body is text if it is JSON in
    UTF-8, else base64; so are headers of types that JSON has not."""
    line = {name: value for name in _WRITTEN if (value := getattr(message, name)) is not None}
    line["headers"] = {name: _header(message.headers, name) for name in message.headers}
    try:
        json.loads(message.body)
        line["body"] = message.body.decode()
    except (ValueError, RecursionError):
        line["body_base64"] = base64.b64encode(message.body).decode()
    return json.dumps(line, default=str).encode() + b"\n"


def _header(headers: Any, name: str) -> object:
    value = headers.encoded(name) if isinstance(headers, Headers) else headers[name]
    if isinstance(value, Encoded) and (value[0] not in _PLAIN or isinstance(headers[name], bytes)):
        return {_AMQP: base64.b64encode(value).decode()}
    return headers[name]


def message_of_line(line: bytes | str) -> Message:
    """Raises ValueError for what is no line of `line_of`."""
    try:
        found: dict[str, Any] = json.loads(line)
        body, packed, headers = found.pop("body", None), found.pop("body_base64", None), found.pop("headers", {})
        if not found.keys() <= set(_WRITTEN) or (body is None) is (packed is None):
            raise ValueError("other fields than an exported dead letter")
        texts = [found.get(name) for name in _WRITTEN if name not in ("priority", "timestamp_s")]
        numbers = [found.get(name) for name in ("priority", "timestamp_s")]
        is_typed = all(each is None or isinstance(each, str) for each in texts) and all(
            each is None or type(each) in (int, float) for each in numbers
        )
        if not is_typed or not found.get("routing_key"):
            raise ValueError("fields of other types than an exported dead letter")
        return Message(
            body=base64.b64decode(packed, validate=True) if body is None else body.encode(),
            headers={name: _imported(value) for name, value in headers.items()},
            **found,
        )
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"no exported dead letter: {error}") from error


def _imported(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_AMQP}:
        return Encoded(base64.b64decode(value[_AMQP], validate=True))
    return value
