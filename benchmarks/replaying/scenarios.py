"""What is replayed: which slice of the recordings, how dense, and what the provider does meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.replaying.traces import Traces, packed
from consumers.limits.amounts import Amounts
from consumers.limits.spec import BudgetSpec
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, NORMAL

LANES: Final = (CRITICAL.name, NORMAL.name, BATCH.name)
LIMITS: Final = Amounts(180, 240_000, 40_000)
"""A minute, as far as one stands to the other; how large they are `demand` says."""
SERVICE: Final[Mapping[str, str]] = {"chat": CRITICAL.name, "code": NORMAL.name}
"""Which lane the requests of a recorded service come in."""
SLICE_S: Final = (1455.0, 1695.0)
"""Four minutes of the recordings. Of 104 input tokens chat asks for 62 and code for 42."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """One request that is larger than all others."""

    lane: str
    at_s: float
    input_tokens: int = 100_000
    output_tokens: int = 500


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One replay. All times in it are seconds since it began."""

    name: str
    demand: float = 1.04
    """Of critical and normal together, of the limit that they ask most of. The recording is played as it is; the
    provider's limits are so much higher or lower that it comes to this."""
    bucket_s: float = 60.0
    """How many seconds' worth the provider's buckets hold."""
    slice_s: tuple[float, float] = SLICE_S
    processes: int = 1
    copies: int = 1
    """Each recorded request comes so many times, within ten seconds."""
    large: tuple[Large, ...] = ()
    down_s: tuple[float, float] | None = None
    """From when until when the provider answers every call 500."""
    is_cold: bool = False
    """Nothing has been heard of the account when it begins; else one answer."""
    slots: Mapping[str, int] | None = None
    """By lane, how many requests are at the gate or called at a time; the others wait in the broker. None: all are."""
    jobs: int = 8
    """Batch jobs that stand in line at any time."""
    spec: BudgetSpec = field(default_factory=BudgetSpec)
    traces: Traces = field(default_factory=packed, repr=False)
    seed: int = 1


LARGEST: Final = "thousand-104"
"""A thousand workers on one account (docs/scale.md); only where it is named, because it takes long."""
FULL: Final = tuple(
    Scenario(name=f"full-{round(100 * demand)}", demand=demand) for demand in (0.7, 0.9, 1.04, 1.1, 1.5)
)
SCENARIOS: Final[Mapping[str, Scenario]] = {
    each.name: each
    for each in (
        *FULL,
        Scenario(name="10s-104", bucket_s=10),
        Scenario(name="1s-104", bucket_s=1),
        Scenario(name="long-104", slice_s=(1350, 1710)),
        Scenario(name="whole-104", slice_s=(0, 1800)),
        Scenario(name="three-104", processes=3),
        Scenario(name=LARGEST, processes=1000, copies=30, jobs=1000, slice_s=(1455.0, 1575.0)),
        Scenario(name="slots-104", slots={lane.name: lane.slots for lane in DEFAULT_LANES}, is_cold=True),
        Scenario(name="cold-104", is_cold=True),
        Scenario(name="large-104", large=tuple(Large(lane=lane, at_s=60 + 60 * n) for n, lane in enumerate(LANES))),
        Scenario(name="down-104", down_s=(120, 180)),
    )
}
QUICK: Final = ("full-90", "full-104", "1s-104", "down-104")
