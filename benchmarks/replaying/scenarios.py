"""The scenarios of the replay: each has a slice of the recordings, or a steady load, and says how the provider and the
workers behave."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from consumers.limits.base import AccountCaps, Amounts, BudgetSpec
from topology.lanes import BATCH, CRITICAL, NORMAL

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A load of equally many requests in each lane, instead of a recording: most calls are short, one in eight is
    long. The provider has no limits per minute."""

    per_s: float = 60.0
    lasts_s: float = 90.0
    short_s: float = 0.05
    long_s: float = 2.0

    @property
    def mean_s(self) -> float:
        return (7 * self.short_s + self.long_s) / 8


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
    steady: Steady | None = None
    weather: float = 0.0
    """The part of the calls that the provider answers with 529 at random."""
    most_calls: int | None = None
    """The provider answers 529 to a call while it works on this many. None: there is no such number."""
    is_cold: bool = False
    """True: nothing is known of the account at the beginning. False: one answer was seen before."""
    jobs: int = 8
    """How many batch jobs wait at any time."""
    spec: BudgetSpec = field(default_factory=BudgetSpec)
    seed: int = 1


def _narrow(most_calls: int) -> Scenario:
    """A provider that can work on `most_calls` calls at a time, which the settings say; and half as many requests more
    than it can answer."""
    steady = Steady()
    return Scenario(
        name=f"narrow-{most_calls}",
        steady=replace(steady, per_s=1.5 * most_calls / steady.mean_s),
        most_calls=most_calls,
        spec=BudgetSpec(accounts={"replay": AccountCaps(concurrency=most_calls)}),
        jobs=0,
    )


OVERLOADS: Final = (
    *(
        Scenario(name=f"weather-{round(100 * weather)}", steady=Steady(), weather=weather, jobs=0)
        for weather in (0.0, 0.05, 0.12, 0.3, 0.6)
    ),
    _narrow(4),
    _narrow(40),
)
"""Answers 529: at random, whatever we do, and because of too many calls at a time."""
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
        Scenario(name="5s-104", bucket_s=5),
        Scenario(name="1s-104", bucket_s=1),
        Scenario(name="whole-104", slice_s=(0, 1800)),
        Scenario(name="three-104", processes=3),
        Scenario(name=LARGEST, processes=1000, copies=30, jobs=1000, slice_s=(1455.0, 1575.0)),
        Scenario(name="cold-104", is_cold=True),
        Scenario(name="large-104", large=tuple(Large(lane=lane, at_s=60 + 60 * n) for n, lane in enumerate(LANES))),
        Scenario(name="down-104", down_s=(120, 180)),
        *OVERLOADS,
    )
}
QUICK: Final = ("full-90", "full-104", "1s-104", "down-104")
