"""Lanes: the classes of urgency, such as `critical` and `batch`. Each lane has its own intake queue (new requests), due
queue (retried and delayed requests), and slots in each worker; a worker runs one request at a time in each slot.

No other file has code for a particular lane, because everything that differs by lane is a field of `LaneSpec`.
"""

from dataclasses import dataclass

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """The settings of one lane: its slots (how many requests run at the same time), time limits, models, and the
    lengths of its queues."""

    name: str
    slots: int
    """How many requests from the lane's intake (new ones) one process works on at the same time. It is also the
    prefetch of the process's consumer on this queue."""
    slots_min: int | None = None
    """How many idle slots (a slot serves one request at a time) this lane keeps for itself and never lends to other
    lanes. None: an eighth of `slots`, at least 1."""
    slots_max: int | None = None
    """The largest number of requests from the lane's intake that one process may work on at the same time, after slots
    were added (`consumers/capacity/lending.py`). Slots for the due queue are added in proportion. None: eight times
    `slots`. The default is this high because a slot costs little; how many slots are useful depends on the provider's
    rate limits."""
    target_wait_s: float = 10
    """If requests wait longer than this many seconds for a slot, the lane gets more slots, unless the provider is the
    bottleneck."""
    call_timeout_s: float
    """The time limit, in seconds, for one call to the provider. For a streamed answer, it limits the time to the first
    token, and every pause after it."""
    deadline_s: float
    """The default and the maximum of a request's deadline in seconds: the time from publishing (or from the end of its
    delay) to the final answer."""
    max_attempts: int
    model: str
    """The model that is called for requests that do not name one."""
    max_tokens: int = 1024
    """The value of `max_tokens` for requests that do not set it."""
    models: frozenset[str] | None = None
    """The models that requests may name; None allows every model."""
    max_length: int
    """How many messages the lane's intake queue holds at most. The broker refuses a publish to a full intake (nack)."""
    max_length_bytes: int = GIB
    side_queues: int = 8
    """How many side queues the lane has. If a tenant has many waiting requests, workers move them into one of these
    queues (docs/fairness.md). 0: no requests are moved."""

    @property
    def due_slots(self) -> int:
        """How many requests from the lane's due queue (retried and delayed ones) one process works on at the same time,
        in addition to `slots`: a quarter of `slots`, at least 1."""
        return max(1, self.slots // 4)

    @property
    def reserved_slots(self) -> int:
        """How many idle slots this lane keeps for itself and never lends to other lanes: `slots_min`, or an eighth of
        `slots`, at least 1."""
        return max(1, self.slots // 8) if self.slots_min is None else self.slots_min

    @property
    def most_slots(self) -> int:
        """How many requests from the lane's intake (new ones) one process may work on at the same time, after slots
        were added: `slots_max`, or eight times `slots`."""
        return 8 * self.slots if self.slots_max is None else self.slots_max

    @property
    def most_due_slots(self) -> int:
        """How many requests from the lane's due queue (retried and delayed ones) one process may work on at the same
        time, after slots were added: a quarter of `most_slots`, at least 1."""
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
    """A lane's rank by urgency: 0 is the most urgent of the default lanes. Lanes with other names come after these."""
    return _RANKS.get(lane, len(_RANKS))


_RANKS = {lane.name: rank for rank, lane in enumerate(DEFAULT_LANES)}
