"""The delay cascade: any delay from 100 ms to a year as a chain of dead-letter hops, with no plugin and no timer.

Level k has a headers exchange and a wait queue of the same name; the queue holds a message for 100 ms * 2^k. A delay is
a number of 100 ms units, and its binary digits say at which levels the message waits: the header `lane-dKK` is true to
wait at level KK, and false to skip this level. Each level passes the message to the next lower level, and the last one
passes it to `lane.due`. A message enters at the level of the highest bit that is set, because passing through an
exchange costs time (when each message passed through all 28 higher exchanges, the throughput was 63 % lower). No wait
queue sets a dead-letter routing key, so the message keeps its own key, by which `lane.due` routes it to its lane's due
queue.

    700 ms = 7 units = 111b:  lane.delay.02 (400 ms) → lane.delay.01 (200 ms) → lane.delay.00 (100 ms) → lane.due
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lanekeeper.contract.names import Names
from topology.model import QUORUM, Arguments, Binding, Exchange, Queue, Topology

LEVELS: Final = 29
"""The number of wait queues in the delay cascade (the chain of queues that hold delayed messages): enough for a delay
of a year."""
UNIT_MS: Final = 100
"""The unit of delays, in ms: each delay is rounded up to a multiple of it."""
MAX_DELAY_MS: Final = 365 * 24 * 3600 * 1000
"""The longest delay and deadline that a request's headers may set, in ms: a year."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The first step of a delayed message into the wait queues: the exchange to which it is published, and the headers
    that it needs for the delay in addition to its own."""

    exchange: str
    headers: Mapping[str, bool]
    """The delay bits: for each level up to the one where the message enters, lowest first, whether it waits at that
    level. No bit may be absent, because the exchange of a level whose bit is absent routes the message to
    `lane.fallen`."""

    @property
    def delay_ms(self) -> int:
        """For how many milliseconds the message is delayed: the requested delay, rounded up to 100 ms."""
        return sum(wait_ms(level) for level, waits in enumerate(self.headers.values()) if waits)


def hop(delay_ms: int, names: Names) -> Hop:
    """Compute where to publish a message that must reach its due queue after `delay_ms`, rounded up to 100 ms. Zero or
    less means no delay. Raises ValueError for more than a year.
    """
    if delay_ms > MAX_DELAY_MS:
        raise ValueError(f"a delay of {delay_ms} ms is longer than a year ({MAX_DELAY_MS} ms)")
    units = -(-max(delay_ms, 0) // UNIT_MS)
    entry = max(units.bit_length() - 1, 0)
    return Hop(names.delay(entry), {names.delay_bit(level): bool(units >> level & 1) for level in range(entry + 1)})


def wait_ms(level: int) -> int:
    """How long a message waits in the wait queue of a level, in ms: 100 at level 0, and at each higher level twice as
    long as at the level below."""
    return UNIT_MS << level


def cascade(names: Names) -> Topology:
    """The delay cascade. Each level has a headers exchange, a wait queue of the same name, and two bindings: a message
    whose delay bit is true goes to the wait queue, one whose bit is false to the exchange of the next lower level.

    - The alternate exchange of each level's exchange is `lane.fallen`. Without it, a message whose delay bit is absent
      could not leave the wait queue of the level above, and would block all messages behind it, of every lane
      (docs/facts.md, section 3).
    - The wait queues use at-least-once dead-lettering (which needs `reject-publish`) with every RabbitMQ version:
      without it, messages that expire while the broker is down are lost (640 of 680 in a test). They have no length
      limit, because each is the dead-letter target of the queue above it.
    - The delay bits are booleans. A number would get one AMQP type if the binding is declared over AMQP, and another if
      it is imported as a definition. The broker would then have two bindings, and neither way could remove the binding
      that the other way made.
    """
    exchanges: list[Exchange] = []
    queues: list[Queue] = []
    bindings: list[Binding] = []
    for level in range(LEVELS):
        name, bit = names.delay(level), names.delay_bit(level)
        next_lower = names.delay(level - 1) if level else names.due_exchange
        exchanges.append(Exchange(name, "headers", arguments={"alternate-exchange": names.fallen}))
        arguments: Arguments = {
            **QUORUM,
            "x-message-ttl": wait_ms(level),
            "x-dead-letter-exchange": next_lower,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        queues.append(Queue(name, arguments))
        bindings += (
            Binding(name, name, arguments={"x-match": "all", bit: True}),
            Binding(name, next_lower, destination_kind="exchange", arguments={"x-match": "all", bit: False}),
        )
    return Topology(tuple(exchanges), tuple(queues), tuple(bindings))
