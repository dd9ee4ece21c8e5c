"""What the simulated API can be told when it starts. Every field maps to one option of `lanekeeper simulate`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptions:
    """Latency, limits and faults of a simulated API. The defaults answer everything at once."""

    api_key: str | None = None
    """The only key that is accepted; None accepts any, but not none at all."""
    models: frozenset[str] = frozenset()
    """Names that are accepted beside the known ones (`models.py`)."""
    latency_ms: float = 0.0
    """How long an answer takes at least; streamed, spread evenly over its events."""
    tokens_per_s: float | None = None
    """Speed of writing, in addition to the latency; None: no time."""
    output_tokens: int | None = None
    """Length of every answer (the echo, then filling words); None: the echo alone."""
    stream_deltas: int = 8
    """Into how many pieces a streamed block is cut, where it is long enough."""
    requests_per_minute: int = 1_000_000
    input_tokens_per_minute: int = 1_000_000_000
    output_tokens_per_minute: int = 1_000_000_000
    """The three limits hold for each model class (`models.limit_class`)."""
    burst_s: float = 60.0
    """How many seconds' worth a bucket holds: 1 enforces 60 a minute as 1 a second, as Anthropic may."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """Faults at random: a fault as in a marker (`faults.py`) and the share of calls that it hits, 0 to 1."""
    seed: int = 0
    """Of the random faults: the same calls in the same order meet the same faults."""
    keep_calls: int = 2_000
    """How many of the latest calls are kept to look at (`SimulatedAPI.calls`)."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Bodies beyond it are answered 413, as Anthropic does."""
