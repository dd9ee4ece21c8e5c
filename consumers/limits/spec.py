"""What is settled about the budget: each lane's share and patience, limits, first guesses. Wrong values are named."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from consumers.limits.amounts import Amounts
from topology.lanes import BATCH, CRITICAL, NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBudget:
    """What a lane may count on."""

    share: float
    """Of every bucket, 0 to 1: refilled for this lane alone. What it does not use is lent."""
    boost_s: float | None = None
    """A request that has waited longer goes before younger ones of the lane above; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What one account may use a minute at most, whatever the provider allows; None: what the provider allows."""

    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    concurrency: int | None = None
    """Calls at the same time."""

    def per_minute(self) -> tuple[float | None, float | None, float | None]:
        """In the order of `Amounts`."""
        return (self.requests, self.input_tokens, self.output_tokens)


DEFAULT_LANES: Mapping[str, LaneBudget] = MappingProxyType(
    {
        CRITICAL.name: LaneBudget(share=0.30),
        NORMAL.name: LaneBudget(share=0.20, boost_s=10),
        BATCH.name: LaneBudget(share=0.05, boost_s=30),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """The whole of it. The defaults are safe without knowing the account: limits are learned from its answers."""

    lanes: Mapping[str, LaneBudget] = field(default_factory=lambda: DEFAULT_LANES)
    """The most urgent first."""
    burst_s: float = 10.0
    """How many seconds' worth a bucket holds. The provider's holds up to 60; the less, the later a lull is made up for,
    and the less a burst finds."""
    accounts: Mapping[str, Caps] = field(default_factory=dict)
    """By the account's name (`Route.account`), or by that of its provider, for each of its accounts."""
    start: Amounts = Amounts(50, 30_000, 8_000)  # noqa: RUF009  a value that cannot change
    """A minute's limits, until the provider has told its own: of the smallest accounts."""
    first_output_tokens: int = 512
    """What an answer is expected to have where no request of its kind has ended yet."""
    first_bytes_per_token: float = 3.5
    overflow_s: float = 10.0
    """A wait longer than this goes to the next provider of the chain, if that one's is shorter."""
    hold_s: float = 120.0
    """How long a request may wait at the gate; then it is put off, so that the broker does not take it back."""
    spend_pause_s: float = 900.0
    """How long an account is left alone that has reached its spend limit."""

    def caps(self, account: str) -> Caps:
        """Of one account."""
        return self.accounts.get(account) or self.accounts.get(account.partition("/")[0], NO_CAPS)

    def problems(self, *, lanes: Collection[str], accounts: Collection[str] | None = None) -> list[str]:
        """Everything that is wrong, each with its name, what was found and what is allowed."""
        return [*self._of_lanes(lanes), *self._of_accounts(accounts), *self._of_figures()]

    def _of_lanes(self, known: Collection[str]) -> Iterator[str]:
        for name, lane in self.lanes.items():
            if name not in known:
                yield f"lanes.{name}: no such lane; known are {', '.join(known)}"
            if not 0 <= lane.share <= 1:
                yield f"lanes.{name}.share: {lane.share:g}; allowed is 0 to 1"
            if lane.boost_s is not None and not _is_positive(lane.boost_s):
                yield f"lanes.{name}.boost_s: {lane.boost_s:g}; more than 0, or none at all"
        for name in known:
            if name not in self.lanes:
                yield f"lanes.{name}: has no share; 0 is one"
        if (total := sum(lane.share for lane in self.lanes.values())) > 1 + 1e-9:
            yield f"lanes: the shares are {total:.0%} together; at most 100 %"

    def _of_accounts(self, known: Collection[str] | None) -> Iterator[str]:
        for name, caps in self.accounts.items():
            if known is not None and name not in known:
                yield f"accounts.{name}: no route uses it; known are {', '.join(known)}"
            for what in ("requests", "input_tokens", "output_tokens", "concurrency"):
                value = getattr(caps, what)
                if value is not None and not _is_positive(value):
                    yield f"accounts.{name}.{what}: {value:g}; more than 0, or none at all"

    def _of_figures(self) -> Iterator[str]:
        if not (_is_positive(self.burst_s) and self.burst_s <= 60):
            yield f"burst_s: {self.burst_s:g}; more than 0, at most 60"
        for what, value in self.start._asdict().items():
            if not _is_positive(value):
                yield f"start.{what}: {value:g}; more than 0"
        for what in ("first_output_tokens", "first_bytes_per_token", "overflow_s", "hold_s", "spend_pause_s"):
            if not _is_positive(value := getattr(self, what)):
                yield f"{what}: {value:g}; more than 0"


NO_CAPS = Caps()


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
