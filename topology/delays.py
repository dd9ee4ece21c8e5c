"""The delay cascade: any delay from 100 ms to a year as a chain of dead-letter hops, with no plugin and no timer.

Level k has a headers exchange and a wait queue of the same name; the queue holds a message for 100 ms * 2^k. A delay is
a number of 100 ms units, and its binary digits say at which levels the message waits: the header `lane-dKK` is true to
wait at level KK, and false to skip this level. Each level passes the message to the next lower level, and the last one
passes it to `lane.due`. A message enters at the level of the highest bit that is set.

    700 ms = 7 units = 111b:  lane.delay.02 (400 ms) → lane.delay.01 (200 ms) → lane.delay.00 (100 ms) → lane.due
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lanekeeper.contract.names import Names

LEVELS: Final = 29
"""Enough for a delay of a year."""
UNIT_MS: Final = 100
MAX_DELAY_MS: Final = 365 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Hop:
    """Where to publish a delayed message, and the headers that it needs besides its own."""

    exchange: str
    headers: Mapping[str, bool]
    """For each level up to the one where the message enters, lowest first, whether it waits there. No bit may be
    absent: without it, the level's exchange routes the message to `lane.fallen`."""

    @property
    def delay_ms(self) -> int:
        return sum(wait_ms(level) for level, waits in enumerate(self.headers.values()) if waits)


def hop(delay_ms: int, names: Names) -> Hop:
    """Compute where to publish a message that must reach its due queue after `delay_ms`, rounded up to 100 ms. Raises
    ValueError for more than a year."""
    if delay_ms > MAX_DELAY_MS:
        raise ValueError(f"a delay of {delay_ms} ms is longer than a year ({MAX_DELAY_MS} ms)")
    units = -(-max(delay_ms, 0) // UNIT_MS)
    entry = max(units.bit_length() - 1, 0)
    return Hop(names.delay(entry), {names.delay_bit(level): bool(units >> level & 1) for level in range(entry + 1)})


def wait_ms(level: int) -> int:
    """How long a message waits at a level."""
    return UNIT_MS << level
