"""Lanes: the priority tiers, each an intake queue and a due queue with a pool of consumers of its own.

The only file that knows one lane from another. Everything that differs by lane is a field of `LaneSpec`.
"""

from dataclasses import dataclass

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """The settings of one lane: slots, time limits, models, lengths of its queues."""

    name: str
    slots: int
    """Requests of the intake that one process works on at the same time; also its consumer's prefetch."""
    slots_min: int | None = None
    """How many idle slots it never lends. None: an eighth of its slots, at least one (critical: two)."""
    slots_max: int | None = None
    """The most slots it may have (`consumers/capacity/lending.py`), with due slots in proportion. None: eight times its
    slots. A slot costs little; the provider's budget decides how many are useful."""
    target_wait_s: float = 10
    """If requests wait longer for a slot, the lane gets more slots, unless the provider is the bottleneck."""
    call_timeout_s: float
    """The limit of one attempt. If it is streamed: of the time to the first token, and of every pause after it."""
    deadline_s: float
    """Default and maximum of the time from publishing (or the due time) to the final answer."""
    max_attempts: int
    model: str
    max_tokens: int = 1024
    models: frozenset[str] | None = None
    """Models that requests may name; None allows every model."""
    max_length: int
    """How many messages the intake holds before publishes are refused (not confirmed)."""
    max_length_bytes: int = GIB
    side_queues: int = 8
    """Queues for requests that are set aside (docs/fairness.md). 0: nothing is set aside."""

    @property
    def due_slots(self) -> int:
        """Slots of the due queue, beside those of the intake: a quarter of the lane's, at least one."""
        return max(1, self.slots // 4)

    @property
    def kept_slots(self) -> int:
        """Idle slots of the intake that are never lent."""
        return max(1, self.slots // 8) if self.slots_min is None else self.slots_min

    @property
    def most_slots(self) -> int:
        """Slots of the intake, added ones included."""
        return 8 * self.slots if self.slots_max is None else self.slots_max

    @property
    def most_due_slots(self) -> int:
        """Slots of the due queue, added ones included."""
        return max(1, self.most_slots // 4)


CRITICAL = LaneSpec(
    name="critical",
    slots=16,
    target_wait_s=1,  # a person waits for the answer
    call_timeout_s=60,
    deadline_s=120,
    max_attempts=4,
    model="claude-sonnet-5-5",
    max_length=10_000,
)
NORMAL = LaneSpec(
    name="normal",
    slots=8,
    target_wait_s=10,
    call_timeout_s=120,
    deadline_s=600,
    max_attempts=5,
    model="claude-sonnet-5-5",
    max_length=100_000,
)
BATCH = LaneSpec(
    name="batch",
    slots=4,
    target_wait_s=60,  # people wait for the whole batch, not for one request
    call_timeout_s=300,
    deadline_s=86_400,
    max_attempts=8,
    model="claude-haiku-5-5",
    max_length=1_000_000,
)

DEFAULT_LANES: tuple[LaneSpec, ...] = (CRITICAL, NORMAL, BATCH)


def urgency(lane: str) -> int:
    """Where a lane stands among the others: 0 is the most urgent."""
    return _PLACES.get(lane, len(_PLACES))


_PLACES = {lane.name: place for place, lane in enumerate(DEFAULT_LANES)}
