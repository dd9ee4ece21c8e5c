"""The scenarios of the replay: each has a slice of the recordings, and says how the provider and the workers behave."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.replaying.traces import Traces, packed
from consumers.limits.base import Amounts
from consumers.limits.spec import BudgetSpec
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, NORMAL

LANES: Final = (CRITICAL.name, NORMAL.name, BATCH.name)
LIMITS: Final = Amounts(180, 240_000, 40_000)
"""The ratio of the limits per minute to each other; `demand` sets their size."""
SERVICE: Final[Mapping[str, str]] = {"chat": CRITICAL.name, "code": NORMAL.name}
"""The lane of each recorded service."""
SLICE_S: Final = (1455.0, 1695.0)
"""The first and last second of four minutes of the recordings. At a demand of 104 % of the input limit, chat asks for
62 % and code completion for 42 %."""


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
    """What critical and normal together ask for, as a part of the limit that they need most of. The recording stays as
    it is; the provider's limits are scaled to reach this."""
    bucket_s: float = 60.0
    """How many seconds' worth the provider's buckets hold."""
    slice_s: tuple[float, float] = SLICE_S
    processes: int = 1
    copies: int = 1
    """How many times each recorded request is sent, within ten seconds."""
    large: tuple[Large, ...] = ()
    down_s: tuple[float, float] | None = None
    """The period in which the provider answers every call with 500."""
    is_cold: bool = False
    """True: nothing is known of the account at the beginning. False: one answer was seen before."""
    slots: Mapping[str, int] | None = None
    """For each lane: how many requests may be at the gate or in a call at a time; the others wait in the broker. None:
    no limit."""
    jobs: int = 8
    """How many batch jobs wait at any time."""
    spec: BudgetSpec = field(default_factory=BudgetSpec)
    traces: Traces = field(default_factory=packed, repr=False)
    seed: int = 1


LARGEST: Final = "thousand-104"
"""A thousand workers on one account (docs/scale.md); it runs only if it is named, because it takes long."""
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
