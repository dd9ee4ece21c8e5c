"""Lanes: the classes of urgency, such as `critical` and `batch`. Each lane has its own intake queue (new requests), due
queue (retried and delayed requests), and slots in each worker; a worker runs one request at a time in each slot.

No other file has code for a particular lane: what differs by lane is a field of `LaneSpec`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How requests of a lane are gathered for the batches of its providers, which cost half and may take a day."""

    enabled: bool = False
    count: int = 500
    bytes: int = 8_000_000
    """A batch is complete with so many requests, with so many bytes of them, or when its first one has waited for
    `window_s`."""
    window_s: float = 20
    least_s: float = 7200
    """A request whose deadline is nearer runs live."""
    promote_s: float = 1800
    """So long before its deadline, a request leaves its batch and runs live."""
    first_poll_s: float = 30
    """A batch is looked at first after this time, then less and less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """The settings of one lane."""

    name: str
    rank: int
    """Lanes are ordered by it everywhere, the most urgent (the lowest rank) first; no two lanes share one."""
    slots: int
    slots_min: int | None = None
    slots_max: int | None = None
    target_wait_s: float = 10
    call_timeout_s: float
    deadline_s: float
    deadline_max_s: float
    max_attempts: int
    model: str
    max_tokens: int = 1024
    models: frozenset[str] | None = None
    anthropic_version: str | None = None
    """Of requests that state none. None: the provider's."""
    park_invalid: bool = True
    """Whether requests that are wrong, or that the provider refuses, are kept as dead letters."""
    max_length: int
    max_length_bytes: int = GIB
    gather_embeddings: int = 1
    """So many requests for embeddings become one call; 1: each is a call of its own."""
    gather_window_s: float = 0.045
    """At 200 a second a tenth of the calls is left (docs/performance.md)."""
    batches: BatchSpec = BatchSpec()
    side_queues: int = 8

    @property
    def due_slots(self) -> int:
        return max(1, self.slots // 4)

    @property
    def reserved_slots(self) -> int:
        return max(1, self.slots // 8) if self.slots_min is None else self.slots_min

    @property
    def most_slots(self) -> int:
        return 8 * self.slots if self.slots_max is None else self.slots_max

    @property
    def most_due_slots(self) -> int:
        return max(1, self.most_slots // 4)


CRITICAL = LaneSpec(
    name="critical",
    rank=10,
    slots=16,
    target_wait_s=1,  # a person waits for the answer
    call_timeout_s=60,
    deadline_s=120,
    deadline_max_s=3600,
    max_attempts=4,
    model="claude-sonnet-5-5",
    max_length=10_000,
)
NORMAL = LaneSpec(
    name="normal",
    rank=20,
    slots=8,
    target_wait_s=10,
    call_timeout_s=120,
    deadline_s=600,
    deadline_max_s=3600,
    max_attempts=5,
    model="claude-sonnet-5-5",
    max_length=100_000,
)
BATCH = LaneSpec(
    name="batch",
    rank=30,
    slots=4,
    target_wait_s=60,  # people wait for the whole batch, not for one request
    call_timeout_s=300,
    deadline_s=86_400,
    deadline_max_s=86_400,
    max_attempts=8,
    model="claude-haiku-5-5",
    max_length=1_000_000,
    batches=BatchSpec(enabled=True),
)

DEFAULT_LANES: tuple[LaneSpec, ...] = (CRITICAL, NORMAL, BATCH)
MOST_LANES = 16
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
RESERVED = frozenset(
    {
        "requests", "due", "delay", "dead", "fallen", "events", "control", "side", "reply", "webhooks", "batches",
        "tickets",
    }
)  # fmt: skip
"""No lane may have these names: our other exchanges and queues have them."""


def nearest(lanes: Sequence[LaneSpec], rank: int) -> LaneSpec:
    """The lane whose rank is nearest; of two, the less urgent one. A new lane is like the default lane that this
    finds."""
    return min(lanes, key=lambda lane: (abs(lane.rank - rank), -lane.rank))


def usual(lanes: Sequence[LaneSpec]) -> LaneSpec:
    """The lane of HTTP calls that name none: `normal`, or where there is none, the nearest one."""
    return nearest(lanes, NORMAL.rank)
