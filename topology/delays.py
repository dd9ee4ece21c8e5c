"""The delay cascade: any delay from 100 ms to a year as a chain of dead-letter hops, with no plugin and no timer.

Level k has a headers exchange and a wait queue of the same name; the queue holds a message for 100 ms * 2^k. A delay is
a number of 100 ms units. Its binary digits say where the message waits: the header `lane-dKK` is true to wait at level
KK, and false to skip it. A message enters at the highest bit that is set, because each exchange costs time (28 in a row
took 63 % of the rate). Each level passes it to the next lower one, the last to `lane.due`. No wait queue sets a
dead-letter routing key, so the message keeps its key, which leads it to its lane's due queue.

    700 ms = 7 units = 111b:  lane.delay.02 (400 ms) → lane.delay.01 (200 ms) → lane.delay.00 (100 ms) → lane.due
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from lanekeeper.contract.names import Names
from topology.model import Binding, Exchange, Queue, Value

LEVELS: Final = 29
UNIT_MS: Final = 100
MAX_DELAY_MS: Final = 365 * 24 * 3600 * 1000

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Hop:
    """Where a delayed message is published, and the headers that it needs in addition to its own."""

    exchange: str
    headers: Mapping[str, bool]
    """A bit for every level up to the entry, the lowest first, all present: a level without its bit routes to
    `lane.fallen`."""

    @property
    def delay_ms(self) -> int:
        """The delay that was asked for, rounded up to 100 ms."""
        return sum(wait_ms(level) for level, waits in enumerate(self.headers.values()) if waits)


def hop(delay_ms: int, names: Names) -> Hop:
    """How a message gets to its due queue in `delay_ms`, rounded up to 100 ms. Zero or less: at once.

    Raises ValueError beyond a year.
    """
    if delay_ms > MAX_DELAY_MS:
        raise ValueError(f"a delay of {delay_ms} ms is longer than a year ({MAX_DELAY_MS} ms)")
    units = -(-max(delay_ms, 0) // UNIT_MS)
    entry = max(units.bit_length() - 1, 0)
    return Hop(names.delay(entry), {names.delay_bit(level): bool(units >> level & 1) for level in range(entry + 1)})


def strip_bits(headers: Mapping[str, _V], names: Names) -> dict[str, _V]:
    """`headers` without delay bits: bits of an earlier delay would lead the message to wrong levels."""
    bits = {names.delay_bit(level) for level in range(LEVELS)}
    return {key: value for key, value in headers.items() if key not in bits}


def wait_ms(level: int) -> int:
    """How long a message waits at a level."""
    return UNIT_MS << level


def next_exchange(level: int, names: Names) -> str:
    """Where a message goes after a level, whether it waited there or not."""
    return names.delay(level - 1) if level else names.due_exchange


def exchanges(names: Names) -> tuple[Exchange, ...]:
    """The headers exchanges of all levels.

    Each has `lane.fallen` as alternate exchange. Without it, a message with a missing bit would never leave the queue
    above and would block the delays of every lane behind it (docs/facts.md, section 3).
    """
    return tuple(
        Exchange(names.delay(level), "headers", arguments={"alternate-exchange": names.fallen})
        for level in range(LEVELS)
    )


def queues(names: Names, *, quorum: Mapping[str, Value]) -> tuple[Queue, ...]:
    """The wait queues of all levels; `quorum` are the arguments that every quorum queue of ours has.

    At-least-once dead-lettering (which needs reject-publish) on every version: without it, messages that expire while
    the broker is down are lost (measured: 640 of 680). No length limit, because each is the dead-letter target of the
    queue above.
    """
    return tuple(
        Queue(
            names.delay(level),
            {
                **quorum,
                "x-message-ttl": wait_ms(level),
                "x-dead-letter-exchange": next_exchange(level, names),
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            },
        )
        for level in range(LEVELS)
    )


def bindings(names: Names) -> tuple[Binding, ...]:
    """Per level: true to its wait queue, false to the next exchange.

    Booleans, because numbers get different types over AMQP and from imported definitions: the broker would keep two
    bindings, and neither client could remove the other's.
    """
    return tuple(
        binding
        for level in range(LEVELS)
        for binding in (
            Binding(names.delay(level), names.delay(level), "queue", "", _match(level, True, names)),
            Binding(names.delay(level), next_exchange(level, names), "exchange", "", _match(level, False, names)),
        )
    )


def _match(level: int, bit: bool, names: Names) -> dict[str, Value]:
    return {"x-match": "all", names.delay_bit(level): bit}
