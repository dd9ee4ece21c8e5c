"""Lanes: the priority tiers, each an intake queue and a due queue with a pool of consumers of its own.

The only file that knows one lane from another. Everything that differs by lane is a field of `LaneSpec`.
"""

from dataclasses import dataclass

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """What is settled about one lane: how much it takes, how long it may take, what it asks of the model."""

    name: str
    slots: int
    """Requests of the intake that one process works on at the same time; its consumer's prefetch."""
    call_timeout_s: float
    """Bounds one attempt; streamed, its first token and every pause after it."""
    deadline_s: float
    """Default and maximum of the time from publishing (or the due time) to the final answer."""
    max_attempts: int
    model: str
    max_tokens: int = 1024
    models: frozenset[str] | None = None
    """Models that requests may name; None allows every model."""
    max_length: int
    """Messages that the intake holds before publishes are refused (not confirmed)."""
    max_length_bytes: int = GIB

    @property
    def due_slots(self) -> int:
        """Slots of the due queue, beside those of the intake: a quarter of the lane's, at least one."""
        return max(1, self.slots // 4)


CRITICAL = LaneSpec(
    name="critical",
    slots=16,
    call_timeout_s=60,
    deadline_s=120,
    max_attempts=4,
    model="claude-sonnet-5-5",
    max_length=10_000,
)
NORMAL = LaneSpec(
    name="normal",
    slots=8,
    call_timeout_s=120,
    deadline_s=600,
    max_attempts=5,
    model="claude-sonnet-5-5",
    max_length=100_000,
)
BATCH = LaneSpec(
    name="batch",
    slots=4,
    call_timeout_s=300,
    deadline_s=86_400,
    max_attempts=8,
    model="claude-haiku-5-5",
    max_length=1_000_000,
)

DEFAULT_LANES: tuple[LaneSpec, ...] = (CRITICAL, NORMAL, BATCH)
