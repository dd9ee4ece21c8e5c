"""Options of the simulated API: those of `lanekeeper simulate`, and a few that only callers in Python can set."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptions:
    """Latency, limits and faults of a simulated API. With the defaults, it answers every call at once."""

    api_key: str | None = None
    """The only API key that is accepted. None: any key is accepted, but a call without a key is refused."""
    models: frozenset[str] = frozenset()
    """Model names that are accepted in addition to the known ones (`models.py`)."""
    latency_ms: float = 0.0
    """The least time, in ms, that an answer takes; in a stream it is spread evenly over the events."""
    tokens_per_s: float | None = None
    """The speed of the output, in tokens a second; the time is added to the latency. None: output takes no time."""
    output_tokens: int | None = None
    """The length of every answer in tokens: an echo of the prompt, then filler words up to this length. None: only the
    echo."""
    stream_deltas: int = 8
    """The number of pieces into which a content block is cut in a stream, if the block is long enough."""
    requests_per_minute: int = 1_000_000
    input_tokens_per_minute: int = 1_000_000_000
    output_tokens_per_minute: int = 1_000_000_000
    """The limits of requests, input tokens and output tokens a minute. Each class of models (`models.limit_class`) has
    its own three limits."""
    burst_s: float = 60.0
    """The size of a limit's token bucket, as the number of seconds in which it is filled. With 1, a limit of 60 a
    minute is enforced as 1 a second, which Anthropic may do as well."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """Random faults: the name of each fault, with parameters as in a prompt's marker (`faults.py`), and the share of
    calls that it hits, 0 to 1."""
    seed: int = 0
    """The seed of the random faults. With the same seed, the same calls in the same order get the same faults."""
    keep_calls: int = 2_000
    """How many of the latest calls `SimulatedAPI.calls` keeps."""
    max_body_bytes: int = 32 * 1024 * 1024
    """The maximum size of a call's body in bytes. A call with a larger body is answered with 413, as Anthropic does."""
