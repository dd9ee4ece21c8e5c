"""The values with which other code uses a provider's budget: amounts, settings, reservations, forecasts of waits, and
what a response says about limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from lanekeeper.contract.problems import LanekeeperError
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, NORMAL, LaneSpec, nearest


class Amounts(NamedTuple):
    """What a call to a provider uses, or what an account's limits allow per minute."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


NOTHING: Final = Amounts()
INPUT: Final = 1
OUTPUT: Final = 2
REASONS: Final = ("rpm", "itpm", "otpm")
CONCURRENCY: Final = "concurrency"


# ---- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountCaps:
    """The most that one account may use per minute, as the operator has set it; None: as much as the provider
    allows."""

    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    concurrency: int | None = None

    def per_minute(self) -> tuple[float | None, float | None, float | None]:
        return (self.requests, self.input_tokens, self.output_tokens)


NO_CAPS = AccountCaps()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How much of one account may be in batches that have not ended; None: no limit."""

    requests: int = 100_000
    tokens: int | None = None


DEFAULT_SHARES: Mapping[str, float] = MappingProxyType({CRITICAL.name: 0.30, NORMAL.name: 0.20, BATCH.name: 0.05})


def shares_of(lanes: Sequence[LaneSpec], given: Mapping[str, float]) -> dict[str, float]:
    """Each lane's share, the most urgent lane first: the one in `given`, else that of the default lane with the nearest
    rank. The latter are lowered if they would be more together than those of the default lanes."""
    default = {
        lane.name: DEFAULT_SHARES.get(lane.name) or DEFAULT_SHARES[nearest(DEFAULT_LANES, lane.rank).name]
        for lane in lanes
        if lane.name not in given
    }
    factor = min(1.0, sum(DEFAULT_SHARES.values()) / max(sum(default.values()), 1e-9))
    return {lane.name: given.get(lane.name) or factor * default[lane.name] for lane in lanes}


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """The settings of the budget of provider calls."""

    shares: Mapping[str, float] = field(default_factory=lambda: DEFAULT_SHARES)
    """Each lane's share of every token bucket, above 0 and up to 1, the most urgent lane first: this part of what flows
    into the bucket is saved for the lane alone."""
    ranks: Mapping[str, int] = field(default_factory=lambda: {lane.name: lane.rank for lane in DEFAULT_LANES})
    burst_s: float = 60.0
    """The largest size of a bucket, in seconds' worth of its limit (up to 60). Up to this, a bucket is as large as
    responses show the provider's own to be."""
    accounts: Mapping[str, AccountCaps] = field(default_factory=dict)
    """The operator's caps by the name of an account (`Route.account`) or of a provider."""
    start: Amounts = Amounts(50, 30_000, 8_000)  # noqa: RUF009  a value that cannot change
    """The limits per minute that are assumed until the provider has announced its own: those of the smallest
    accounts."""
    first_output_tokens: int = 512
    first_bytes_per_token: float = 3.5
    overflow_s: float | None = None
    """A request that would wait longer than this for a provider's budget goes to the next provider that may serve it,
    if the wait there is shorter. None: `LaneSpec.target_wait_s`."""
    hold_s: float = 120.0
    """How long a request may wait for budget in a worker. After that it is deferred, because the broker takes back a
    delivery that is not settled for long."""

    def caps(self, account: str) -> AccountCaps:
        return self.accounts.get(account) or self.accounts.get(account.partition("/")[0], NO_CAPS)


# ---- calls and waits -------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What is reserved of an account's budget for one call. It must be settled when the call has ended; settling it
    again has no effect."""

    account: str
    lane: str
    amounts: Amounts
    from_savings: Amounts = NOTHING
    at_s: float = 0.0
    request: str = ""
    is_refused: bool = False
    """The provider has answered 429 to the call: it counted more for it than was reserved. So nothing is given back."""
    is_settled: bool = False


@dataclass(slots=True)
class CallInProgress:
    """A running call to a provider, of which something is known before it ends."""

    began_s: float
    used: Callable[[], Amounts | None] = lambda: None
    """What the call has used so far; None if that is unknown."""


class Wait(NamedTuple):
    """A forecast of how long a request would wait for budget, and for which limit it would wait longest."""

    seconds: float
    reason: str
    is_known: bool = True
    """Whether the limit is known. No request is refused because of a guess."""

    def is_too_late(self, now_s: float, until_s: float | None) -> bool:
        return self.is_known and until_s is not None and now_s + self.seconds > until_s


class WaitTooLong(LanekeeperError):
    """The request cannot get a provider's budget in time for its deadline."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWaiting:
    """How many requests of one lane wait until the limits of one account at the provider allow their calls, and why."""

    count: int
    reason: str
    oldest_s: float
    is_known: bool = True


# ---- what a response says --------------------------------------------------------------------------------------------

ROUNDED_BY: Final = (1.0, 500.0, 500.0)
"""By how much the header `remaining` may be below the true value: tokens are rounded to thousands."""
ROUNDED_UP_BY: Final = (0.0, 500.0, 500.0)
LEAST_LIMITS: Final = (1.0, 1000.0, 1000.0)
"""Lower limits per minute in a provider's headers are ignored: no account has them, and they would block all calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHeaders:
    """What a response's headers say about one limit: the limit per minute, and how much is left of it."""

    limit: float | None = None
    remaining: float | None = None


class RateHeaders(NamedTuple):
    """What the headers of one response say about an account's limits, in the order of `Amounts`."""

    requests: BucketHeaders
    input_tokens: BucketHeaders
    output_tokens: BucketHeaders


class Kind(StrEnum):
    """The kind of a provider's response, as far as it says something about the account's limits."""

    ANSWERED = "answered"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What one response of the provider says about its account."""

    kind: Kind
    request: str = ""
    rate: RateHeaders | None = None
    retry_after_s: float | None = None
    counted: Amounts = NOTHING
    """The requests and tokens of this call that the provider had already subtracted from the account's limits when it
    computed `rate`."""
    took_s: float = 0.0
    """The seconds since the call began, which is the greatest possible age of the values in `rate`."""
